"""``crossdraft certify --samples FILE``: test an engine's sampler against the target, see `certificate.samples`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...util.limits import LEAST_DEVIATION
from ..options.sampling import sampling_from
from ..options.trust import trusted
from .model import DEFAULTS

if TYPE_CHECKING:
    from ...certificate.samples.foreign_samples import Decision, Distributions, Draws
    from ...certificate.samples.sampler_verdict import Verdict
    from ...certificate.samples.token_tree import TokenTree

#: Options that are valid with ``--samples``; all other options of ``certify`` are rejected.
OPTIONS = ("samples", "deviation", "first_tokens", "model", "raw", "temperature", "top_k", "top_p", "seed", "dtype")
OPTIONS += ("device", "json")
#: The allowed total variation by default.
DEVIATION = 0.02
#: Exit codes; 2 is reserved for usage errors.
EXIT = {"yes": 0, "no": 1, "undecided": 3}


def main(args: argparse.Namespace) -> int:
    """Return 0 if the draws are within ``--deviation`` of the target's distribution, 1 if not, 3 if they are too few.

    Raises:
        UsageError: an invalid option, line of the file or token.
        ModelError, NumericalError: a model that cannot be loaded, or returns NaN.
    """
    _check(args)
    deviation = DEVIATION if args.deviation is None else args.deviation
    from tqdm import tqdm

    from ...certificate.samples.foreign_samples import decide, read_draws

    all_draws = read_draws(args.samples)
    trees = [draws.tree() for draws in all_draws]
    distributions = _distributions(args, all_draws, trees)
    total = sum(sum(1 for counts in tree.counts if counts) for tree in trees)
    with tqdm(total=total, unit=" prefixes", disable=None, leave=False, file=sys.stderr) as bar:
        decision = decide(
            all_draws,
            trees,
            distributions,
            deviation=deviation,
            seed=args.seed,
            first_tokens=args.first_tokens,
            progress=bar.update,
        )
    if args.json:
        print(json.dumps(_as_json(decision), indent=2))
    else:
        _print(decision, args.temperature)
    return EXIT[decision.verdict.outcome]


def _check(args: argparse.Namespace) -> None:
    other = ("toy", "verifier", "draft", "drafter", "drafter_option", "steps", "gamma")
    defaults = {**dict.fromkeys(other), "bounds": False, **DEFAULTS}
    for name, default in defaults.items():
        if name not in (*OPTIONS, "trust_remote_code") and getattr(args, name) != default:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --samples; remove it")
    if args.deviation is not None and not LEAST_DEVIATION <= args.deviation < 0.5:
        raise UsageError(f"--deviation must be at least {LEAST_DEVIATION:g} and below 0.5, got {args.deviation:g}")
    trusted(args, [args.model])


def _distributions(args: argparse.Namespace, all_draws: Sequence[Draws], trees: Sequence[TokenTree]) -> Distributions:
    """The target's distribution at every position of the draws, from the file or from the model."""
    from ...api.build import make_slots
    from ...certificate.samples.foreign_samples import check_vocabulary, file_distributions
    from ...certificate.samples.token_tree import distributions
    from ...models.chat import encode
    from ...models.load import load_model

    sampling = sampling_from(args)
    without = [draws for draws in all_draws if draws.probs is None]
    if not without:
        if args.model:
            raise UsageError(f"--model: every line of {args.samples} has its own probs; remove --model")
        return file_distributions(all_draws)
    if not args.model:
        raise UsageError(
            f"{without[0].where}: the line has a prefix and no distribution (probs); give the target as --model"
        )
    if len(without) < len(all_draws):
        example = next(draws for draws in all_draws if draws.probs is not None)
        raise UsageError(
            f"{example.where}: this line has a distribution (probs), {without[0].where} a prefix; use separate files"
        )
    loaded = load_model(
        args.model, dtype=args.dtype, device=args.device, trust_remote_code=args.model in args.trust_remote_code
    )
    prompts: list[list[int]] = []
    for draws in all_draws:
        tokens = draws.prefix
        if isinstance(tokens, str):
            tokens = encode(loaded.tokenizer, [tokens], chat=False if args.raw else None)
        if not tokens:
            raise UsageError(f"{draws.where}: the prompt has no tokens")
        # The last token of a sequence is not fed.
        length = len(tokens) + max(map(len, draws.sequences), default=1) - 1
        if loaded.context_length is not None and length > loaded.context_length:
            raise UsageError(
                f"{draws.where}: {length} tokens exceed the context length of {loaded.name}, {loaded.context_length}"
            )
        prompts.append(tokens)
    size = make_slots(loaded, 1, 1).vocab_size
    for draws, tokens in zip(all_draws, prompts, strict=True):
        if max(tokens) >= size:
            raise UsageError(f"{draws.where}: token {max(tokens)} is outside the vocabulary of {size} tokens")
        check_vocabulary(draws, size)

    def make(rows: int, length: int) -> Any:
        return make_slots(loaded, rows, length)

    return distributions(make, prompts, trees, sampling, f"target '{args.model}'", loaded.context_length)


# -- output ------------------------------------------------------------------------------------------------------


def _as_json(decision: Decision) -> dict[str, Any]:
    from ...certificate.samples.sampler_verdict import LEVEL

    fields = {"verdict": decision.verdict.outcome, "level": LEVEL, **_fields(decision.verdict)}
    first = decision.first_tokens
    return fields | {"first_tokens": None if first is None else {"verdict": first.outcome, **_fields(first)}}


def _fields(verdict: Verdict) -> dict[str, Any]:
    fields = asdict(verdict)
    del fields["outcome"]
    fields["by_prefix"] = [{"prefix": where, "draws": n, "p_value": p} for where, n, p in verdict.by_prefix]
    return fields


def _print(decision: Decision, temperature: float) -> None:
    from tabulate import tabulate

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
    print(tabulate(table, headers="keys", tablefmt="simple", disable_numparse=True))
    print(
        f"{verdict.draws:,} draws after {verdict.prefixes:,} prefixes; mean log P of the drawn tokens "
        f"{verdict.log_p:.3f}, expected {verdict.expected_log_p:.3f}. TV is averaged over draws, bounds hold at 95 %."
    )
    if first is not None:
        print(
            f"First tokens of sequences ({first.draws:,}) come from the prefill pass and do not count in the verdict "
            f"(--first-tokens includes them): {_sentence(first)}"
        )
    elif decision.has_next_tokens:
        print(
            "The first token after a prompt comes from the prefill pass, without drafting; record sequences to test "
            "speculative decoding."
        )
    print(_sentence(verdict))
    if verdict.outcome == "yes":
        print(_scope(verdict))


def _sentence(verdict: Verdict) -> str:
    from ...certificate.samples.sampler_verdict import LEVEL

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


def _scope(verdict: Verdict) -> str:
    """The deviations that the verdict "yes" covers."""
    text = (
        "This covers a different temperature, and shifts of probability between more and less probable tokens that are "
        "common to all prefixes (truncation, a mixture with a flatter or sharper distribution, tail against head)"
    )
    if verdict.each_prefix:
        return (
            f"{text}, and shifts between the cells of each prefix: up to 16 groups of tokens of similar probability, "
            "the most probable ones in groups of one. Exchanges within a group are not covered."
        )
    return (
        f"{text}. Deviations in opposite directions at different prefixes, and exchanges between tokens of similar "
        "probability, are not covered: they require many draws at each prefix."
    )
