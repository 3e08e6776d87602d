"""Candidates: pairs of drafter and verifier with their acceptance and the cost of their steps.

Candidates are built from any list of `Acceptance` (`imported`), or from the cells of a finished run (`of_run`), which
also record the width of each step, the passes of the draft model, and the time of verification and bookkeeping.

Seconds of a step over those of a plain one come from measured speeds of the pair (`StepCost`). Curves give how that
ratio grows with the batch size. Without speeds it comes from curves, if they are measured and have all passes, and else
from published series, and is at least that of the curves.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from pydantic import ValidationError

from crossdraft import Estimate, Sampling, UsageError, incompatible
from crossdraft.commands import fault, permits
from crossdraft.framework import plugins
from crossdraft.framework.cost.finished_cells import curves_of, statistics
from crossdraft.framework.cost.prediction import CellStatistics, Prediction, predict
from crossdraft.framework.metrics.cell_metrics import uncut_steps
from crossdraft.models import configured
from crossdraft.runs import CellConfig, CellResult, CostCurve, Curve, Metrics, group_title, mark_of

from ..cost.step_cost import SpeedPoint, StepCost, published_prior, speed_up_of
from ..engines.acceptance import UNKNOWN_PAIR, Acceptance
from .shorter_drafts import cut, not_shortenable, shorter_refusal

#: Half of the 95 % interval of the logarithm of a ratio of measured passes: in a run with 15 pairs, they differ from
#: measured speed-ups by up to 8 % (docs/cost.md).
_PASSES_ERROR = 0.15
#: Cost curves of a machine: of a target, and of a draft model by its name.
Machine = tuple[Curve, Callable[[str], "Curve | None"]]
_BETWEEN = 0.1  # the same of a ratio in the middle of two measured batch sizes


@dataclass(frozen=True)
class Candidate:
    """A pair of drafter and verifier, with everything its speed depends on."""

    acceptance: Acceptance  # acceptance of its drafts
    # target, drafter: cost curves of the two models, None if unknown; without the latter, the draft time is taken from
    # ``steps``
    target: Curve | None
    drafter: Curve | None
    # statistics of its steps by batch size (at least one); `speed_up` uses the nearest
    steps: Mapping[int, CellStatistics]
    plain: Mapping[int, CellStatistics]  # statistics of plain decoding by batch size, if measured
    group: str = ""  # target and sampling parameters; only candidates of one group are comparable
    title: str = ""  # of the drafter
    # measured metrics by batch size, at its own draft length, if they have a speed-up
    measured: Mapping[int, Metrics] = field(default_factory=dict)
    overlap: bool = False  # see `predict`
    speeds: tuple[SpeedPoint, ...] = ()  # measured speeds of the pair and of plain decoding
    engine: str = ""  # its name, for `published_prior`; empty if unknown
    disturbed: bool = False  # its speeds were measured on a busy machine, so their error is unknown

    @property
    def pair(self) -> str:
        """A key of the pair; equal for candidates that differ only in draft length."""
        return pair_of(self.acceptance)

    @property
    def gammas(self) -> tuple[int, ...]:
        """The draft lengths whose acceptance is known, and which the drafter's options permit."""
        longest = self.acceptance.gamma
        if self.acceptance.refusal:
            return (longest,)
        permitted, acceptance = tuple(range(1, longest + 1)), self.acceptance
        if acceptance.drafter in plugins.entries("drafters"):
            config = plugins.get("drafters", acceptance.drafter).Config
            options = {**acceptance.options, **({"model": acceptance.model} if acceptance.model else {})}
            permitted = tuple(n for n in permitted if permits(config, options, n))
        return permitted if longest in permitted else tuple(range(1, longest + 1))

    @property
    def unmeasured(self) -> bool:
        """True if published series price its steps, and nothing of its server was measured."""
        return not self.speeds and not self.measured_passes

    @property
    def measured_passes(self) -> bool:
        """True if its curves are measured and have all passes of a step."""
        return isinstance(self.target, CostCurve) and (self.drafter is not None or _looks_up(self.acceptance))

    def predict(self, batch_size: int, gamma: int, context: float | None = None) -> Prediction:
        """Predict a step with drafts of ``gamma`` tokens and ``batch_size`` full rows from the curves.

        ``context``: context length of each row; by default as in ``steps``. Raises UsageError: a cost curve with too
        few batch sizes or widths.
        """
        assert self.target is not None
        cell = self._cell(batch_size, gamma)
        plain = _nearest(self.plain, batch_size) if self.plain else cell.plain()
        cell, plain = cell.at(batch_size), plain.at(batch_size)
        if context is not None:
            cell, plain = replace(cell, context=context), replace(plain, context=context)
        return predict(cell, self.target, self.drafter, plain, overlap=self.overlap)

    def _cell(self, batch_size: int, gamma: int) -> CellStatistics:
        cell = _nearest(self.steps, batch_size)
        if gamma != self.acceptance.gamma:
            self.acceptance.cut(gamma)  # or refuse it
            cell = cut(cell, gamma)
        return cell

    def _passes(self, batch_size: int, gamma: int, context: float | None) -> float:
        """Seconds of a step over those of a plain one by the curves."""
        return self._cell(batch_size, gamma).tokens_per_step / self.predict(batch_size, gamma, context).speed_up

    def ratio(self, batch_size: int, gamma: int, context: float | None = None) -> Estimate:
        """Seconds of a step with drafts of ``gamma`` tokens over those of a plain step, at least 1.

        Raises UsageError: a cost curve with too few batch sizes or widths, or by which a draft makes a step shorter.
        """
        drafted = self._cell(batch_size, gamma).nodes
        if not drafted:
            return Estimate(1.0, 1.0, 1.0)
        growth, floor = 0.0, 1.0
        sizes = sorted({point.batch_size for point in self.speeds if point.gamma})
        if sizes and sizes[0] < batch_size < sizes[-1]:
            ratio = self._between(sizes, batch_size, drafted)
        elif self.measured_passes and not sizes:
            passes = self._passes(batch_size, gamma, context)
            ratio = Estimate(passes, passes * math.exp(-_PASSES_ERROR), passes * math.exp(_PASSES_ERROR))
        else:
            ratio = _ratio(self.speeds, batch_size, drafted, self.engine)
            if self.target is not None:
                passes = self._passes(batch_size, gamma, context)
                measured = min(sizes, key=lambda b: abs(math.log(b / batch_size)), default=1)
                growth = passes - self._passes(max(round(measured), 1), gamma, context)
                floor = 1.0 if sizes else passes
        assert ratio.low is not None and ratio.high is not None
        if ratio.high + growth < 1:
            raise UsageError(
                f"at B = {batch_size} and gamma {gamma}, a step takes {ratio.value + growth:.2f} times as long as one "
                "without drafts, which is not possible: the speeds are of other servers or loads, or were disturbed"
            )
        if self.disturbed:
            return Estimate(max(ratio.value + growth, floor, 1.0))
        return Estimate(*(max(bound + growth, floor, 1.0) for bound in (ratio.value, ratio.low, ratio.high)))

    def _between(self, sizes: Sequence[float], batch_size: int, drafted: float) -> Estimate:
        """The ratio between measured batch sizes: a line over log B, with `_BETWEEN` in the middle of two."""
        i = bisect_right(sizes, batch_size)
        low, high = sizes[i - 1], sizes[i]
        share = math.log(batch_size / low) / math.log(high / low)
        ends = [_ratio(self.speeds, size, drafted, self.engine) for size in (low, high)]
        value, *bounds = (
            sum(w * math.log(getattr(end, name)) for w, end in zip((1 - share, share), ends, strict=True))
            for name in ("value", "low", "high")
        )
        error = 2 * min(share, 1 - share) * _BETWEEN
        bounds = [value + math.copysign(math.hypot(bound - value, error), bound - value) for bound in bounds]
        return Estimate(*(math.exp(x) for x in (value, *bounds)))

    def plain_seconds(self, batch_size: int, context: float | None = None) -> float | None:
        """Seconds of a plain step; None if neither its speed nor the target's curve is known."""
        near = [p for p in self.speeds if not p.gamma and abs(math.log(p.batch_size / batch_size)) < 0.1]
        if near:
            return sum(p.seconds_per_step * p.weight for p in near) / sum(p.weight for p in near)
        if self.target is None:
            return None
        prediction = self.predict(batch_size, self.acceptance.gamma, context)
        return batch_size * prediction.speed_up / prediction.tokens_per_second

    def speed_up(self, batch_size: int, gamma: int, context: float | None = None) -> Estimate:
        """Predicted speed-up over plain decoding; the interval has the uncertainty of acceptance and cost."""
        uncut = self.acceptance.cut(gamma).block_efficiency()
        # the ends of short responses cut steps of a run
        share = self._cell(batch_size, gamma).tokens_per_step / uncut.value
        low, high = (bound and bound * share for bound in (uncut.low, uncut.high))
        tokens = Estimate(uncut.value * share, low, high)
        return speed_up_of(tokens, self.ratio(batch_size, gamma, context), high or tokens.value)


def pair_of(acceptance: Acceptance) -> str:
    """A key of a pair of drafter and verifier; equal for acceptances that differ only in draft length."""
    a = acceptance
    options = {key: value for key, value in a.options.items() if key != "gamma"}
    return json.dumps([a.drafter, a.model, a.verifier, options, a.chain], sort_keys=True, default=str)


@lru_cache(1024)
def _ratio(speeds: tuple[SpeedPoint, ...], batch_size: float, drafted: float, engine: str) -> Estimate:
    """Seconds of a step over those of a plain one, from measured speeds and the prior of an engine."""
    return _cost(speeds, batch_size, engine).ratio(drafted)


@lru_cache(64)
def _cost(speeds: tuple[SpeedPoint, ...], batch_size: float, engine: str) -> StepCost:
    return StepCost.from_speeds(speeds, batch_size, published_prior(engine, batch_size))


def _looks_up(acceptance: Acceptance) -> bool:
    """Return True for a known drafter without a model."""
    if acceptance.drafter not in plugins.entries("drafters"):
        return False
    cls = plugins.get("drafters", acceptance.drafter)
    try:
        config = cls.Config(
            **{key: value for key, value in acceptance.options.items() if key in cls.Config.model_fields}
        )
    except ValidationError:  # without its model
        return False
    return plugins.traits_of("drafters", cls, config, Sampling()).on_host


def _nearest(steps: Mapping[int, CellStatistics], batch_size: int) -> CellStatistics:
    """The statistics of the nearest batch size, in log scale."""
    return steps[min(steps, key=lambda b: (max(b / batch_size, batch_size / b), b))]


# -- from acceptance only --------------------------------------------------------------------------------------


def of_pair(acceptance: Acceptance) -> Acceptance:
    """Return the acceptance of an engine's drafts with ``refusal`` by the traits of its drafter and verifier.

    Raises UsageError: the verifier cannot verify its drafts, or the drafts are trees, whose nodes engines do not count.
    """
    name, verifier, temperature = acceptance.drafter, acceptance.verifier, acceptance.temperature
    if not acceptance.chain:
        raise UsageError(f"{acceptance.source}: {acceptance.refusal}; measure their cost with crossdraft run")
    if name not in plugins.entries("drafters") or (verifier and verifier not in plugins.entries("verifiers")):
        return acceptance
    cls = plugins.get("drafters", name)
    options = {**acceptance.options, "gamma": acceptance.gamma, "model": acceptance.model or "unknown"}
    try:
        config = cls.Config(**{key: value for key, value in options.items() if key in cls.Config.model_fields})
    except ValidationError as error:
        return replace(acceptance, refusal=f"the options of drafter '{name}' are unknown: {fault(error.errors()[0])}")
    rule = plugins.traits_of("verifiers", *configured("verifiers", verifier)) if verifier else None
    if temperature is None:
        temperature = 0.0 if rule is not None and rule.temperature_zero_only else 1.0
    sampling = Sampling(temperature=temperature)
    traits = plugins.traits_of("drafters", cls, config, sampling)
    if traits.always_drafts:
        acceptance = replace(acceptance, every_step=True)
    if rule is not None and (reason := incompatible(name, traits, verifier, rule, sampling)):
        raise UsageError(f"{acceptance.source}: {reason}")
    if not traits.is_chain:
        raise UsageError(
            f"{acceptance.source}: drafter '{name}' does not draft chains, and an engine's numbers lack the nodes of "
            "its drafts, which determine the cost of a step; measure it with crossdraft run"
        )
    if acceptance.refusal != UNKNOWN_PAIR:
        return acceptance
    if rule is None:
        return replace(acceptance, refusal="the verifier is unknown; name it as --verifier")
    refusal = not_shortenable(name, traits, verifier, rule)
    if not refusal and not (traits.always_drafts or acceptance.idle):
        refusal = (
            f"drafter '{name}' has steps without a draft, which are not counted here, so it gains less; replay "
            f"responses instead: crossdraft advise --replay RESPONSES --drafter {name}"
        )
    return replace(acceptance, refusal=refusal)


def imported(
    acceptances: Iterable[Acceptance],
    target: Curve | None,
    drafter: Curve | None,
    context: float,
    speeds: Iterable[SpeedPoint] = (),
    engine: str = "",
) -> list[Candidate]:
    """Candidates from replayed or imported acceptance of chains, with one pass of the draft model per token."""
    candidates = []
    for acceptance in acceptances:
        gamma, length = acceptance.gamma, 1 + sum(acceptance.marginal)
        passes = gamma * (1 - acceptance.idle) if drafter is not None else 0
        idle = 0.0 if acceptance.widths else acceptance.idle  # which are among the widths
        widths = acceptance.widths or {float(gamma): 1.0}
        cell = CellStatistics(1, 1, length, widths, context, passes, acceptance=acceptance.marginal, idle=idle)
        temperature = acceptance.temperature
        group = "temperature unknown" if temperature is None else f"temperature {temperature:g}"
        group = ", ".join([*acceptance.setting, group])
        title = acceptance.drafter or "drafts"
        candidates.append(
            Candidate(acceptance, target, drafter, {1: cell}, {}, group, title, speeds=tuple(speeds), engine=engine)
        )
    return candidates


# -- from a finished run ---------------------------------------------------------------------------------------


def of_run(
    results: Sequence[CellResult],
    name: str,
    curves: Sequence[CostCurve],
    machine: Machine | None = None,
    among: Iterable[CellConfig] = (),
) -> tuple[list[Candidate], list[str]]:
    """The candidates of a finished run, and notes on omitted cells.

    ``curves`` of other models and devices are ignored. ``machine``: another one, by the curve of the target and of a
    draft model by its name (None: drafting is free), for which times of the run are ignored. ``among``: cells of all
    runs; those of another target or other sampling parameters are of other groups.
    """
    notes = [f"{name}: the cost curve of {c.model} is not used: {c.implausible}" for c in curves if c.implausible]
    curves = [curve for curve in curves if not curve.implausible]
    configs = [result.config for result in results]
    others = [{"target": config.target, "sampling": config.sampling} for config in among]
    configs += [own.model_copy(update=other) for own in configs[:1] for other in others]
    pairs: dict[str, list[CellResult]] = {}
    plain: dict[str, dict[int, CellStatistics]] = {}
    plain_speeds: dict[str, list[SpeedPoint]] = {}
    for result in results:
        config, cell = result.config, statistics(result)
        group = group_title(config, configs, but="batch_size")
        if cell is None or result.metrics is None:
            notes.append(f"{name}: {config.drafter.title} × {config.verifier.title} failed and is omitted")
        elif config.is_baseline:
            plain.setdefault(group, {})[config.batch_size] = _without_times(cell, machine)
            plain_speeds.setdefault(group, []).append(_speed(result, cell, name))
        elif config.engine is None and not (mark := mark_of(result)).headline:
            advice = f"; run crossdraft certify --verifier {config.verifier.name}"
            reason = f"{config.verifier.title} is omitted: {mark}"
            notes.append(f"{name}: {reason}{advice if mark.kind == 'uncertified' else ''}")
        elif result.metrics.block_efficiency is None or not result.metrics.acceptance:
            notes.append(f"{name}: {config.drafter.title} drafted no tokens and is omitted")
        else:
            pairs.setdefault(config.model_copy(update={"batch_size": 1}).hash, []).append(result)
    if engines := sorted({str(own[0].config.engine.name) for own in pairs.values() if own[0].config.engine}):
        notes.append(
            f"{name}: served by {', '.join(engines)}, uncertified; crossdraft verify-engine compares the texts"
        )
    candidates = []
    for cells in pairs.values():
        group = group_title(cells[0].config, configs, but="batch_size")
        measured = plain.get(group, {}), plain_speeds.get(group, [])
        candidate, notes_of = _of_cells(cells, name, curves, machine, group, *measured)
        candidates += [candidate] if candidate else []
        notes += notes_of
    return candidates, list(dict.fromkeys(notes))


def _of_cells(
    cells: Sequence[CellResult],
    name: str,
    curves: Sequence[CostCurve],
    machine: Machine | None,
    group: str,
    plain: Mapping[int, CellStatistics],
    plain_speeds: Sequence[SpeedPoint],
) -> tuple[Candidate | None, list[str]]:
    """The candidate of the cells of a pair, which differ in batch size; None if the cost of its steps is unknown."""
    result = max(cells, key=lambda cell: len(cell.records))
    config, acceptance = result.config, acceptance_of(result, name)
    if machine is None:
        target, drafter = curves_of(result, curves)
    else:
        target, by_name = machine
        drafter = by_name(acceptance.model) if result.metrics and result.metrics.drafter_passes > 0 else None
    steps = [(c, s) for c in cells if (s := statistics(c, None if machine else drafter)) is not None]
    speeds = [*plain_speeds, *(_speed(c, s, name) for c, s in steps)] if machine is None and plain_speeds else []
    if target is None and not speeds:
        return None, [
            f"{name}: {config.target} has no cost curve for the device and threads of the run, nor speeds of plain "
            f"decoding; on that device, run crossdraft cost --target {config.target}"
        ]
    disturbed = [c.config.batch_size for c in cells if machine is None and c.metrics and c.metrics.withheld]
    notes = [
        f"{name}: {config.drafter.title} × {config.verifier.title}: the run withholds its speed-up at B = "
        f"{', '.join(map(str, sorted(disturbed)))}, so no interval is known; measure it on a quiet machine"
    ]
    options = {key: value for key, value in config.drafter.config.items() if key not in ("gamma", "model")}
    shape = ", ".join(f"{key} {value}" for key, value in options.items())  # of trees or several sequences
    candidate = Candidate(
        acceptance,
        target,
        drafter,
        {c.config.batch_size: _without_times(s, machine) for c, s in steps},
        plain,
        group,
        config.drafter.name + (f" ({shape})" if shape and not acceptance.chain else ""),
        {} if machine else {c.config.batch_size: c.metrics for c in cells if c.metrics and c.metrics.speed_up},
        speeds=tuple(speeds),
        disturbed=bool(disturbed),
    )
    return candidate, notes if disturbed else []


def _speed(result: CellResult, cell: CellStatistics, name: str) -> SpeedPoint:
    """The measured seconds of a cell's steps."""
    assert result.metrics is not None
    seconds = cell.occupied * cell.tokens_per_step / result.metrics.tokens_per_second
    place = f"{name}, cell {result.config.hash}"
    return SpeedPoint(cell.occupied, cell.nodes, cell.context, seconds, result.metrics.steps, place)


def _without_times(cell: CellStatistics, machine: Machine | None) -> CellStatistics:
    """Statistics without the times of the run's machine, if another machine is given."""
    return cell if machine is None else replace(cell, draft_seconds=0.0, other_seconds=0.0)


def acceptance_of(result: CellResult, name: str) -> Acceptance:
    """Acceptance of a cell, with prompts as pieces, over the same steps as `Metrics.acceptance`."""
    config, metrics = result.config, result.metrics
    assert metrics is not None
    traits = config.drafter_traits
    gamma = len(metrics.acceptance)
    sums: dict[int, list[float]] = {}
    for record in uncut_steps(result.records, metrics.depth):
        row = sums.setdefault(record.prompt, [0.0] * (gamma + 1))
        for i in range(min(record.tau, gamma) + 1):
            row[i] += 1
    return Acceptance.from_rows(
        [sums[prompt] for prompt in sorted(sums)],
        f"{name}, cell {config.hash}",
        drafter=config.drafter.name,
        verifier=config.verifier.name,
        model=str(config.drafter.config.get("model", "")),
        temperature=config.sampling.temperature,
        point_mass=traits.point_mass,
        chain=traits.is_chain,
        options={key: value for key, value in config.drafter.config.items() if key != "model"},
        refusal=shorter_refusal(config),
    )
