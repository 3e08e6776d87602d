"""``crossdraft certify-samples FILE``: test another sampler's draws against the target, see `certificate.samples`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from crossdraft import Argument, Command, Table, UsageError
from crossdraft.commands import SamplingOptions, TrustOptions

from ..limits import LEAST_DEVIATION
from ..report import Report

if TYPE_CHECKING:
    from ..samples.foreign_samples import Decision, Distributions, Draws
    from ..samples.sampler_verdict import Verdict
    from ..samples.token_tree import TokenTree

EXIT = {"yes": 0, "no": 1, "undecided": 3}  # exit codes; 2 is reserved for usage errors
_PLAN = "plan, instead of FILE"


class CertifySamples(SamplingOptions, TrustOptions, Command):
    """Test of the draws in a file, or without one the number of draws that show what a task's score cannot show.

    Raises UsageError: an invalid option, line of the file or token. Raises ModelError, NumericalError: a model that
    cannot be loaded, or returns NaN.
    """

    name: ClassVar[str] = "certify-samples"

    file: Annotated[Path | None, Argument("FILE", positional=True)] = Field(
        None, description="draws: JSONL with prompt, prefix or probs, and counts or samples"
    )
    deviation: float = Field(0.02, ge=LEAST_DEVIATION, lt=0.5, description="total variation of a token to decide on")
    first_tokens: bool = Field(
        False, description="include the first tokens of sequences, which come from the prefill pass, in the verdict"
    )
    model: Annotated[str, Argument("NAME")] = Field("", description="target: a name, a directory or a Hub id")
    raw: bool = Field(False, description="do not apply the chat template")
    seed: int = Field(0, ge=0, description="random seed")
    dtype: str = Field("auto", description="dtype of the target")
    device: str = Field("auto", description="device")
    questions: Annotated[int | None, Argument("N", group=_PLAN)] = Field(
        None, ge=1, le=10**9, description="number of questions of a task"
    )
    score: Annotated[float | None, Argument("S", group=_PLAN)] = Field(
        None, ge=LEAST_DEVIATION, lt=1, description="share of its right answers, 0 to 1"
    )
    changed: Annotated[float | None, Argument("C", group=_PLAN)] = Field(
        None,
        ge=LEAST_DEVIATION,
        lt=1,
        description="share of questions whose grade differs between two runs of one server (default: 2 S (1 - S), the "
        "most)",
    )
    json_: bool = Field(False, description="print JSON")

    def run(self) -> int:
        """Return 0 if the draws are within the deviation of the target's distribution, 1 if not, 3 if too few."""
        if (self.file is None) == (self.questions is None or self.score is None):
            raise UsageError("give FILE, the draws to test; or --questions and --score of a task, to plan the draws")
        if self.file is None:
            self._plan().emit(self)
            return 0
        self.trusted([self.model])
        from tqdm import tqdm

        from ..samples.foreign_samples import decide, read_draws

        all_draws = read_draws(self.file)
        trees = [draws.tree() for draws in all_draws]
        distributions = self._distributions(all_draws, trees)
        total = sum(sum(1 for counts in tree.counts if counts) for tree in trees)
        with tqdm(total=total, unit=" prefixes", disable=None, leave=False, file=sys.stderr) as bar:
            decision = decide(
                all_draws,
                trees,
                distributions,
                deviation=self.deviation,
                seed=self.seed,
                first_tokens=self.first_tokens,
                progress=bar.update,
            )
        Report(lambda: _text(decision), lambda: _as_json(decision)).emit(self)
        return EXIT[decision.verdict.outcome]

    def _plan(self) -> Report:
        """The difference of scores that the task can show, and the draws that show or exclude the deviation."""
        from ..samples.sampler_verdict import POWER, ScorePlan, draws_to_exclude, draws_to_show

        assert self.questions is not None and self.score is not None
        limit, bias = 2 * self.score * (1 - self.score), self.deviation
        if self.changed is not None and self.changed > limit * (1 + 1e-9):
            raise UsageError(
                f"--changed must be at most {limit:g}, got {self.changed:g}: with {self.score:g} of the answers right, "
                "no more grades differ between two runs of one server; correct it or --score, or remove --changed"
            )
        plan = ScorePlan(self.questions, self.score, self.changed)
        visible, needed = plan.visible, plan.needed(bias)
        exclude, show = draws_to_exclude(bias), draws_to_show(bias)
        data = {"visible_difference": visible, "questions_needed": needed, "power": POWER}
        data |= {"draws_to_show": show, "draws_to_exclude": exclude}
        rows = [
            [f"score of {self.questions:,} questions", f"{100 * visible:.1f} points", f"{needed:,} questions, twice"],
            ["certify-samples", f"TV {bias:g} a token", f"{show:,} tokens"],
        ]
        columns = ["", "shows", f"to show a bias of {bias:g}"]
        grades = "independent answers" if self.changed is None else f"{100 * self.changed:g} % of the grades changing"
        text = (
            f"{Table(columns, rows).text()}\n"
            f"\nscore: with and without drafting, {self.score:g} right, {grades}, level 0.05, probability {POWER:g}\n"
            f"bias: a TV of {bias:g} at the token that decides an answer moves the score by at most "
            f"{100 * bias:g} points\n"
            f"draws: tokens of any responses, about {-(-show // 128):,} of 128 tokens; if the sampler is right, "
            f"{exclude:,} tokens exclude that bias"
        )
        return Report(lambda: text, lambda: data)

    def _distributions(self, all_draws: Sequence[Draws], trees: Sequence[TokenTree]) -> Distributions:
        """The target's distribution at every position of the draws, from the file or from the model."""
        from crossdraft import load_model
        from crossdraft.models import encode, make_slots

        from ..replay.response import check_text
        from ..samples.foreign_samples import check_vocabulary, file_distributions
        from ..samples.token_tree import distributions

        without = [draws for draws in all_draws if draws.probs is None]
        if not without:
            if self.model:
                raise UsageError(f"--model: every line of {self.file} has its own probs; remove --model")
            return file_distributions(all_draws)
        if not self.model:
            raise UsageError(
                f"{without[0].place}: the line has a prefix and no distribution (probs); give the target as --model"
            )
        if len(without) < len(all_draws):
            example = next(draws for draws in all_draws if draws.probs is not None)
            raise UsageError(
                f"{example.place}: this line has a distribution (probs), {without[0].place} a prefix; use separate "
                "files"
            )
        loaded = load_model(
            self.model, dtype=self.dtype, device=self.device, trust_remote_code=self.model in self.trust_remote_code
        )
        prompts, size = list[list[int]](), make_slots(loaded, 1, 1).vocab_size
        for draws in all_draws:
            tokens = draws.prefix
            if isinstance(tokens, str):
                tokens = encode(loaded.tokenizer, [tokens], chat=False if self.raw else None)
            check_vocabulary(draws, size)
            longest = max(draws.sequences, key=len, default=[0])
            check_text(draws.place, tokens, longest, size, loaded.context_length)
            prompts.append(tokens)

        options = self.sampling, f"target '{self.model}'", loaded.context_length
        return distributions(partial(make_slots, loaded), prompts, trees, *options)


def _as_json(decision: Decision) -> dict[str, Any]:
    from ..samples.sampler_verdict import LEVEL

    fields = {"verdict": decision.verdict.outcome, "level": LEVEL, **_fields(decision.verdict)}
    first = decision.first_tokens
    return fields | {"first_tokens": None if first is None else {"verdict": first.outcome, **_fields(first)}}


def _fields(verdict: Verdict) -> dict[str, Any]:
    fields = asdict(verdict)
    del fields["outcome"]
    fields["by_prefix"] = [{"prefix": place, "draws": n, "p_value": p} for place, n, p in verdict.by_prefix]
    return fields


def _text(decision: Decision) -> str:
    verdict, first = decision.verdict, decision.first_tokens
    table = [
        {
            "statistic": statistic.name,
            "draws": f"{statistic.draws:,}",
            "estimate": statistic.estimate,
            "TV at least": "-" if statistic.tv_at_least is None else f"{statistic.tv_at_least:.3f}",
            "TV at most": "-" if statistic.tv_at_most is None else f"{statistic.tv_at_most:.3f}",
            "p": f"{statistic.p_value:.3g}",
        }
        for statistic in verdict.statistics
    ]
    lines = [
        Table.of(table).text(),
        f"{verdict.draws:,} draws after {verdict.prefixes:,} prefixes; mean log P of the drawn tokens "
        f"{verdict.log_p:.3f}, expected {verdict.expected_log_p:.3f}. TV is averaged over draws, bounds hold at 95 %.",
    ]
    if first is not None:
        lines.append(
            f"First tokens of sequences ({first.draws:,}) come from the prefill pass and do not count in the verdict "
            f"(--first-tokens includes them): {_sentence(first)}"
        )
    elif decision.has_next_tokens:
        lines.append(
            "The first token after a prompt comes from the prefill pass, without drafting; record sequences to test "
            "speculative decoding."
        )
    lines.append(_sentence(verdict))
    if verdict.outcome != "yes":
        return "\n".join(lines)
    text = (  # the deviations that it covers
        "This covers a different temperature, and shifts of probability between more and less probable tokens that are "
        "common to all prefixes (truncation, a mixture with a flatter or sharper distribution, tail against head)"
    )
    if verdict.each_prefix:
        lines.append(
            f"{text}, and shifts between the cells of each prefix: up to 16 groups of tokens of similar probability, "
            "the most probable ones in groups of one. Exchanges within a group are not covered."
        )
    else:
        lines.append(
            f"{text}. Deviations in opposite directions at different prefixes, and exchanges between tokens of similar "
            "probability, are not covered: they require many draws at each prefix."
        )
    return "\n".join(lines)


def _sentence(verdict: Verdict) -> str:
    from ..samples.sampler_verdict import LEVEL

    d, n = f"{verdict.deviation:g}", f"{verdict.more_draws:,}"
    if verdict.outcome == "yes":
        differs = verdict.p_value < LEVEL
        difference = f"; the difference is at least {verdict.tv_at_least:.3f}" if differs else ""
        return f"yes: within TV {d} at 95 % (at most {verdict.tv_at_most:.3f}, p = {verdict.p_value:.3g}{difference})."
    if verdict.outcome == "no":
        impossible = f"; {verdict.impossible:,} draws have probability 0" if verdict.impossible else ""
        return f"no: differs (p = {verdict.p_value:.3g}, TV at least {verdict.tv_at_least:.3f}{impossible})."
    if not verdict.each_prefix:
        return f"too few draws: {n} more draws needed, after any prefixes, to decide TV {d}."
    each = -(-verdict.more_draws // verdict.prefixes)
    prefixes = "this prefix" if verdict.prefixes == 1 else f"these {verdict.prefixes:,} prefixes ({each:,} each)"
    return f"too few draws: {n} more draws needed at {prefixes} to decide TV {d}."
