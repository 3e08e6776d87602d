"""What may be chosen: a drafter with a rule, how its drafts are accepted, and what its steps cost.

Acceptance comes from anywhere, as a list of `Acceptance` (`imported`), or from the cells of a finished run (`of_run`),
which know more: how wide each step was, how often the draft model ran, what verification and bookkeeping took.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .. import plugins
from ..cost.curve import CostCurve, Curve
from ..cost.finished_cells import curves_of, statistics
from ..cost.prediction import CellStatistics, Prediction, predict
from ..metrics.cell_metrics import Metrics, uncut_steps
from ..metrics.intervals import Estimate
from ..recipe.recipe import CellConfig
from ..runs.labels import group_title
from ..runs.marks import mark_of
from ..runs.records import CellResult
from .acceptance import Acceptance

#: Rules that accept token i whatever is drafted after it.
_LOOK_NO_FURTHER = ("token", "block", "greedy")


@dataclass(frozen=True)
class Candidate:
    """A drafter with a rule, and all that its speed depends on.

    Attributes:
        acceptance: how its drafts are accepted.
        target, drafter: curves of the two models; without the drafter's, drafting takes what ``steps`` say.
        steps: statistics of its steps by batch size, one at least; `speed_up` takes the nearest one's.
        plain: the same of plain decoding, where it was measured.
        group: what may be compared: target, sampling.
        title: of the drafter, for people.
        measured: what its cells measured where it ran, by batch size, with its own draft length; those with a speed-up.
        overlap: see `predict`.
    """

    acceptance: Acceptance
    target: Curve
    drafter: Curve | None
    steps: Mapping[int, CellStatistics]
    plain: Mapping[int, CellStatistics]
    group: str = ""
    title: str = ""
    measured: Mapping[int, Metrics] = field(default_factory=dict)
    overlap: bool = False

    @property
    def pair(self) -> str:
        """The same for candidates that differ in draft length alone."""
        found = self.acceptance
        options = {key: value for key, value in found.options.items() if key != "gamma"}
        return json.dumps(
            [found.drafter, found.model, found.verifier, options, found.chain], sort_keys=True, default=str
        )

    @property
    def gammas(self) -> tuple[int, ...]:
        """The draft lengths of which its acceptance can tell."""
        longest = self.acceptance.gamma
        return tuple(range(1, longest + 1)) if self.acceptance.cuttable else (longest,)

    def predict(self, batch_size: int, gamma: int, context: float | None = None) -> Prediction:
        """Its predicted step with drafts of ``gamma`` tokens, ``batch_size`` rows, all in use.

        Args:
            context: tokens that each row holds; those of its steps by default.

        Raises:
            UsageError: a curve of too few batch sizes or widths to say.
        """
        cell = _nearest(self.steps, batch_size)
        if gamma != self.acceptance.gamma:
            cell = cell.cut(gamma)
        plain = _nearest(self.plain, batch_size) if self.plain else cell.plain()
        cell, plain = cell.at(batch_size), plain.at(batch_size)
        if context is not None:
            cell, plain = replace(cell, context=context), replace(plain, context=context)
        return predict(cell, self.target, self.drafter, plain, overlap=self.overlap)

    def speed_up(self, batch_size: int, gamma: int, context: float | None = None) -> Estimate:
        """Predicted, over plain decoding; the interval is that of the acceptance, as if costs were known exactly."""
        value = self.predict(batch_size, gamma, context).speed_up
        found = (self.acceptance.cut(gamma) if gamma != self.acceptance.gamma else self.acceptance).block_efficiency()
        if found.low is None or found.high is None:
            return Estimate(value)
        return Estimate(value, value * found.low / found.value, value * found.high / found.value)


def _nearest(steps: Mapping[int, CellStatistics], batch_size: int) -> CellStatistics:
    """Of the nearest batch size, in the logarithm."""
    return steps[min(steps, key=lambda b: (max(b / batch_size, batch_size / b), b))]


# -- from numbers alone ----------------------------------------------------------------------------------------


def imported(
    acceptances: Iterable[Acceptance], target: Curve, drafter: Curve | None, context: float
) -> list[Candidate]:
    """Candidates from acceptance that was replayed or imported: chains, one pass of the draft model a token.

    Verification and bookkeeping count as free, and so does drafting without a curve.
    """
    found = []
    for acceptance in acceptances:
        gamma, length = acceptance.gamma, 1 + sum(acceptance.marginal)
        passes = gamma if drafter is not None else 0
        cell = CellStatistics(1, 1, length, {gamma: 1.0}, context, passes, acceptance=acceptance.marginal)
        temperature = acceptance.temperature
        group = "temperature unknown" if temperature is None else f"temperature {temperature:g}"
        title = acceptance.drafter or "drafts"
        found.append(Candidate(acceptance, target, drafter, {1: cell}, {}, group, title))
    return found


# -- from a finished run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Where a run's pairs are to be judged instead of where it ran.

    Attributes:
        target: curve of the target there.
        drafter: the curve of a draft model by name; None where drafting counts as free.
    """

    target: Curve
    drafter: Callable[[str], Curve | None]


def of_run(
    results: Sequence[CellResult], name: str, curves: Iterable[CostCurve], elsewhere: Machine | None = None
) -> tuple[list[Candidate], list[str]]:
    """The pairs of a finished run, and sentences on cells that are left out.

    Args:
        name: of the run, for people.
        curves: what was measured where it ran; those of other models and devices do no harm.
        elsewhere: another machine: then no second that the run took counts.
    """
    curves, notes = list(curves), []
    configs = [result.config for result in results]
    pairs: dict[str, list[CellResult]] = {}
    plain: dict[str, dict[int, CellStatistics]] = {}
    for result in results:
        config, cell = result.config, statistics(result)
        group = group_title(config, configs, but="batch_size")
        if cell is None or result.metrics is None:
            notes.append(f"{name}: {config.drafter.title} × {config.verifier.title} failed and is left out")
        elif config.is_baseline:
            plain.setdefault(group, {})[config.batch_size] = _moved(cell, elsewhere)
        elif not (mark := mark_of(result)).headline:
            advice = f"; crossdraft certify --verifier {config.verifier.name} certifies it"
            why = f"{config.verifier.title} is left out: {mark}"
            notes.append(f"{name}: {why}{advice if mark.kind == 'uncertified' else ''}")
        elif result.metrics.block_efficiency is None or not result.metrics.acceptance:
            notes.append(f"{name}: {config.drafter.title} had no room for a draft in any step and is left out")
        else:
            pairs.setdefault(config.model_copy(update={"batch_size": 1}).hash, []).append(result)
    found = []
    for cells in pairs.values():
        result = max(cells, key=lambda cell: len(cell.records))
        config = result.config
        acceptance = acceptance_of(result, name)
        if elsewhere is None:
            target, drafter = curves_of(result, curves)
        else:
            target = elsewhere.target
            drafter = elsewhere.drafter(acceptance.model) if _passes(result) else None
        if target is None:
            notes.append(
                f"{name}: no cost curve of {config.target} was measured where it ran, with as many threads; "
                f"measure it there: crossdraft cost --target {config.target}"
            )
            continue
        steps = {c.config.batch_size: _moved(s, elsewhere) for c in cells if (s := statistics(c)) is not None}
        group = group_title(config, configs, but="batch_size")
        title = config.drafter.name if acceptance.chain else _shaped(config)
        measured = {c.config.batch_size: c.metrics for c in cells if c.metrics is not None and c.metrics.speed_up}
        if elsewhere is not None:
            measured = {}
        found.append(Candidate(acceptance, target, drafter, steps, plain.get(group, {}), group, title, measured))
    return found, list(dict.fromkeys(notes))


def _shaped(config: CellConfig) -> str:
    """What to call a drafter of trees or several sequences: with the options that say how many."""
    told = {key: value for key, value in config.drafter.config.items() if key not in ("gamma", "model")}
    shape = ", ".join(f"{key} {value}" for key, value in told.items())
    return f"{config.drafter.name} ({shape})" if shape else config.drafter.name


def _passes(result: CellResult) -> bool:
    return result.metrics is not None and result.metrics.drafter_passes > 0


def _moved(cell: CellStatistics, elsewhere: Machine | None) -> CellStatistics:
    """Without the seconds that the machine of the run took."""
    return cell if elsewhere is None else replace(cell, draft_seconds=0.0, other_seconds=0.0)


def acceptance_of(result: CellResult, name: str) -> Acceptance:
    """Of a cell, over prompts, of the steps that had room for the deepest draft: as `Metrics.acceptance`."""
    config, metrics = result.config, result.metrics
    assert metrics is not None
    traits = _traits(config)
    gamma = len(metrics.acceptance)
    sums: dict[int, list[float]] = {}
    for record in uncut_steps(result.records, metrics.depth):
        row = sums.setdefault(record.prompt, [0.0] * (gamma + 1))
        for i in range(min(record.tau, gamma) + 1):
            row[i] += 1
    chain = traits.drawn == "chain"
    blind = config.verifier.name in _LOOK_NO_FURTHER or traits.point_mass
    return Acceptance.from_rows(
        [sums[prompt] for prompt in sorted(sums)],
        f"{name}, cell {config.hash}",
        drafter=config.drafter.name,
        verifier=config.verifier.name,
        model=str(config.drafter.config.get("model", "")),
        temperature=config.sampling.temperature,
        point_mass=traits.point_mass,
        chain=chain,
        options=_plain(config.drafter.config),
        cuttable=chain and blind and not _judge(config).stateful,
    )


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "model"}


def _traits(config: CellConfig) -> Any:
    drafter = plugins.get("drafters", config.drafter.name)
    return plugins.traits_of(
        "drafters", drafter, plugins.recorded_config("drafters", drafter, config.drafter.config), config.sampling
    )


def _judge(config: CellConfig) -> Any:
    rule = plugins.get("verifiers", config.verifier.name)
    return plugins.traits_of("verifiers", rule, plugins.recorded_config("verifiers", rule, config.verifier.config))
