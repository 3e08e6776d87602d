"""The rows of ``crossdraft certify``: drafts x verifier on a toy, as deep as can be enumerated."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..contracts.drafter import StrategyConfig
from ..contracts.sampling import Sampling
from ..contracts.verifier import Verifier, VerifierTraits, incompatible
from ..errors import CrossdraftError, NumericalError
from . import effort
from .bounds import Bounds, bounds
from .certify import certify
from .drafts import DraftKind, NamedDrafter
from .table_lm import Toy


@dataclass(frozen=True)
class Row:
    """One certified pair; ``error`` is the sentence of one that could not be enumerated.

    Attributes:
        lengths: how deep drafts could be, a number a step.
        temperature: the target's.
        drafted: whether any draft had a token.
        options: the verifier's validated config; None = its defaults.
    """

    toy: str
    draft: str
    verifier: type[Verifier]
    lengths: tuple[int, ...]
    temperature: float
    tv: float | None = None
    expected_tau: tuple[float, ...] = ()
    lossless: bool = False
    drafted: bool = False
    error: str | None = None
    bounds: Bounds | None = None
    options: StrategyConfig | None = None

    @property
    def promise(self) -> VerifierTraits:
        """The verifier's traits."""
        return _promise(self.verifier, self.options)

    @property
    def bad(self) -> bool:
        return self.error is not None or (self.promise.lossless and not self.lossless)

    @property
    def proves(self) -> bool:
        """Whether it shows that the rule is lossless, over two steps if it carries state from one to the next."""
        enough = len(self.lengths) > 1 or not self.promise.stateful
        return self.error is None and self.promise.lossless and self.lossless and enough

    @property
    def verdict(self) -> str:
        if self.error is not None:
            return f"FAILED: {self.error}"
        if not self.promise.lossless:
            return "declared lossy"
        if not self.lossless:
            return "NO"
        return "yes" if self.drafted else "nothing was drafted"

    @property
    def gamma(self) -> int | list[int]:
        """The draft length, or those of the steps where they differ."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else list(self.lengths)

    def as_json(self) -> dict[str, Any]:
        """The row for programs; ``error`` is there only if it failed, ``bounds`` only if they were asked for."""
        found = {
            "toy": self.toy,
            "draft": self.draft,
            "verifier": self.verifier.name,
            "gamma": self.gamma,
            "steps": len(self.lengths),
            "tv": self.tv,
            "expected_tau": list(self.expected_tau),
            "lossless": self.lossless,
            "drafted": self.drafted,
        }
        if self.bounds is not None:
            found["bounds"] = {key: value for key, value in asdict(self.bounds).items() if key != "missing"}
        return found if self.error is None else {**found, "error": self.error}


class CannotRun(Exception):
    """Why drafts and a verifier are no pair, or one that cannot be enumerated."""


class TooMuch(CannotRun):
    """Nothing is wrong with the pair; there is too much to enumerate."""


def certify_row(
    toy: Toy,
    label: str,
    kind: DraftKind | NamedDrafter,
    verifier: type[Verifier],
    steps: int | None = None,
    gamma: int | None = None,
    options: StrategyConfig | None = None,
) -> Row:
    """Certify one pair.

    Args:
        options: the verifier's validated config; None = its defaults.
        steps: ``None`` = 1, but 2 if anything is remembered from step to step.
        gamma: how deep drafts may be in every step; ``None`` = as deep as the toy says and costs seconds.

    Raises:
        CannotRun: a pair that is incompatible, or too large (`TooMuch`).
    """
    row = Row(toy.name, label, verifier, (gamma or 0,), 1.0, options=options)
    try:
        promise = row.promise
        temperature = _temperature(kind, promise)
        lengths = tuple(_lengths(toy, label, kind, verifier.name, promise, temperature, steps, gamma))
        row = replace(row, lengths=lengths, temperature=temperature)
        found = certify(
            toy,
            kind.build,
            verifier if options is None else lambda: verifier(options),
            steps=len(lengths),
            gamma=lengths,
            temperature=temperature,
            markov=kind.markov,
        )
        if not math.isfinite(found.tv):
            raise NumericalError(f"verifier '{verifier.name}' produced probabilities that are not numbers")
    except CannotRun:
        raise
    except Exception as error:  # whatever a third party's strategy may raise
        return replace(row, error=_sentence(error))
    return replace(
        row,
        tv=found.tv,
        expected_tau=tuple(found.expected_tau),
        lossless=found.lossless,
        drafted=found.drafted,
    )


def row_bounds(toy: Toy, kind: DraftKind | NamedDrafter, row: Row, known: dict[Any, Bounds]) -> Bounds:
    """The bounds that bind a row's rule; ``known`` ones of the same toy and draft are not computed again."""
    if not row.promise.lossless:
        return Bounds()
    key = row.lengths[0], row.temperature
    if key not in known:
        try:
            known[key] = bounds(toy, kind.build, *key)
        except NumericalError as error:
            known[key] = Bounds(missing=(f"toy {toy.name}, draft {row.draft}: {error}",))
    if row.promise.stateful:  # it may take in this step what it repays in a later one
        return replace(known[key], single_draft=None, lp=None)
    return known[key]


def _promise(verifier: type[Verifier], options: StrategyConfig | None) -> VerifierTraits:
    return verifier.traits(verifier.Config() if options is None else options)


def _temperature(kind: DraftKind | NamedDrafter, promise: VerifierTraits) -> float:
    """The target's temperature that a pair is certified at."""
    drafter, config = kind.config(1)
    zero = drafter.traits(config, Sampling(temperature=0)).temperature_zero_only
    return 0.0 if zero or promise.temperature_zero_only else 1.0


def _lengths(
    toy: Toy,
    label: str,
    kind: DraftKind | NamedDrafter,
    verifier: str,
    promise: VerifierTraits,
    temperature: float,
    steps: int | None,
    gamma: int | None,
) -> list[int]:
    """How deep drafts may be in each step."""
    sampling = Sampling(temperature=temperature)
    wanted = toy.gamma if gamma is None else gamma
    drafter, config = kind.config(wanted)
    traits = drafter.traits(config, sampling)
    if reason := incompatible(kind.drafter, traits, verifier, promise, sampling):
        raise CannotRun(f"{label}: {reason}")

    def cost(length: int) -> float:
        drafter, config = kind.config(length)
        return effort.paths(drafter.traits(config, sampling), toy.vocab_size, length)

    multiply = promise.stateful or not kind.markov
    if steps is None:
        steps = 2 if multiply else 1
    longest = min(wanted, traits.depth)
    found: list[int] | None = [longest] * steps
    if gamma is None and not kind.markov:
        found = effort.replayed(drafter.remembers(config), traits, toy.vocab_size, longest, steps)
    elif gamma is None and multiply:
        found = effort.draft_lengths(cost, longest, steps, effort.DEFAULT_PATHS)
    elif gamma is None:
        found = [effort.draft_length(cost, longest, effort.DEFAULT_PATHS) or 0] * steps
    # If not even the shortest drafts fit among what is enumerated by default, they may among what is at all.
    found = found if found is not None and (any(found) or not longest) else [min(longest, 1)] * steps
    if reason := effort.too_many_paths(cost, found, multiply and steps > 1):
        raise TooMuch(f"toy {toy.name}, {label}: {reason}")
    return found


def _sentence(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, CrossdraftError) else f"{type(error).__name__}: {text}"
