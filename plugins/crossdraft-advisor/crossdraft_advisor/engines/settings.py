"""Helpers for the settings of several engines."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from crossdraft.framework.errors import UsageError
from crossdraft.framework.models.adapters import refuse_adapter
from crossdraft.framework.models.quantization import refuse_quantized

from .acceptance import Acceptance
from .engine import Engine, Schedule


def needs_method(engine: Engine, acceptance: Acceptance) -> str:
    """The engine's name of the drafter. Raises UsageError if the drafter is unknown."""
    if not acceptance.drafter:
        raise UsageError(
            f"the drafter of {acceptance.source} is unknown; give it as --drafter: {', '.join(sorted(engine.methods))}"
        )
    return engine.methods[acceptance.drafter]


def needs_model(engine: Engine, acceptance: Acceptance) -> str:
    """The draft model. Raises UsageError if it is unknown."""
    if not acceptance.model:
        raise UsageError(
            f"the settings of {engine.name} require the draft model of {acceptance.drafter}; give it as --draft-path"
        )
    refuse_quantized(
        acceptance.model,
        f"{engine.name} does not quantise draft models on the fly; it requires quantised weights on disk",
    )
    refuse_adapter(acceptance.model, f"{engine.name} does not merge an adapter into its draft model")
    return acceptance.model


def ngram_sizes(acceptance: Acceptance) -> dict[str, int]:
    """``min`` and ``max`` n-gram lengths of prompt lookup, with defaults if unknown."""
    options = acceptance.options
    return {"min": int(options.get("min_ngram", 1)), "max": int(options.get("max_ngram", 3))}


def match_remarks(acceptance: Acceptance, engine: str, *, shortest: bool = False) -> tuple[str, ...]:
    """Remarks on prompt lookup that was measured unlike the engine's, which copies the earliest match.

    Args:
        shortest: its n-grams may have one token only.
    """
    options, remarks = acceptance.options, []
    if acceptance.drafter != "prompt-lookup" or not options:  # counters of an engine
        return ()
    if options.get("match", "latest") != "first":
        remarks.append(
            f"{engine} copies the earliest match, and the acceptance was measured with the latest; use match: first"
        )
    sizes = ngram_sizes(acceptance)
    if shortest and sizes["min"] > 1:
        remarks.append(f"it looks up suffixes of 1 to {sizes['max']} tokens, not of {sizes['min']} to {sizes['max']}")
    return tuple(remarks)


def shell(arguments: Sequence[str]) -> str:
    """A quoted command line with one flag per line."""
    lines: list[str] = []
    for word in arguments:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(lines)


def only_point_masses(acceptance: Acceptance, engine: str) -> str | None:
    """The reason why an engine that accepts only matching tokens does not support sampled drafts; None if it does."""
    if acceptance.temperature == 0 or acceptance.point_mass in (True, None):
        return None
    return (
        f"at temperature {acceptance.temperature or 'above 0'} {engine} drafts greedily and accepts matching samples "
        "of the target; these drafts were sampled"
    )


def length_remarks(schedule: Schedule, beyond: int | None = None) -> tuple[str, ...]:
    """Remarks on draft lengths beyond the last batch size, and on batch sizes where drafting is slower.

    Args:
        beyond: the engine's draft length beyond the last range; by default that of the last range.
    """
    remarks, last = [], schedule.ranges[-1]
    if len(schedule.ranges) > 1:
        gamma = last.gamma if beyond is None else beyond
        effect = f"it drafts with gamma {gamma}" if gamma else "it does not draft"
        remarks.append(f"beyond B = {last.high}, the greatest requested batch size, {effect}")
    elif slower := [str(b) for b, speed_up in schedule.speed_ups.items() if speed_up.value < 1 and schedule.gamma]:
        remarks.append(f"at B = {', '.join(slower)} drafting is slower than plain decoding and is not switched off")
    return tuple(remarks)


def synthetic_remarks(acceptance: Acceptance) -> tuple[str, ...]:
    """Remarks on an engine that simulates only the mean acceptance length, by its two neighbouring integers."""
    mean = sum(acceptance.marginal)
    low, share = math.floor(mean), mean - math.floor(mean)
    often = f"{low} tokens or, with probability {share:.2f}, {low + 1}" if share else f"{low} tokens"
    return (
        "the acceptance is synthetic: the output is not the target's",
        f"every step accepts {often}: the mean is that of the measurement, the standard deviation "
        f"{math.sqrt(share * (1 - share)):.2f} instead of {acceptance.spread():.2f}; vllm-synthetic has both",
    )
