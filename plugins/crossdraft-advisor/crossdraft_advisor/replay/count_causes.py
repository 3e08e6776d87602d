"""Counters of an engine against those that replay computes from its responses, and the cause of a difference.

Causes are ways of counting; those of drafting are in `diagnosis.matching`. A cause is named if replaying with it gives
what the engine counted. Where acceptance is deterministic, the counts must agree up to rounding; otherwise the rates by
position must agree up to chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crossdraft.framework.errors import UsageError

from ..engines.acceptance import Acceptance
from ..engines.counter_definitions import DEFINITIONS, CounterDefinition
from .engine_counts import EngineCounts

#: Names of causes.
DEFINITION, END = "definition of the counter", "end of sequence"
TEMPLATE, LENGTH, DTYPE = "chat template", "draft length", "dtype"
#: Standard errors that chance does not explain.
CHANCE = 3.5
#: Relative rounding error of counts that are computed from rates of three decimals.
_ROUNDING = 0.0006
#: Difference of the mean draft lengths that chance explains, relative to gamma.
_LENGTH = 0.05
_ACCEPTED = {
    "all": "all accepted tokens count, those past the end of a response, too",
    "before_last": "accepted tokens count up to the one before the last of a response",
    "until_end": "accepted tokens count up to the end of a response",
}


@dataclass(frozen=True)
class Counted:
    """Counters of an engine.

    Attributes:
        drafts: counted drafts.
        per_position: [gamma], drafts that accepted at least 1, .., gamma tokens; [1] and their sum if ``total``.
        total: only the sum is known.
        draft_tokens: tokens of the counted drafts; None if unknown.
    """

    drafts: float
    per_position: np.ndarray
    total: bool = False
    draft_tokens: float | None = None

    @classmethod
    def of(cls, acceptance: Acceptance, draft_tokens: float | None = None) -> Counted:
        """Counters in a log or scrape. Raises UsageError if they lack the number of drafts."""
        rows = np.array(acceptance.rows, dtype=float)
        if not len(rows):
            raise UsageError(f"{acceptance.source} does not have the number of drafts; give a log or a scrape of them")
        drafts, *accepted = rows.sum(0)
        idle, total = acceptance.idle, not acceptance.marginal
        return cls(float(drafts) * (1 - idle), np.array(accepted), total, draft_tokens)

    @property
    def length(self) -> float:
        """Mean acceptance length, bonus token included."""
        return 1 + float(self.per_position.sum()) / self.drafts

    @property
    def rates(self) -> np.ndarray:
        return self.per_position / self.drafts


@dataclass(frozen=True)
class Cause:
    """Cause of a difference, and its description."""

    name: str
    text: str


def agrees(counted: Counted, counts: EngineCounts) -> bool:
    """True if the engine counted what ``counts`` computes, up to rounding or chance."""
    if not counts.drafts:
        return False
    ours = np.array([counts.accepted]) if counted.total else counts.per_position
    if len(ours) != len(counted.per_position):
        return False
    if counted.draft_tokens is not None and not _agrees_in_tokens(counted, counts):
        return False
    if not counts.random:
        bound = 0.5 + _ROUNDING * counts.drafts
        differences = [counted.drafts - counts.drafts, *(counted.per_position - ours)]
        return bool(np.abs(differences).max() <= bound)
    rates = ours / counts.drafts
    spread = np.maximum(rates * (1 - rates), 1 / counts.drafts) if not counted.total else rates * (1 + rates)
    errors = np.sqrt(spread * (1 / counts.drafts + 1 / counted.drafts))
    return bool((np.abs(counted.rates - rates) <= CHANCE * errors).all())


def _agrees_in_tokens(counted: Counted, counts: EngineCounts) -> bool:
    """True if the drafts have as many tokens, in their mean if which drafts there are is random."""
    assert counted.draft_tokens is not None
    if counts.random:
        lengths = counted.draft_tokens / counted.drafts, counts.draft_tokens / counts.drafts
        return abs(lengths[0] - lengths[1]) <= _LENGTH * counts.gamma
    return abs(counted.draft_tokens - counts.draft_tokens) <= 0.5 + _ROUNDING * counts.draft_tokens


def draft_lengths(counted: Counted, counts: EngineCounts) -> Cause | None:
    """The cause if only the lengths of the drafts differ."""
    if counted.draft_tokens is None or not counts.drafts or not agrees(replace(counted, draft_tokens=None), counts):
        return None
    lengths = counted.draft_tokens / counted.drafts, counts.draft_tokens / counts.drafts
    return Cause(
        LENGTH,
        f"drafts have {lengths[0]:.2f} tokens instead of {lengths[1]:.2f}, and as many are accepted: the engine ends "
        "drafts elsewhere",
    )


def other_definitions(definition: CounterDefinition) -> Iterator[tuple[Cause, CounterDefinition]]:
    """Definitions to try if an engine's counters are not those of ``definition``."""
    for accepted, text in _ACCEPTED.items():
        if accepted != definition.accepted:
            yield Cause(END, text), replace(definition, accepted=accepted)
    idle = "not counted" if definition.idle_steps else "counted"
    yield (
        Cause(DEFINITION, f"steps without a draft are {idle}"),
        replace(definition, idle_steps=not definition.idle_steps),
    )
    cut = "not cut" if definition.shortens else "cut"
    yield (
        Cause(DEFINITION, f"drafts near the maximum length are {cut} to the remaining tokens"),
        replace(definition, shortens=not definition.shortens),
    )
    for name, other in DEFINITIONS.items():
        if name != definition.engine:
            yield Cause(DEFINITION, f"the counters are those that {name} defines"), other


def differing(a: CounterDefinition, b: CounterDefinition) -> list[str]:
    """Differences between the definitions of two engines."""
    texts = []
    for text, key in (("steps without a draft count", "idle_steps"), ("drafts near the maximum are cut", "shortens")):
        if getattr(a, key) != getattr(b, key):
            texts.append(f"{text} in {(a if getattr(a, key) else b).engine} only")
    if a.accepted != b.accepted:
        texts.append("; ".join(f"{each.engine}: {_ACCEPTED[each.accepted]}" for each in (a, b)))
    return texts


def past_end(counted: Counted, counts: EngineCounts) -> Cause | None:
    """The cause if tokens past the end, whose acceptance is unknown, explain the difference."""
    ours = np.array([counts.accepted]) if counted.total else counts.per_position
    more = counted.per_position - ours
    rounding = 0.5 + _ROUNDING * counts.drafts
    if not counts.unknown or (more < -rounding).any() or more.sum() > counts.unknown + rounding:
        return None
    if abs(counted.drafts - counts.drafts) > rounding:
        return None
    if counted.draft_tokens is not None and not _agrees_in_tokens(counted, counts):
        return None
    text = f"{more.sum():.0f} of up to {counts.unknown:.0f} drafted tokens past the ends of the responses were accepted"
    return Cause(END, f"{text}; record the 'continuation' of the responses to count them")


def first_cause(counted: Counted, variants: Sequence[tuple[Cause, EngineCounts]]) -> Cause | None:
    """The first cause whose counters are those of the engine."""
    return next((cause for cause, counts in variants if agrees(counted, counts)), None)
