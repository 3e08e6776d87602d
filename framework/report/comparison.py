"""Comparison of two runs on the same prompts, pair by pair, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..errors import UsageError, printable
from ..metrics.cell_metrics import block_efficiency, counted_steps, paired_difference, prompts_of_pieces
from ..metrics.component_times import ComponentTimes, Withheld, speed_up_ratio
from ..recipe.recipe import RUN_KEYS
from ..runs.labels import group_title, pair_title, setting_of, verifier_title
from ..runs.marks import mark_of
from ..runs.records import cells_of
from ..util.estimate import Estimate, estimate_text
from ..util.table import Table
from .metrics_text import clock_text
from .selection import shown

if TYPE_CHECKING:
    from ..cost.load_run import FinishedRun
    from ..recipe.recipe import CellConfig
    from ..runs.records import CellResult

#: Settings in which runs may differ as a whole, besides the models.
_RUN_SETTINGS = (*RUN_KEYS, "device", "attn_implementation")
_OTHER_PIECES = (
    "B ÷ A has no interval if the runs divide the prompts into different pieces; run both with the same seed"
)


@dataclass(frozen=True)
class PairDifference:
    """A pair that both runs have.

    Attributes:
        setting: the title of its group: temperature, batch size and other varying settings.
        differs: options of the pair that differ, such as ``"gamma 4 / 6"``.
        block_efficiency, speed_up: of each run.
        clock: ratio by the clock of each run whose speed-up is withheld.
        prompts: number of prompts.
        difference: block efficiency of B minus A, paired by prompt.
        ratio: speed-up of B divided by A, paired by piece.
    """

    setting: str
    drafter: str
    verifier: str
    differs: list[str]
    block_efficiency: tuple[Estimate | None, Estimate | None]
    difference: Estimate | None
    speed_up: tuple[Estimate | None, Estimate | None]
    ratio: Estimate | None
    prompts: int = 0
    clock: tuple[float | None, float | None] = (None, None)


@dataclass
class Comparison:
    """A comparison of two runs, A and B.

    Attributes:
        pairs: pairs that both runs have.
        only: titles of the cells that only A, and only B, has.
        remarks: differences between the runs as a whole, and reasons for missing intervals.
    """

    runs: tuple[str, str]
    pairs: list[PairDifference] = field(default_factory=list)
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    remarks: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(a: FinishedRun, b: FinishedRun) -> Comparison:
    """Compare the cells of two runs with the same pair and setting, on the prompts that both have.

    Raises:
        UsageError: the runs are the same, or have no prompt or no pair in common.
    """
    runs = (a, b)
    names = tuple(printable(str(run.summary.directory)) for run in runs)
    if len({run.summary.directory.resolve() for run in runs}) == 1:
        raise UsageError(f"{names[0]} is given twice; give two different runs")
    comparison = Comparison((names[0], names[1]))
    shared = _shared_prompts(runs, comparison.remarks)
    drafting = [[r for r in run.summary.results if r.drafting] for run in runs]
    keys = _setting_keys(drafting, comparison.remarks)
    matched = _match(drafting[0], drafting[1], lambda c: (_setting(c, keys), c.drafter.identity, c.verifier.identity))
    unmatched = [[r for r in side if not any(r is m for pair in matched for m in pair)] for side in drafting]
    matched += _match(unmatched[0], unmatched[1], lambda c: (_setting(c, keys), c.drafter.title, c.verifier.title))
    if not matched:
        raise UsageError(f"{names[0]} and {names[1]} have no pair in common; crossdraft report shows the pairs of each")
    for i, results in enumerate(drafting):
        cells = [r.config for r in runs[i].summary.results]
        only = [r for r in results if not any(r is pair[i] for pair in matched)]
        comparison.only[i].extend(f"{pair_title(r)} ({group_title(r.config, cells)})" for r in only)
    cells, order = [first.config for first, _ in matched], [id(result) for result in drafting[0]]
    for first, second in sorted(matched, key=lambda pair: order.index(id(pair[0]))):
        ratio, other_pieces = _ratio(first, second, runs)
        comparison.pairs.append(_difference(first, second, ratio, cells, shared))
        if other_pieces and _OTHER_PIECES not in comparison.remarks:
            comparison.remarks.append(_OTHER_PIECES)
    return comparison


def comparison_text(comparison: Comparison, form: Literal["text", "markdown"] = "text") -> str:
    """The comparison as a table per setting, with remarks."""
    columns = ("drafter", "verifier", ("BE A", "right"), ("BE B", "right"), "B − A [95 %]")
    columns += (("speed-up A", "right"), ("speed-up B", "right"), "B ÷ A [95 %]", "A / B")
    differs = any(pair.differs for pair in comparison.pairs)
    parts = [f"A: {comparison.runs[0]}\nB: {comparison.runs[1]}"]
    for setting in dict.fromkeys(pair.setting for pair in comparison.pairs):
        rows = []
        for pair in comparison.pairs:
            if pair.setting != setting:
                continue
            efficiency = [f"{e.value:.2f}" if e else "—" for e in pair.block_efficiency]
            both = zip(pair.speed_up, pair.clock, strict=True)
            speed = [f"{e.value:.2f}" if e else clock_text(clock) or "—" for e, clock in both]
            row = [pair.drafter, pair.verifier, *efficiency, estimate_text(pair.difference, "+")]
            row += [*speed, estimate_text(pair.ratio)]
            rows.append([*row, ", ".join(pair.differs)])
        table = Table(columns, rows, title=setting)
        parts.append((table if differs else table.without("A / B")).render(form))
    parts.append(
        "B − A: of block efficiency, on the same prompts. B ÷ A: of the speed-ups, each over plain decoding in its run."
    )
    lines = list(comparison.remarks)
    if any(ratio is not None for pair in comparison.pairs for ratio in pair.clock):
        lines.append("~: by the clock, other programs included, because the speed-up is withheld")
    for name, cells in zip("AB", comparison.only, strict=True):
        lines += [f"only in {name}: {cell}" for cell in cells]
    if lines:
        parts.append("\n".join(f"- {line}" if form == "markdown" else line for line in lines))
    return "\n\n".join(parts) + "\n"


# -- pieces -----------------------------------------------------------------------------------------------------


def _shared_prompts(runs: Sequence[FinishedRun], remarks: list[str]) -> set[int]:
    """Positions of the prompts that both runs have, with a remark if others are left out; raises UsageError if none."""
    results = [run.summary.results for run in runs]
    prompts = [{(record.prompt, record.question_id) for r in side for record in r.records} for side in results]
    shared, counts = prompts[0] & prompts[1], [len(items) for items in prompts]
    sources = [printable(run.summary.recipe.prompts.source) for run in runs]
    if not shared or (prompts[0] != prompts[1] and sources[0] != sources[1]):
        prompt_sets = " and ".join(f"{count} of {source}" for count, source in zip(counts, sources, strict=True))
        raise UsageError(f"the runs cannot be compared: their prompts differ, {prompt_sets}")
    digests = [{r.provenance.get("prompts") for r in side} for side in results]
    changed = prompts[0] == prompts[1] and digests[0] != digests[1] and {None} not in digests
    if prompts[0] != prompts[1]:  # their digest is one of all texts
        one, other = results[0][0], results[1][0]
        tokens = [{p["question_id"]: p["prompt_tokens"] for p in r.responses if not p["turn"]} for r in (one, other)]
        changed = one.config.target == other.config.target and any(
            tokens[0][key] != tokens[1][key] for key in tokens[0].keys() & tokens[1].keys()
        )
        remarks.append(
            f"compared on the {len(shared)} prompts that both runs have, of {counts[0]} in A and {counts[1]} in B; "
            "speed-ups are of all prompts of each, B ÷ A is of the pieces with the same prompts"
        )
    if changed:
        raise UsageError("the runs cannot be compared: their prompts have the same ids, but different texts")
    return {prompt for prompt, _ in shared}


def _setting_keys(drafting: Sequence[Sequence[CellResult]], remarks: list[str]) -> tuple[str, ...]:
    """Settings that vary within a run; adds remarks on settings that differ between the runs."""
    keys = []
    for key in _RUN_SETTINGS:
        values = [list(dict.fromkeys(shown(setting_of(r.config, key)) for r in results)) for results in drafting]
        if key == "batch_size" or any(len(items) != 1 for items in values):
            keys.append(key)
        elif values[0] != values[1]:
            remarks.append(
                f"the runs differ in {key}: {values[0][0] or 'default'} in A, {values[1][0] or 'default'} in B"
            )
    for key, name in (("crossdraft", "crossdraft"), ("torch", "torch"), ("device", "the device")):
        recorded = [sorted({str(r.provenance[key]) for r in rs if key in r.provenance}) for rs in drafting]
        if recorded[0] and recorded[1] and recorded[0] != recorded[1]:
            remarks.append(f"the runs differ in {name}: {', '.join(recorded[0])} in A, {', '.join(recorded[1])} in B")
    return tuple(keys)


def _setting(config: CellConfig, keys: Sequence[str]) -> tuple[Any, ...]:
    return (config.sampling, *(getattr(config, key) for key in keys))


def _match(
    a: Sequence[CellResult], b: Sequence[CellResult], key: Callable[[CellConfig], Any]
) -> list[tuple[CellResult, CellResult]]:
    """Pairs of cells with the same key, if it is unique in both runs."""
    sides: list[dict[Any, list[CellResult]]] = [{}, {}]
    for by_key, results in zip(sides, (a, b), strict=True):
        for result in results:
            by_key.setdefault(str(key(result.config)), []).append(result)
    both = [name for name in sides[0] if name in sides[1]]
    return [(sides[0][n][0], sides[1][n][0]) for n in both if len(sides[0][n]) == len(sides[1][n]) == 1]


def _difference(
    first: CellResult, second: CellResult, ratio: Estimate | None, cells: Sequence[CellConfig], shared: set[int]
) -> PairDifference:
    assert first.metrics is not None and second.metrics is not None
    depths = first.metrics.depth, second.metrics.depth
    records = [[record for record in result.records if record.prompt in shared] for result in (first, second)]
    steps = [counted_steps(own, max(depths)) for own in records]
    difference = paired_difference(steps[1], steps[0])
    prompts = len(set.intersection(*({record.prompt for record in records} for records in steps)))
    differs = []
    for kind in ("drafter", "verifier"):
        a, b = getattr(first.config, kind), getattr(second.config, kind)
        options = {"name": (a.name, b.name)}
        options |= {key: (a.config.get(key), b.config.get(key)) for key in a.config | b.config}
        differs += [f"{key} {shown(x)} / {shown(y)}" for key, (x, y) in options.items() if x != y]
    marks = [str(mark_of(result)) for result in (first, second)]
    differs += [" / ".join(marks)] * (marks[0] != marks[1])
    one, other = (
        block_efficiency(counted_steps(own, depth), depth) for own, depth in zip(records, depths, strict=True)
    )
    speeds = first.metrics.speed_up, second.metrics.speed_up
    setting = group_title(first.config, cells)
    names = first.config.drafter.title, verifier_title(first)
    a, b = (m.speed_up_wall if m.withheld else None for m in (first.metrics, second.metrics))
    return PairDifference(setting, *names, differs, (one, other), difference, speeds, ratio, prompts, (a, b))


def _ratio(first: CellResult, second: CellResult, runs: Sequence[FinishedRun]) -> tuple[Estimate | None, bool]:
    """The ratio of the speed-ups, over the pieces with the same prompts in both runs, and True without such pieces."""
    results = (second, first)
    speeds = [metrics.speed_up.value for r in results if (metrics := r.metrics) and metrics.speed_up]
    if len(speeds) < 2:
        return None, False
    groups = [
        [r for r in run.summary.results if r.config.group == result.config.group and r.metrics is not None]
        for result, run in zip(results, reversed(runs), strict=True)
    ]
    baselines = [r for group in groups for r in group if r.config.is_baseline]
    pieces = [prompts_of_pieces(r.records, r.pieces) for r in (*results, *baselines)]
    common = [prompts for prompts in pieces[0] if all(prompts in own for own in pieces)]
    if len(baselines) != 2 or not common:
        return Estimate(speeds[0] / speeds[1]), True
    times = []
    for group, *pair, own in zip(groups, results, baselines, pieces[:2], strict=True):
        cell, baseline = ([r is one for r in group].index(True) for one in pair)
        chosen = [own.index(prompts) for prompts in common]
        cells = [each._replace(pieces=[each.pieces[i] for i in chosen]) for each in cells_of(group)]
        times.append((ComponentTimes(cells), cell, baseline))
    ratio = speed_up_ratio(*times)
    return None if isinstance(ratio, Withheld) else ratio, False
