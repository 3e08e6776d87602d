"""``crossdraft diagnose``: the likely cause of a low acceptance rate."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from crossdraft.framework.cli.options.run import JsonOptions
from crossdraft.framework.cli.options.sampling import SamplingOptions
from crossdraft.framework.cli.options.trust import TrustOptions
from crossdraft.framework.contracts.command import Argument, Command
from crossdraft.framework.errors import UsageError
from crossdraft.framework.util.limits import MOST_PROMPTS, MOST_REPLAYED, MOST_TOKENS

from ..baseline_responses import baseline_responses, duration, log

if TYPE_CHECKING:
    from crossdraft.framework.api.build import Configured
    from crossdraft.framework.contracts.models import LoadedModel
    from crossdraft.framework.contracts.sampling import Sampling

    from ...diagnosis.trials import Trial, TrialResult
    from ...replay.response import Response
    from ...replay.teacher_forcing.lazy_models import Target

_COUNTERS = "what an engine counted (without a model)"


class Diagnose(SamplingOptions, TrustOptions, JsonOptions, Command):
    """The cause of a low acceptance rate: from counters, or by trials of common mistakes on responses.

    Raises:
        UsageError: options that cannot be combined; a drafter that cannot be replayed.
    """

    name: ClassVar[str] = "diagnose"

    counters: Annotated[tuple[str, ...], Argument("SOURCE", group=_COUNTERS)] = Field(
        (),
        description="log, metrics or responses of an engine, or a mapping with the circumstances: "
        "'{source: FILE, temperature: 0, batch_size: 1, context: 512}' (one, or two to compare)",
    )
    target: Annotated[str, Argument("MODEL", requires="drafter")] = Field("", description="target model")
    drafter: Annotated[str, Argument("NAME", requires="target")] = Field(
        "", description="drafter: a name, or a mapping as in recipes: '{name: eagle3, model: my-heads}'"
    )
    files: Annotated[bool, Argument(requires="drafter")] = Field(
        False, description="how engines read the keys of the heads' config.json; no model is run"
    )
    prompts: Annotated[str, Argument("SOURCE")] = Field("builtin", description="prompts")
    responses: Annotated[int, MOST_PROMPTS] = Field(16, ge=1, description="number of prompts to decode")
    max_new_tokens: Annotated[int, MOST_TOKENS] = Field(64, ge=1, description="maximum tokens per response")
    gamma: Annotated[int, MOST_REPLAYED] = Field(4, ge=1, description="draft length")
    dtype: str = Field("auto", description="dtype of the models")
    device: str = Field("auto", description="device of the models")

    @model_validator(mode="after")
    def _has_an_input(self) -> Diagnose:
        if not self.target and not self.counters:
            raise UsageError(
                "diagnose requires --counters (what an engine counted), or --target and --drafter (models to replay)"
            )
        return self

    def run(self) -> int:
        if not self.target:
            from .counters import signatures_of

            print(signatures_of(self.counters, {}, self.json_))
            return 0
        return self._replayed()

    def _replayed(self) -> int:
        from crossdraft.framework.api.build import configured
        from crossdraft.framework.models.checkpoint import load_checkpoint
        from crossdraft.framework.recipe.recipe import Strategy

        from ...diagnosis.trials import inconclusive, likely_causes, responses_needed, run_trials
        from ...replay.teacher_forcing.lazy_models import Target
        from .files import target_facts

        strategy = Strategy.parse(self.drafter, "--drafter")
        drafter = configured("drafters", {"name": strategy.name, **strategy.config})
        if self.files:
            from .files import files_of

            print(files_of(drafter, self.target, self.json_))
            return 0
        options = {"device": self.device, "trust_remote_code": self.trusted([self.target], [self.drafter])}
        target = Target(self.target, self.sampling, dtype=self.dtype, **options)
        trials = list(_trials(self, drafter, target, options))
        results: list[TrialResult] = []
        start = time.perf_counter()
        for result in run_trials(drafter, trials, self.gamma):
            results.append(result)
            if len(results) == 1:
                seconds = time.perf_counter() - start
                log(f"trying {len(trials) - 1} common mistakes, about {duration(seconds)} each")
        likely, facts = likely_causes(results), []
        if _has_heads(drafter):
            facts = target_facts(load_checkpoint(drafter[1].model), target.name, target.loaded.sha256)
        if results[0].warning:
            facts.append(results[0].warning)
        if self.json_:
            open_questions = [result.misconfiguration.mistake for result in inconclusive(results)]
            report = {
                "facts": facts,
                "likely": list(map(_json, likely)),
                "tried": list(map(_json, results)),
                "inconclusive": open_questions,
                "responses_needed": responses_needed(results) if open_questions else None,
            }
            print(json.dumps(report))
        else:
            _print(results, likely, facts)
        return 0


def _trials(args: Diagnose, drafter: Configured, target: Target, options: dict[str, Any]) -> Iterator[Trial]:
    from crossdraft.framework.contracts.misconfiguration import Misconfiguration

    from ...diagnosis.trials import Trial, greedy_drafts
    from ...replay.teacher_forcing.lazy_models import Target

    responses = _responses(args, target.sampling)
    yield Trial(Misconfiguration("", ""), target, responses)
    for suspect in (*greedy_drafts(drafter, target.sampling), *_head_misconfigurations(drafter, target.loaded)):
        yield Trial(suspect, target, responses)
    if getattr(target.loaded.tokenizer, "chat_template", None):
        raw = _responses(args, target.sampling, chat=False)
        mistake = "the drafter was trained without the chat template of the prompts"
        yield Trial(Misconfiguration(mistake, "send prompts as plain text, or train it on conversations"), target, raw)
    precision = str(target.loaded.model.dtype).removeprefix("torch.")
    if precision != "float32":
        exact = Target(args.target, target.sampling, dtype="float32", **options)
        mistake = f"{precision} is not precise enough for the drafter or the target"
        # The recorded log-probabilities are those at the lower precision.
        unknown = [replace(response, log_p=None) for response in responses]
        yield Trial(Misconfiguration(mistake, "run them with --dtype float32"), exact, unknown)


def _head_misconfigurations(drafter: Configured, target: LoadedModel) -> Sequence[Any]:
    """Possible misconfigurations of the heads that the drafter loads; empty without heads."""
    from crossdraft.framework.contracts.models import TRANSFORMERS
    from crossdraft.framework.models.checkpoint import load_checkpoint

    cls, config = drafter
    if target.backend != TRANSFORMERS or not _has_heads(drafter):
        return ()
    return list(cls.misconfigurations(config, load_checkpoint(config.model), target.model))


def _has_heads(drafter: Configured) -> bool:
    """True if the drafter loads heads, which read the target's hidden states."""
    from crossdraft.framework.contracts.sampling import Sampling

    cls, config = drafter
    return bool(cls.traits(config, Sampling()).hidden_layers) and isinstance(getattr(config, "model", None), str)


def _responses(args: Diagnose, sampling: Sampling, chat: bool | None = None) -> list[Response]:
    from ...replay.responses import Reader

    name, consent = args.target, args.target in args.trust_remote_code
    limits = {"limit": args.responses, "maximum": args.max_new_tokens}
    options = {"chat": chat, "dtype": args.dtype, "device": args.device, "trust_remote_code": consent}
    path = baseline_responses(name, args.prompts, sampling, **limits, **options)
    return list(Reader(target=name, sampling=sampling, processed=True).read([str(path)]))


def _json(result: TrialResult) -> dict[str, Any]:
    row = result.row
    fields: dict[str, Any] = {
        "mistake": result.misconfiguration.mistake,
        "cure": result.misconfiguration.cure,
        "reason": result.reason,
    }
    if row is not None and row.block_efficiency is not None:
        fields |= {"gamma": row.gamma, "marginal": row.marginal, "block_efficiency": row.block_efficiency.value}
    if result.gain is not None:
        fields |= {"gain": result.gain.value, "gain_low": result.gain.low, "gain_high": result.gain.high}
    return fields


def _print(results: Sequence[TrialResult], likely: Sequence[TrialResult], facts: Sequence[str]) -> None:
    from crossdraft.framework.util.estimate import estimate_text
    from crossdraft.framework.util.table import Alignment, Table

    from ...diagnosis.trials import inconclusive

    base, rows = results[0], []
    ordered = sorted(results[1:], key=lambda r: -1.0 if r.gain is None else r.gain.value, reverse=True)
    for result in (base, *ordered):
        row = result.row
        if result.gain:
            gain = estimate_text(result.gain, "+")
        else:
            gain = "" if result is base else result.reason[:60] or "-"
        rows.append(
            [
                result.misconfiguration.mistake or "none (as configured)",
                " ".join(f"{value:.2f}" for value in row.marginal) if row else "-",
                f"{row.block_efficiency.value:.2f}" if row and row.block_efficiency else "-",
                gain,
            ]
        )
    columns: dict[str, Alignment] = dict.fromkeys(("hypothesis", "accepted at 1, 2, ..", "BE", "gain [95 %]"), "left")
    print(Table(columns, rows, widths=(60, None, None, 60)).markdown())
    print()
    if base.reason:
        print(f"The drafter does not draft as configured: {base.reason}")
    elif base.tally is not None and len(base.tally.categories) > 1:
        parts = ((name, base.tally.row(base.gamma, name)) for name in base.tally.categories)
        print(
            "Acceptance rate of the first drafted token, by category:",
            ", ".join(f"{name} {row.marginal[0]:.2f}" for name, row in parts if row.marginal),
        )
    for fact in facts:
        print(f"Note: {fact}.")
    if not likely and base.reason:
        print(f"None of the {len(results) - 1} common mistakes explains this error; fix it first.")
    elif not likely and inconclusive(results):
        print(_too_few(results))
    elif not likely:
        print(
            f"None of the {len(results) - 1} common mistakes explains it: every interval excludes a clear gain. "
            "Train the drafter longer or on similar prompts, or use another drafter."
        )
    for number, result in enumerate(likely, 1):
        first = "Most likely" if number == 1 else f"{number}. Possibly"
        row = result.row
        assert row is not None and row.block_efficiency is not None
        print(
            f"{first}: {result.misconfiguration.mistake} (BE {row.block_efficiency.value:.2f}). "
            f"Fix: {result.misconfiguration.cure}."
        )


def _too_few(results: Sequence[TrialResult]) -> str:
    """The conclusion if the intervals are too wide."""
    from crossdraft.framework.metrics.intervals import LEAST_PIECES

    from ...diagnosis.trials import inconclusive, responses_needed

    open_questions, needed = inconclusive(results), responses_needed(results)
    advice = f"about {needed} are needed" if needed else f"at least {LEAST_PIECES} are needed"
    few = f"too few to confirm or exclude {len(open_questions)} of the {len(results) - 1} common mistakes"
    return f"No conclusion: the responses are {few}; {advice} (--responses{f' {needed}' if needed else ''})."
