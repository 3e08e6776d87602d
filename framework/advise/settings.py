"""What the settings of several engines have in common."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..errors import UsageError
from ..models.quantization import refuse_quantized
from .acceptance import Acceptance
from .engine import Engine, Schedule


def needs_method(engine: Engine, acceptance: Acceptance) -> str:
    """What the engine calls the drafter. Raises UsageError where nobody knows which it is."""
    if not acceptance.drafter:
        raise UsageError(
            f"{acceptance.source} does not say what drafts; give it as --drafter: {', '.join(sorted(engine.methods))}"
        )
    return engine.methods[acceptance.drafter]


def needs_model(engine: Engine, acceptance: Acceptance) -> str:
    """The draft model's name. Raises UsageError where nobody knows it."""
    if not acceptance.model:
        raise UsageError(
            f"the settings of {engine.name} name the draft model of {acceptance.drafter}; give it as --draft-model"
        )
    refuse_quantized(acceptance.model, f"{engine.name} does not quantise draft models so; it needs weights on disk")
    return acceptance.model


def ngram_sizes(acceptance: Acceptance) -> dict[str, int]:
    """``min`` and ``max``: tokens of the suffix that is looked up; prompt-lookup's defaults if they are not known."""
    options = acceptance.options
    return {"min": int(options.get("min_ngram", 1)), "max": int(options.get("max_ngram", 3))}


def shell(words: Sequence[str]) -> str:
    """A command line, quoted, a flag a line where there are several."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(lines)


def only_point_masses(acceptance: Acceptance, engine: str) -> str | None:
    """Why an engine that takes a draft only where the target says the same cannot accept as this pair does."""
    if acceptance.temperature == 0 or acceptance.point_mass in (True, None):
        return None
    return (
        f"at temperature {acceptance.temperature or 'above 0'} {engine} drafts greedily and accepts what the target "
        "samples; these drafts were sampled"
    )


def length_remarks(schedule: Schedule, beyond: int | None = None) -> tuple[str, ...]:
    """What to know of the draft lengths: what happens beyond the last batch size, and where one length does harm.

    Args:
        beyond: the length that the engine takes there; the last one's by default.
    """
    found, last = [], schedule.ranges[-1]
    if len(schedule.ranges) > 1:
        gamma = last.gamma if beyond is None else beyond
        what = f"it drafts with gamma {gamma}" if gamma else "it does not draft"
        found.append(f"beyond B = {last.high}, the greatest batch size that was asked for, {what}")
    elif slower := [str(b) for b, speed_up in schedule.speed_ups.items() if speed_up.value < 1 and schedule.gamma]:
        found.append(f"at B = {', '.join(slower)} this is slower than plain decoding, and is not switched off there")
    return tuple(found)
