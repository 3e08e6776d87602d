"""The catalogue of signatures: hypotheses that counters distinguish without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.special import logit

from crossdraft import UsageError

from ..engines.acceptance import Acceptance, conditional_rates
from ..engines.formats import CounterSource
from ..shorter_drafts import shorter_drafts
from .hypothesis import Counts, Hypothesis, Level, Shift, Walk

#: Conditional acceptance rates of drafters that are sound, weak, without effect, and behind a cliff.
_USUAL, _WEAK = Level(1.0, 1.3, low=0.4), Level(-1.0, 0.9, low=0.06, high=0.4)
_NOTHING, _FALLEN = Level(-4.0, 1.5, high=0.06), Level(-2.5, 1.5, high=0.3)
_HEADS = "crossdraft diagnose --target TARGET --drafter DRAFTER"
_FILES = f"{_HEADS} --files"
_MATCH = f"{_HEADS} --replay responses.jsonl --counters FILE --as ENGINE"
HEALTHY = "healthy"  # name of the signature of a sound drafter
#: A clear fall of logit h in the second source, at all positions or at the first.
_FALL = (Shift(1.0, fall=0.7), Shift(1.0, fall=0.7, first=True))
_HEALTHY = (Walk(_USUAL), Walk(_USUAL, 0.1), Walk(_USUAL, 0.7), Walk(_USUAL, turn=2, after=_USUAL, step_after=0.35))
_MANY = 1e9  # drafts of a source that does not have their number


#: Key of `CounterSource` by which two sources may differ -> the fault that the difference shows.
CIRCUMSTANCES = {
    "temperature": Hypothesis(
        "only above temperature 0",
        "greedy drafts, or q at another temperature than the drafts are sampled at",
        _MATCH,
        _HEALTHY,
        _FALL,
    ),
    "batch_size": Hypothesis(
        "only in batches", "rows of a batch are mixed, or padding is attended to", _MATCH, _HEALTHY, _FALL
    ),
    "context": Hypothesis(
        "falls with the context length",
        "rotary embeddings: base, scaling or share of channels; or a window that is too short",
        _FILES,
        _HEALTHY,
        _FALL,
    ),
    "gamma": Hypothesis(
        "depends on the draft length",
        "positions or masks of the draft depend on its length; normal for drafters of blocks",
        _MATCH,
        _HEALTHY,
        (Shift(1.0, fall=0.7, both=True),),
    ),
}


def signatures(sources: Sequence[CounterSource], gamma: int) -> Iterator[Hypothesis]:
    """Yield the catalogue for one source, or for two that differ by some of `CIRCUMSTANCES`."""
    # Sampled drafts are accepted more or less often than greedy ones.
    shifts = (Shift(), Shift(0.5)) if differs(sources, "temperature") else (Shift(),)
    yield Hypothesis(HEALTHY, "no sign of a fault; a better drafter needs training on your texts", "", _HEALTHY, shifts)
    yield Hypothesis(
        "lower at all positions",
        "a wrong layer, norm, rotation, template or quantisation, or a drafter that is weak on these texts: counters "
        "alone do not distinguish them",
        _MATCH,
        (Walk(_WEAK), Walk(_WEAK, 0.1)),
    )
    yield from faulty_shapes(gamma)
    if gamma > 1:
        yield Hypothesis(
            "low first, then high",
            "normal for n-grams and other lookups; a model reads a state that is one step old in its first step",
            _MATCH,
            (Walk(_WEAK, turn=2, after=_USUAL, step_after=0.35),),
        )
    if len(sources) > 1:
        yield from (hypothesis for key, hypothesis in CIRCUMSTANCES.items() if differs(sources, key))


def faulty_shapes(gamma: int) -> Iterator[Hypothesis]:
    """Yield the signatures of one source that no sound drafter has."""
    yield Hypothesis(
        "nothing at any position",
        "missing or other weights, a wrong vocabulary map, wrong layers, or another target",
        _FILES,
        (Walk(_NOTHING, 1.5),),
    )
    if gamma > 1:
        yield Hypothesis(
            "the first position only",
            "the draft's own state, positions or hidden states are not fed back",
            _MATCH,
            (Walk(_USUAL, turn=2, after=_FALLEN),),
        )
    if gamma > 2:
        yield Hypothesis(
            "a cliff",
            "a window, page or block ends there, or the drafter was trained for fewer tokens",
            _FILES,
            [Walk(_USUAL, turn=position, after=_FALLEN) for position in range(3, gamma + 1)],
        )


def differs(sources: Sequence[CounterSource], key: str) -> bool:
    """True if the sources were counted under other values of ``key``."""
    return len({getattr(source, key) for source in sources}) > 1


def in_order(sources: Sequence[tuple[CounterSource, Acceptance]]) -> list[tuple[CounterSource, Acceptance]]:
    """The sources, that with the lower temperature, batch size and context, and with longer drafts first."""

    def key(item: tuple[CounterSource, Acceptance]) -> tuple[float, ...]:
        source = item[0]
        return source.temperature or 0.0, source.batch_size or 0, source.context or 0, -(source.gamma or 0)

    return sorted(sources, key=key)


def counts_of(acceptance: Acceptance, label: str = "", reference: Acceptance | None = None) -> Counts:
    """The counters of a source.

    ``reference``: the first source, from whose acceptance that of another draft length follows. Raises UsageError: the
    source has the mean acceptance length only.
    """
    if not acceptance.marginal:
        raise UsageError(
            f"{acceptance.source} has the mean acceptance length, and not the acceptance by position that signatures "
            "are read from; give a log or scrape that has it, or responses (SGLang: those of /generate; llama.cpp: the "
            "log with -lv 4, or /metrics; docs/advise.md, 'Where acceptance comes from')"
        )
    drafting = 1 - acceptance.idle
    drafts = (acceptance.drafts or _MANY) * drafting
    rates = [min(rate / drafting, 1.0) for rate in acceptance.marginal] if drafting else []
    offset: tuple[float, ...] = ()
    if reference is not None and reference.gamma != acceptance.gamma:
        longer, shorter = sorted((reference, acceptance), key=lambda item: item.gamma, reverse=True)
        measured = np.array(longer.marginal)
        change = _logits(shorter_drafts(measured, shorter.gamma)) - _logits(measured)[: shorter.gamma]
        sign = 1 if reference is longer else -1
        offset = (*(sign * change).tolist(), *[0.0] * (acceptance.gamma - shorter.gamma))
    return Counts(label, (drafts, *(drafts * rate for rate in rates)), offset)


def _logits(marginal: np.ndarray) -> np.ndarray:
    """Conditional rates as logit h_i, cut to rates from 0.001 to 0.999."""
    return logit(np.clip(conditional_rates(marginal), 0.001, 0.999))
