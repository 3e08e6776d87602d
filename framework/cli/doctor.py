"""``crossdraft doctor``: why a drafter agrees so little with its target."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, quoted
from ..util.limits import MOST_PROMPTS, MOST_REPLAYED, MOST_TOKENS, Limit
from .baseline_responses import decoded, duration, say
from .sampling_args import sampling_from
from .trust_args import add_consent, trusted_beside

if TYPE_CHECKING:
    from ..api.build import Configured
    from ..contracts.models import LoadedModel
    from ..contracts.sampling import Sampling
    from ..replay.doctor import Trial, TrialResult
    from ..replay.response import Response
    from ..replay.teacher_forcing.lazy_models import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``crossdraft doctor``."""
    parser.add_argument("--target", required=True, metavar="MODEL", help="the model that is drafted for")
    parser.add_argument(
        "--drafter",
        required=True,
        metavar="NAME",
        help="a name, or a mapping as in recipes: '{name: eagle3, model: my-heads}'",
    )
    parser.add_argument(
        "--prompts", default="builtin", metavar="SOURCE", help="prompts that the target answers (builtin)"
    )
    parser.add_argument("--responses", type=int, default=16, metavar="N", help="to so many of them (16)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="most tokens of a response (64)")
    parser.add_argument("--gamma", type=int, default=4, metavar="N", help="draft length (4)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the responses (1)")
    for name, kind in (("top-k", int), ("top-p", float), ("min-p", float)):
        parser.add_argument(f"--{name}", type=kind, help="of the responses (off)")
    parser.add_argument("--dtype", default="auto", help="of the models (auto)")
    parser.add_argument("--device", default="auto", help="that the models are run on (auto)")
    add_consent(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """0: examined; 2 (as UsageError): options that cannot be, or a drafter that cannot be replayed; 1: or be loaded."""
    from ..api.build import configured
    from ..recipe.recipe import Strategy
    from ..replay.doctor import inconclusive, likely_causes, responses_needed, run_trials
    from ..replay.teacher_forcing.lazy_models import Target

    limits: dict[str, Limit] = {
        "responses": MOST_PROMPTS, "max_new_tokens": MOST_TOKENS, "gamma": MOST_REPLAYED
    }  # fmt: skip
    for name, limit in limits.items():
        value = getattr(args, name)
        if value < 1 or (reason := limit.refusal(value)):
            raise UsageError(f"--{name.replace('_', '-')} {value}: {'it must be at least 1' if value < 1 else reason}")
    sampling = sampling_from(args)
    strategy = Strategy.parse(args.drafter, "--drafter")
    drafter = configured("drafters", {"name": strategy.name, **strategy.config})
    options = {"device": args.device, "trust_remote_code": trusted_beside(args, args.target)}
    target = Target(args.target, sampling, dtype=args.dtype, **options)
    trials = list(_trials(args, drafter, target, options))
    found: list[TrialResult] = []
    start = time.perf_counter()
    for one in run_trials(drafter, trials, args.gamma):
        found.append(one)
        if len(found) == 1:
            spent = time.perf_counter() - start
            say(f"{len(trials) - 1} usual mistakes are tried, one at a time, about {duration(spent)} each")
    likely, facts = likely_causes(found), _facts(drafter, target.loaded)
    if found[0].warning:
        facts.append(found[0].warning)
    if args.json:
        tried = list(map(_json, found))
        left = [one.misconfiguration.mistake for one in inconclusive(found)]
        needed = responses_needed(found) if left else None
        more = {"undecided": left, "responses_needed": needed}
        print(json.dumps({"facts": facts, "likely": [_json(one) for one in likely], "tried": tried, **more}))
    else:
        _print(found, likely, facts)
    return 0


def _trials(args: argparse.Namespace, drafter: Configured, target: Target, options: dict[str, Any]) -> Iterator[Trial]:
    from ..contracts.misconfiguration import Misconfiguration
    from ..replay.doctor import Trial, greedy_drafts
    from ..replay.teacher_forcing.lazy_models import Target

    responses = _responses(args, target.sampling)
    yield Trial(Misconfiguration("", ""), target, responses)
    for suspect in (*greedy_drafts(drafter, target.sampling), *_of_heads(drafter, target.loaded)):
        yield Trial(suspect, target, responses)
    if getattr(target.loaded.tokenizer, "chat_template", None):
        raw = _responses(args, target.sampling, chat=False)
        mistake = "the drafter was trained without the chat template that prompts are in"
        yield Trial(Misconfiguration(mistake, "send prompts as plain text, or train it on conversations"), target, raw)
    precision = str(target.loaded.model.dtype).removeprefix("torch.")
    if precision != "float32":
        exact = Target(args.target, target.sampling, dtype="float32", **options)
        mistake = f"{precision} is too coarse for the drafter, the target or both"
        # What was kept with the responses is log P at the lower precision.
        unknown = [replace(response, log_p=None) for response in responses]
        yield Trial(Misconfiguration(mistake, "run them with --dtype float32"), exact, unknown)


def _of_heads(drafter: Configured, target: LoadedModel) -> Sequence[Any]:
    """What may be wrong with the heads that the drafter loads, if it loads any."""
    from ..contracts.models import TRANSFORMERS
    from ..models.checkpoint import load_checkpoint

    cls, config = drafter
    if target.backend != TRANSFORMERS or not _has_heads(drafter):
        return ()
    return list(cls.misconfigurations(config, load_checkpoint(config.model), target.model))


def _has_heads(drafter: Configured) -> bool:
    """Does it load heads that are made for a target? Those read its hidden states."""
    from ..contracts.sampling import Sampling

    cls, config = drafter
    return bool(cls.traits(config, Sampling()).hidden_layers) and isinstance(getattr(config, "model", None), str)


def _responses(args: argparse.Namespace, sampling: Sampling, chat: bool | None = None) -> list[Response]:
    from ..replay.responses import Reader

    name, consent = args.target, args.target in args.trust_remote_code
    limits = {"limit": args.responses, "most": args.max_new_tokens}
    options = {"chat": chat, "dtype": args.dtype, "device": args.device, "trust_remote_code": consent}
    path = decoded(name, args.prompts, sampling, **limits, **options)
    return list(Reader(target=name, sampling=sampling, processed=True).read([str(path)]))


def _facts(drafter: Configured, target: LoadedModel) -> list[str]:
    """What the files say by themselves: the target that heads were trained for."""
    from ..models.resolve import resolve
    from ..util.input_files import read_json
    from ..util.limits import CONFIG_BYTES

    if not _has_heads(drafter):
        return []
    path = resolve(drafter[1].model, heads=True).path / "training.json"
    made = read_json(path, CONFIG_BYTES) if path.is_file() else {}
    digest = made.get("target_sha256") if isinstance(made, dict) else None
    if not isinstance(digest, str) or not digest:
        return ["the heads do not say which checkpoint of the target they were trained for"]
    if digest == target.sha256:
        return []
    return [
        f"the heads were trained for other weights than those of {target.name}: for {quoted(digest[:12])}, these are "
        f"{quoted(target.sha256[:12])}; take the target that they were made for"
    ]


def _json(one: TrialResult) -> dict[str, Any]:
    row = one.row
    found: dict[str, Any] = {
        "mistake": one.misconfiguration.mistake,
        "cure": one.misconfiguration.cure,
        "reason": one.reason,
    }
    if row is not None and row.block_efficiency is not None:
        found |= {"gamma": row.gamma, "marginal": row.marginal, "block_efficiency": row.block_efficiency.value}
    if one.gain is not None:
        found |= {"gain": one.gain.value, "gain_low": one.gain.low, "gain_high": one.gain.high}
    return found


def _print(found: Sequence[TrialResult], likely: Sequence[TrialResult], facts: Sequence[str]) -> None:
    from tabulate import tabulate

    from ..replay.doctor import inconclusive
    from ..report.table_utils import estimate_text

    base, lines = found[0], []
    ordered = sorted(found[1:], key=lambda one: -1.0 if one.gain is None else one.gain.value, reverse=True)
    for one in (base, *ordered):
        row = one.row
        efficiency = None if row is None else row.block_efficiency
        lines.append(
            {
                "if": one.misconfiguration.mistake or "as it is",
                "accepted at 1, 2, ..": " ".join(f"{value:.2f}" for value in row.marginal) if row else "-",
                "BE": f"{efficiency.value:.2f}" if efficiency else "-",
                "gain [95 %]": estimate_text(one.gain, "+")
                if one.gain
                else ""
                if one is base
                else one.reason[:60] or "-",
            }
        )
    print(tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True, maxcolwidths=[60, None, None, 60]))
    print()
    if base.reason:
        print(f"As it is, it does not draft: {base.reason}")
    elif base.tally is not None and len(base.tally.categories) > 1:
        parts = ((name, base.tally.row(base.gamma, name)) for name in base.tally.categories)
        print(
            "Share of drafts whose first token is accepted, by category:",
            ", ".join(f"{name} {row.marginal[0]:.2f}" for name, row in parts if row.marginal),
        )
    for fact in facts:
        print(f"Noted: {fact}.")
    if not likely and base.reason:
        print(f"None of the {len(found) - 1} usual mistakes is why: mend what it says there first.")
    elif not likely and inconclusive(found):
        print(_too_few(found))
    elif not likely:
        print(
            f"None of the {len(found) - 1} usual mistakes explains it: no change makes it agree clearly more, and each "
            "interval excludes that one does. What is left is the drafter itself: train it longer, on such prompts, or "
            "take another."
        )
    for number, one in enumerate(likely, 1):
        first = "Most likely" if number == 1 else f"{number}. Possibly"
        row = one.row
        assert row is not None and row.block_efficiency is not None
        print(
            f"{first}: {one.misconfiguration.mistake} (BE {row.block_efficiency.value:.2f}). Cure: "
            f"{one.misconfiguration.cure}."
        )


def _too_few(found: Sequence[TrialResult]) -> str:
    """Advice for intervals that support no conclusion."""
    from ..metrics.intervals import LEAST_PIECES
    from ..replay.doctor import inconclusive, responses_needed

    left, needed = inconclusive(found), responses_needed(found)
    more = f"about {needed} would decide it" if needed else f"give more, at least {LEAST_PIECES}"
    few = f"they are too few to name or to exclude {len(left)} of the {len(found) - 1} usual mistakes"
    return f"No conclusion from these responses: {few}; {more} (--responses{f' {needed}' if needed else ''})."
