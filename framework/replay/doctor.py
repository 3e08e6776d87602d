"""Why does a drafter agree so little with its target? Usual mistakes, each undone and replayed on the same responses.

How often the token at a place is accepted, min(1, Q/P) averaged over responses that the target drew, is an unbiased
estimate of the overlap sum_v min(P, Q) there. A mistake is named if the drafter agrees clearly more without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..api.build import Configured
from ..contracts.misconfiguration import Misconfiguration
from ..contracts.sampling import Sampling
from ..errors import CrossdraftError, UsageError
from ..metrics.intervals import LEAST_PIECES, Estimate, pieces_needed
from .aggregate import Row, Tally, difference
from .replay import Candidate, replay, rules_for
from .response import Response
from .teacher_forcing.forcing import Asked, deepened
from .teacher_forcing.lazy_models import Target
from .teacher_forcing.shared_passes import SideBySide

#: What undoing a mistake has to add to the tokens accepted a step, as a share of them, to explain anything.
CLEAR = 0.2


@dataclass(frozen=True)
class Trial:
    """A drafter as it may be meant, on a target, along responses."""

    suspect: Misconfiguration
    target: Target
    responses: Sequence[Response]


@dataclass(frozen=True)
class Examined:
    """What came of a trial.

    Attributes:
        tally: of drafts of gamma tokens; None where it cannot draft so, for the ``reason``.
        warning: about the log-probabilities that were recorded with the responses.
        gain: block efficiency, more than as it is, with an interval over prompts; None as it is, or without either.
    """

    suspect: Misconfiguration
    gamma: int
    tally: Tally | None = None
    gain: Estimate | None = None
    reason: str = ""
    warning: str | None = None

    @property
    def row(self) -> Row | None:
        return None if self.tally is None else self.tally.row(self.gamma)


def examine(drafter: Configured, trials: Sequence[Trial], gamma: int) -> Iterator[Examined]:
    """Each of ``trials``, of which the first is the drafter as it is; the others are compared with that, by prompt.

    Args:
        gamma: draft length; heads that draft fewer tokens draft those.

    Raises:
        UsageError: a drafter that cannot be replayed, or does not draft chains.
        CrossdraftError: one that does not load, where no other heads are tried with which it might.
    """
    first: Tally | None = None
    for number, trial in enumerate(trials):
        try:
            gamma, tally, warning = _tally(drafter, trial, gamma)
        except CrossdraftError as error:
            if number == 0 and (isinstance(error, UsageError) or all(one.suspect.change is None for one in trials)):
                raise
            yield Examined(trial.suspect, gamma, reason=str(error))
            continue
        gain = difference(tally, gamma, first, gamma) if first is not None else None
        first = tally if number == 0 else first
        yield Examined(trial.suspect, gamma, tally, gain, warning=warning)


def named(found: Sequence[Examined]) -> list[Examined]:
    """The trials that explain something, those that gain most first: by `CLEAR`, and with an interval above 0."""
    base, clear = found[0].row, _clear(found)

    def explains(one: Examined) -> bool:
        if one.row is None or one.row.block_efficiency is None:
            return False
        if base is None:  # as it is, it does not draft at all
            return True
        low, _ = _interval(found, one)
        return one.gain is not None and one.gain.value > clear and low is not None and low > 0

    def gain(one: Examined) -> float:
        return one.gain.value if one.gain is not None else 0.0

    return sorted((one for one in found[1:] if explains(one)), key=gain, reverse=True)


def undecided(found: Sequence[Examined]) -> list[Examined]:
    """The trials that are neither `named` nor shown to gain less than `CLEAR`."""
    likely, clear = named(found), _clear(found)
    open_: list[Examined] = []
    for one in found[1:]:
        _, high = _interval(found, one)
        if one not in likely and one.row is not None and (high is None or high > clear):
            open_.append(one)
    return open_


def responses_needed(found: Sequence[Examined]) -> int | None:
    """About how many responses would decide all that is `undecided`; None if that cannot be foreseen.

    A trial is decided when its interval excludes no gain or excludes a clear one, whichever is farther from the gain
    that was found.
    """
    pieces, clear, needed = _pieces(found), _clear(found), 0.0
    for one in undecided(found):
        low, high = _interval(found, one)
        if one.gain is None or low is None or high is None:
            return None
        if (far := max(abs(one.gain.value), abs(clear - one.gain.value))) == 0:
            return None
        needed = max(needed, pieces_needed((high - low) / 2, far, pieces))
    return max(math.ceil(needed), pieces + 1)


def _clear(found: Sequence[Examined]) -> float:
    """The gain in block efficiency that explains something."""
    base = found[0].row
    return CLEAR * (base.block_efficiency.value - 1) if base is not None and base.block_efficiency is not None else 0.0


def _pieces(found: Sequence[Examined]) -> int:
    return len(found[0].tally.pieces.category) if found[0].tally is not None else 0


def _interval(found: Sequence[Examined], one: Examined) -> tuple[float | None, float | None]:
    """The interval of a gain, below what a draft has room for; a point where enough responses differ by the same."""
    base = found[0].row
    if one.gain is None or base is None or base.block_efficiency is None:
        return None, None
    room = base.gamma + 1 - base.block_efficiency.value
    if one.gain.low is None and _pieces(found) >= LEAST_PIECES:
        return one.gain.value, one.gain.value
    return one.gain.low, room if one.gain.high is None else min(one.gain.high, room)


def greedy_drafts(drafter: Configured, sampling: Sampling) -> Iterator[Misconfiguration]:
    """Drafts that are the drafter's most probable tokens, where the target samples."""
    if sampling.temperature and getattr(drafter[1], "temperature", None) == 0:
        yield Misconfiguration(
            f"drafts are greedy (temperature: 0), and the target samples at {sampling.temperature:g}",
            "leave temperature out of the drafter's options",
            {"temperature": None},
        )


def _tally(drafter: Configured, trial: Trial, gamma: int) -> tuple[int, Tally, str | None]:
    cls, given = drafter
    sampling = trial.target.sampling
    config = cls.Config(**{**given.model_dump(exclude_unset=True), **trial.suspect.options})
    traits = cls.traits(config, sampling)
    if not traits.is_chain:
        raise UsageError(f"drafter '{cls.name}' drafts no single chains here; give it options with which it does")
    config = deepened(cls, config, gamma)
    gamma = min(gamma, cls.traits(config, sampling).depth)
    change = trial.suspect.change
    beside = SideBySide(trial.target if change is None else trial.target.with_heads(change))
    one = beside.add(Asked((cls, config), gamma))
    rule = next(iter(rules_for(cls.name, (cls, config), (), (1,), sampling)))
    candidate = Candidate(cls.name, (cls, config), {rule: (1,)}, (gamma,), beside.forced(one))
    found = replay(trial.responses, [candidate])
    return gamma, candidate.tallies[rule, 1], found.log_p.warning
