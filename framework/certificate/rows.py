"""Rows of ``crossdraft certify``: drafts x verifier on a toy, as deep as can be enumerated."""

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
from .drafts import LabelledDrafter, NamedDrafter
from .table_lm import Toy


@dataclass(frozen=True)
class Row:
    """One certified pair; ``error`` is the error message if enumeration failed.

    Attributes:
        lengths: maximum draft depth of each step.
        temperature: of the target.
        drafted: some draft had a token.
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
    def traits(self) -> VerifierTraits:
        return _traits(self.verifier, self.options)

    @property
    def bad(self) -> bool:
        return self.error is not None or (self.traits.lossless and not self.lossless)

    @property
    def proves(self) -> bool:
        """True if the row proves that the verifier is lossless; stateful verifiers need two steps."""
        enough = len(self.lengths) > 1 or not self.traits.stateful
        return self.error is None and self.traits.lossless and self.lossless and enough

    @property
    def verdict(self) -> str:
        if self.error is not None:
            return f"FAILED: {self.error}"
        if not self.traits.lossless:
            return "declared lossy"
        if not self.lossless:
            return "NO"
        return "yes" if self.drafted else "nothing was drafted"

    @property
    def gamma(self) -> int | list[int]:
        """Draft length, or the list of lengths if steps differ."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else list(self.lengths)

    def as_json(self) -> dict[str, Any]:
        """The row as JSON values; ``error`` only if it failed, ``bounds`` only if they were computed."""
        result = {
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
            result["bounds"] = {key: value for key, value in asdict(self.bounds).items() if key != "missing"}
        return result if self.error is None else {**result, "error": self.error}


class CannotRun(Exception):
    """The pair is incompatible or cannot be enumerated; the message is the reason."""


class PairTooLarge(CannotRun):
    """The pair is compatible but too large to enumerate."""


def certify_row(
    toy: Toy,
    label: str,
    kind: LabelledDrafter | NamedDrafter,
    verifier: type[Verifier],
    steps: int | None = None,
    gamma: int | None = None,
    options: StrategyConfig | None = None,
) -> Row:
    """Certify one pair.

    Args:
        options: the verifier's validated config; None = its defaults.
        steps: ``None`` = 1, or 2 if the drafter or verifier is stateful.
        gamma: maximum draft depth in each step; ``None`` = the toy's, reduced to what is enumerated in seconds.

    Raises:
        CannotRun: the pair is incompatible, or too large (`TooMuch`).
    """
    row = Row(toy.name, label, verifier, (gamma or 0,), 1.0, options=options)
    try:
        traits = row.traits
        temperature = _temperature(kind, traits)
        lengths = tuple(_lengths(toy, label, kind, verifier.name, traits, temperature, steps, gamma))
        row = replace(row, lengths=lengths, temperature=temperature)
        result = certify(
            toy,
            kind.build,
            verifier if options is None else lambda: verifier(options),
            steps=len(lengths),
            gamma=lengths,
            temperature=temperature,
            markov=kind.markov,
        )
        if not math.isfinite(result.tv):
            raise NumericalError(f"verifier '{verifier.name}' produced NaN or infinite probabilities")
    except CannotRun:
        raise
    except Exception as error:  # third-party code may raise anything
        return replace(row, error=_message(error))
    return replace(
        row,
        tv=result.tv,
        expected_tau=tuple(result.expected_tau),
        lossless=result.lossless,
        drafted=result.drafted,
    )


def row_bounds(toy: Toy, kind: LabelledDrafter | NamedDrafter, row: Row, cache: dict[Any, Bounds]) -> Bounds:
    """Bounds that apply to the verifier of a row; ``known`` caches those of the same toy and draft."""
    if not row.traits.lossless:
        return Bounds()
    key = row.lengths[0], row.temperature
    if key not in cache:
        try:
            cache[key] = bounds(toy, kind.build, *key)
        except NumericalError as error:
            cache[key] = Bounds(missing=(f"toy {toy.name}, draft {row.draft}: {error}",))
    if row.traits.stateful:  # may compensate in later steps
        return replace(cache[key], single_draft=None, lp=None)
    return cache[key]


def _traits(verifier: type[Verifier], options: StrategyConfig | None) -> VerifierTraits:
    return verifier.traits(verifier.Config() if options is None else options)


def _temperature(kind: LabelledDrafter | NamedDrafter, traits: VerifierTraits) -> float:
    """Target temperature of the certificate."""
    drafter, config = kind.config(1)
    zero = drafter.traits(config, Sampling(temperature=0)).temperature_zero_only
    return 0.0 if zero or traits.temperature_zero_only else 1.0


def _lengths(
    toy: Toy,
    label: str,
    kind: LabelledDrafter | NamedDrafter,
    verifier: str,
    verifier_traits: VerifierTraits,
    temperature: float,
    steps: int | None,
    gamma: int | None,
) -> list[int]:
    """Maximum draft depth of each step."""
    sampling = Sampling(temperature=temperature)
    requested = toy.gamma if gamma is None else gamma
    drafter, config = kind.config(requested)
    traits = drafter.traits(config, sampling)
    if reason := incompatible(kind.drafter, traits, verifier, verifier_traits, sampling):
        raise CannotRun(f"{label}: {reason}")

    def cost(length: int) -> float:
        drafter, config = kind.config(length)
        return effort.paths(drafter.traits(config, sampling), toy.vocab_size, length)

    multiply = verifier_traits.stateful or not kind.markov
    if steps is None:
        steps = 2 if multiply else 1
    longest = min(requested, traits.depth)
    result: list[int] | None = [longest] * steps
    if gamma is None and not kind.markov:
        result = effort.unmerged_lengths(drafter.remembers(config), traits, toy.vocab_size, longest, steps)
    elif gamma is None and multiply:
        result = effort.draft_lengths(cost, longest, steps, effort.DEFAULT_PATHS)
    elif gamma is None:
        result = [effort.draft_length(cost, longest, effort.DEFAULT_PATHS) or 0] * steps
    # If even the shortest drafts exceed the default limit, try them against the hard limit.
    result = result if result is not None and (any(result) or not longest) else [min(longest, 1)] * steps
    if reason := effort.too_many_paths(cost, result, multiply and steps > 1):
        raise PairTooLarge(f"toy {toy.name}, {label}: {reason}")
    return result


def _message(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, CrossdraftError) else f"{type(error).__name__}: {text}"
