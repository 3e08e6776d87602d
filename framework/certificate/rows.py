"""Rows of ``crossdraft certify``: drafts x verifier on a toy, as deep as can be enumerated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..contracts.drafter import StrategyConfig
from ..contracts.sampling import Sampling
from ..contracts.verifier import Verifier, VerifierTraits, incompatible
from ..errors import NumericalError
from . import effort
from .bounds import Bounds, bounds
from .certify import Checks, Coverage, WarmUp, certify
from .diagnosis import Diagnosis, diagnose
from .draft_faults import check_drafter, check_independence_on, check_q, unequal_starts
from .drafts import AnyDrafter, NamedDrafter
from .drawn_tokens import check_long_texts
from .faults import FaultError, error_message, files_of
from .table_lm import Toy

#: Temperature and top-k of further certificates on small toys, the second for named drafters, which warp their own q.
_OTHER_SAMPLING = ((0.0, 0), (0.6, 2))
#: Largest V ** gamma of such toys (for named drafters), and largest V ** (gamma + 1) of one to compare formulas on.
_SMALL, _SMALL_NAMED, _LARGE = 4, 9, 81
#: Starts of a drafter whose verification is enumerated, on small toys and on others (of which q is checked after twice
#: as many), maximum decision paths of one, and of one if each path needs its own drafter.
_STARTS, _STARTS_LARGE, _START_PATHS, _START_UNBATCHED = 2, 1, 2.0**9, 2.0**6
#: Labels of drafts without q, and of chains.
POINT_MASSES = frozenset({"point-mass", "tree-top-2-1", "tree-opt"})
CHAINS = frozenset({"chain", "point-mass", "stop-early"})


@dataclass(frozen=True)
class Row:
    """One certified pair.

    Attributes:
        lengths: maximum draft depth of each step.
        temperature: of the target; ``top_k``: its truncation, 0 = none.
        tv: None if it was not measured: an error, or a fault that makes it meaningless.
        coverage: events that were enumerated, and ``pair_coverage``: on all toys of a table, see `with_pair_coverage`.
        error: an exception of the strategies, with its place and draft.
        fault: the strategies use more than their inputs and rng, see `faults`.
        options: the verifier's validated config; None = its defaults.
        start: of the enumeration that failed; None = the toy's prompt.
        point_mass: drafts have no q.
    """

    toy: str
    draft: str
    verifier: type[Verifier]
    lengths: tuple[int, ...]
    temperature: float
    tv: float | None = None
    expected_tau: tuple[float, ...] = ()
    lossless: bool = False
    coverage: Coverage = field(default_factory=Coverage)
    error: str | None = None
    fault: str | None = None
    diagnosis: Diagnosis | None = None
    bounds: Bounds | None = None
    options: StrategyConfig | None = None
    top_k: int = 0
    start: WarmUp | None = None
    point_mass: bool = False
    pair_coverage: Coverage | None = None

    @property
    def gap(self) -> str:
        """The reason why a pair that did not fail is not exercised; empty if it is."""
        return (self.pair_coverage or self.coverage).gap(self.point_mass or not self.temperature)

    @property
    def traits(self) -> VerifierTraits:
        return self.verifier.traits(self.verifier.Config() if self.options is None else self.options)

    def make(self) -> Verifier:
        """A new verifier with the options of the row."""
        return self.verifier() if self.options is None else self.verifier(self.options)

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k)

    @property
    def failed(self) -> bool:
        """True if the pair is declared lossless and is not, or has a fault; not for errors."""
        return self.fault is not None or (self.error is None and self.traits.lossless and not self.lossless)

    @property
    def proves(self) -> bool:
        """True if the row proves that the verifier is lossless; stateful verifiers need two steps."""
        enough = len(self.lengths) > 1 or not self.traits.stateful
        return self.error is None and self.traits.lossless and self.lossless and enough and not self.gap

    @property
    def verdict(self) -> str:
        if self.error is not None:
            return f"ERROR: {self.error}"
        if self.fault is not None:
            return "NO"
        if not self.traits.lossless:
            return "declared lossy"
        if not self.lossless:
            return "NO"
        return f"not exercised: {self.gap}" if self.gap else "yes"

    @property
    def gamma(self) -> int | list[int]:
        """Draft length, or the list of lengths if steps differ."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else list(self.lengths)

    def as_json(self) -> dict[str, Any]:
        """The row as JSON values; ``error``, ``fault``, ``diagnosis`` and ``bounds`` only if there are any."""
        result = {
            "toy": self.toy,
            "draft": self.draft,
            "verifier": self.verifier.name,
            "gamma": self.gamma,
            "steps": len(self.lengths),
            "tv": self.tv,
            "expected_tau": list(self.expected_tau),
            "lossless": self.lossless,
            "drafted": self.coverage.drafted > 0,
            "exercised": not self.gap,
            "coverage": asdict(self.coverage),
        }
        if self.bounds is not None:
            result["bounds"] = {key: value for key, value in asdict(self.bounds).items() if key != "missing"}
        result |= {key: value for key in ("error", "fault") if (value := getattr(self, key)) is not None}
        return result if self.diagnosis is None else {**result, "diagnosis": self.diagnosis.as_json()}


def with_pair_coverage(rows: Sequence[Row]) -> list[Row]:
    """Set the coverage of pairs over all toys: a toy whose tables make every q of a draft equal does not decide."""
    pairs: dict[Any, Coverage] = {}
    for row in rows:
        pairs[row.draft, row.verifier] = pairs.get((row.draft, row.verifier), Coverage()) + row.coverage
    return [replace(row, pair_coverage=pairs[row.draft, row.verifier]) for row in rows]


class CannotRun(Exception):
    """The pair is incompatible or cannot be enumerated; the message is the reason."""


class PairTooLarge(CannotRun):
    """The pair is compatible but too large to enumerate."""


def certify_row(
    toy: Toy,
    label: str,
    kind: AnyDrafter,
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
    row, named = Row(toy.name, label, verifier, (gamma or 0,), 1.0, options=options), isinstance(kind, NamedDrafter)
    try:
        drafter, config = kind.config(1)
        zero = drafter.traits(config, Sampling(temperature=0)).temperature_zero_only or row.traits.temperature_zero_only
        row = replace(row, temperature=0.0 if zero else 1.0)
        row = replace(row, point_mass=drafter.traits(config, row.sampling).point_mass)
        row = _with_lengths(toy, kind, row, steps, gamma)
    except CannotRun:
        raise
    except Exception as error:  # third-party code may raise anything
        return replace(row, error=error_message(error, _files(kind, verifier)))
    row = _certified(toy, kind, row)
    small = toy.vocab_size**toy.gamma <= (_SMALL_NAMED if named else _SMALL)
    if isinstance(kind, NamedDrafter) and not row.error and not row.failed:
        row = _exercised(toy, kind, row, small)
    if row.error or row.failed or not row.temperature or not small:
        return row
    for temperature, top_k in _OTHER_SAMPLING if named else _OTHER_SAMPLING[:1]:
        try:
            other = _with_lengths(toy, kind, replace(row, temperature=temperature, top_k=top_k), steps, gamma)
        except CannotRun:
            continue
        other = _certified(toy, kind, other)
        if other.error or other.failed:
            return other
    return row


def _exercised(toy: Toy, kind: NamedDrafter, row: Row, small: bool) -> Row:
    """Look for faults of a named drafter that drafts from its memory, and enumerate the pair from such starts.

    Starts are added until the coverage suffices. What does not depend on the verifier is done once for each toy and
    temperature.
    """
    drafter, sampling, who = kind.config(row.lengths[0])[0], row.sampling, f"drafter '{kind.drafter}'"
    traits, depth = drafter.traits(kind.options, sampling), max(row.lengths)
    remembers, key = drafter.remembers(kind.options), (toy.name, row.temperature, depth)

    def fitting(steps: int) -> list[int] | None:
        maximum = _START_UNBATCHED if remembers else _START_PATHS
        return effort.unmerged_lengths(remembers, traits, toy.vocab_size, depth, steps, maximum)

    try:
        if key not in kind.memory:
            starts = unequal_starts(toy, kind.build, sampling, depth) if depth else []
            kind.memory[key] = starts, ""
            try:
                if toy.vocab_size**toy.gamma in (_SMALL, _SMALL_NAMED):
                    check_independence_on(toy, kind.build, row.lengths, sampling, who)
                single = fitting(1) or [1]
                check_q(toy, kind.build, single, sampling, who, starts if small else starts[: 2 * _STARTS_LARGE])
                if len(kind.memory) == 1 and depth and not traits.point_mass and toy.token_texts is None:
                    check_long_texts(lambda context: kind.build(context, depth), who)
            except FaultError as fault:
                kind.memory[key] = starts, str(fault)
        starts, fault = kind.memory[key]
        if fault:
            return replace(row, tv=None, fault=fault)
        lengths = fitting(2) or fitting(1) or [1]
        for number, start in enumerate(starts if small else sorted(starts, key=lambda start: start.steps)):
            if number >= (_STARTS if small else _STARTS_LARGE) and not row.gap:
                break
            other = _certified(toy, kind, replace(row, lengths=tuple(lengths), start=start))
            if other.error or other.failed:
                return other
            row = replace(row, tv=max(row.tv or 0.0, other.tv or 0.0), coverage=row.coverage + other.coverage)
    except Exception as error:  # third-party code may raise anything
        return replace(row, error=error_message(error, _files(kind, row.verifier)))
    return row


def _certified(toy: Toy, kind: AnyDrafter, row: Row, checks: Checks = "quick") -> Row:
    """Enumerate the pair of a row."""
    steps = {"steps": len(row.lengths), "gamma": row.lengths, "sampling": row.sampling, "start": row.start}
    try:
        result = certify(toy, kind.build, row.make, markov=kind.markov, checks=checks, **steps)
    except FaultError as fault:
        return replace(row, fault=str(fault))
    except Exception as error:  # third-party code may raise anything
        return replace(row, error=error_message(error, _files(kind, row.verifier)))
    tau = tuple(result.expected_tau)
    return replace(row, tv=result.tv, expected_tau=tau, lossless=result.lossless, coverage=result.coverage)


def diagnosed(rows: Sequence[Row], toys: Sequence[Toy], drafts: Mapping[str, AnyDrafter]) -> Row:
    """The failed row of a verifier with the smallest counterexample, with its diagnosis.

    Args:
        rows: all rows of the verifier, one of them failed.
        toys, drafts: toys and drafts of the rows, which have their names.
    """
    failed = [row for row in rows if row.failed]
    for row in failed:
        if row.fault is not None:
            return replace(row, diagnosis=Diagnosis(scope_of(rows), row.fault))
    by_name, order = {toy.name: toy for toy in toys}, list(drafts)
    size = {toy.name: toy.vocab_size ** (toy.gamma + 1) for toy in toys}
    row = min(failed, key=lambda row: (order.index(row.draft), len(row.lengths), size[row.toy]))
    for other in dict.fromkeys((row, *failed[:2])):
        if fault := _fault(by_name[other.toy], drafts[other.draft], other):
            return replace(other, tv=None, fault=fault, diagnosis=Diagnosis(scope_of(rows), fault))
    # The smallest toy has the smallest counterexample, one with more tokens distinguishes more formulas.
    same = [other for other in failed if other.draft == row.draft and other.sampling == row.sampling]
    diagnosis = None
    for other in (row, max(same, key=lambda other: min(size[other.toy], _LARGE))):
        kind, toy = drafts[other.draft], by_name[other.toy]
        steps = {"lengths": other.lengths, "sampling": other.sampling, "start": other.start}
        try:
            result = diagnose(toy, other.draft, kind.build, other.make, scope=scope_of(rows), **steps)
        except Exception as error:  # third-party code may raise anything, in other batches than before
            result = Diagnosis(f"not located: {error_message(error, _files(kind, other.verifier))}", scope_of(rows))
        diagnosis = result if diagnosis is None else replace(diagnosis, cause=result.cause or diagnosis.cause)
        if other is row and len(same) == 1:
            break
    return replace(row, diagnosis=diagnosis)


def _fault(toy: Toy, kind: AnyDrafter, row: Row) -> str | None:
    """The fault of a failed pair that makes its total variation meaningless, of the drafter or of the verifier."""
    try:
        if isinstance(kind, NamedDrafter):
            who = f"drafter '{kind.drafter}'"
            check_drafter(toy, kind.build, row.lengths, row.sampling, who, [row.start])
        lengths = tuple(min(length, 2) for length in row.lengths)
        row = _certified(toy, kind, replace(row, lengths=lengths), checks="all")
    except FaultError as fault:
        return str(fault)
    return row.fault or row.error


def scope_of(rows: Sequence[Row]) -> str:
    """The drafts for which a verifier fails, if it does not fail for others: its rows by kind of draft."""
    failed = {row.draft for row in rows if row.failed}
    passed = {row.draft for row in rows if not row.failed and row.error is None and row.coverage.drafted} - failed
    failing = [row for row in rows if row.failed]
    parts = []
    if all(row.temperature == 0 and not row.traits.temperature_zero_only for row in failing):
        parts.append("at temperature 0 only")
    if failed <= POINT_MASSES and passed - POINT_MASSES:
        parts.append("for point masses only")
    elif failed and not failed & POINT_MASSES and passed & POINT_MASSES:
        parts.append("for sampled drafts only, not for point masses")
    if failed == {"stop-early"} and "chain" in passed:
        parts.append("at the end of a row only: drafts that are shorter than others of the batch")
    elif failed and not failed & CHAINS and passed & CHAINS:
        parts.append("for a tree's later siblings: chains pass")
    return "; ".join(parts)


def _files(kind: AnyDrafter, verifier: type[Verifier]) -> set[str]:
    return files_of(verifier, *([kind.cls] if isinstance(kind, NamedDrafter) else []))


def row_bounds(toy: Toy, kind: AnyDrafter, row: Row, cache: dict[Any, Bounds]) -> Bounds:
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


def _with_lengths(toy: Toy, kind: AnyDrafter, row: Row, steps: int | None, gamma: int | None) -> Row:
    """The row with the maximum draft depth of each step; raises CannotRun."""
    requested, sampling = toy.gamma if gamma is None else gamma, row.sampling
    drafter, config = kind.config(requested)
    traits = drafter.traits(config, sampling)
    if reason := incompatible(kind.drafter, traits, row.verifier.name, row.traits, sampling):
        raise CannotRun(f"{row.draft}: {reason}")

    def cost(length: int) -> float:
        drafter, config = kind.config(length)
        return effort.paths(drafter.traits(config, sampling), toy.vocab_size, length)

    multiply = row.traits.stateful or not kind.markov
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
        raise PairTooLarge(f"toy {toy.name}, {row.draft}: {reason}")
    return replace(row, lengths=tuple(result))
