"""Two runs of the same prompts, pair by pair: what differs, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, printable
from ..metrics.cell_metrics import paired_difference, prompts_of_pieces, uncut_steps
from ..metrics.component_times import ComponentTimes, Withheld, speed_up_ratio
from ..metrics.intervals import Estimate
from ..recipe.recipe import RUN_KEYS
from ..runs.labels import group_title, verifier_title
from ..runs.marks import mark_of
from ..runs.records import cells_of
from .selection import shown
from .table_utils import estimate_text, tabulated

if TYPE_CHECKING:
    from ..recipe.recipe import CellConfig
    from ..runs.records import CellResult
    from .load_run import FinishedRun

#: What runs may differ in as a whole, beside the models themselves.
_WHOLE = (*RUN_KEYS, "device", "attn_implementation")
_OTHER_PIECES = "B ÷ A has no interval where the runs cut the prompts into other pieces; give both one seed"


@dataclass(frozen=True)
class PairDifference:
    """A pair in both runs.

    Attributes:
        setting: what its cells share with others: temperature, batch size and whatever else varies.
        differs: options of the pair that are not the same in both, ``"gamma 4 / 6"``.
        block_efficiency, speed_up: of each run.
        difference: of the block efficiencies, the second less the first, over the prompts of both.
        ratio: of the speed-ups, the second over the first, over pieces of the same prompts.
    """

    setting: str
    drafter: str
    verifier: str
    differs: list[str]
    block_efficiency: tuple[Estimate | None, Estimate | None]
    difference: Estimate | None
    speed_up: tuple[Estimate | None, Estimate | None]
    ratio: Estimate | None


@dataclass
class Comparison:
    """Two runs, called A and B.

    Attributes:
        pairs: those that both have.
        only: cells of A that B has not, and of B that A has not, in words.
        remarks: what the runs differ in as a whole, and what has no interval and why.
    """

    runs: tuple[str, str]
    pairs: list[PairDifference] = field(default_factory=list)
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    remarks: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(a: FinishedRun, b: FinishedRun) -> Comparison:
    """Set the cells of two runs side by side: those of the same pair and setting.

    Raises:
        UsageError: they are one run, answered other prompts, or have no pair in common.
    """
    runs = (a, b)
    names = tuple(printable(str(run.summary.directory)) for run in runs)
    if len({run.summary.directory.resolve() for run in runs}) == 1:
        raise UsageError(f"{names[0]} is given twice; give two runs")
    _same_prompts(runs)
    comparison = Comparison((names[0], names[1]))
    drafting = [[r for r in run.summary.results if r.metrics and not r.config.is_baseline] for run in runs]
    settled = _settled(drafting, comparison.remarks)
    matched = _matched(drafting[0], drafting[1], lambda c: (_setting(c, settled), *_pair(c)))
    left = [[r for r in some if not any(r is one for pair in matched for one in pair)] for some in drafting]
    matched += _matched(left[0], left[1], lambda c: (_setting(c, settled), c.drafter.title, c.verifier.title))
    if not matched:
        raise UsageError(
            f"{names[0]} and {names[1]} have no pair in common; crossdraft table shows what each of them has"
        )
    for side, some in enumerate(drafting):
        cells = [r.config for r in runs[side].summary.results]
        alone = [r for r in some if not any(r is pair[side] for pair in matched)]
        comparison.only[side].extend(f"{_called(r)} ({group_title(r.config, cells)})" for r in alone)
    cells, order = [one.config for one, _ in matched], [id(result) for result in drafting[0]]
    for one, other in sorted(matched, key=lambda pair: order.index(id(pair[0]))):
        comparison.pairs.append(_difference(one, other, runs, cells))
    if any(_speed_ups(pair) and _same_pieces(*pair, runs) is None for pair in matched):
        comparison.remarks.append(_OTHER_PIECES)
    return comparison


def comparison_text(comparison: Comparison, style: str = "simple") -> str:
    """The comparison as tables in one of tabulate's styles, a setting each, and what is to be said beside them."""
    columns = {"drafter": "left", "verifier": "left", "BE A": "right", "BE B": "right", "B − A [95 %]": "left"}
    columns |= {"speed-up A": "right", "speed-up B": "right", "B ÷ A [95 %]": "left"}
    if differs := any(pair.differs for pair in comparison.pairs):
        columns["A / B"] = "left"
    parts = [f"A: {comparison.runs[0]}\nB: {comparison.runs[1]}"]
    for setting in dict.fromkeys(pair.setting for pair in comparison.pairs):
        rows = []
        for pair in comparison.pairs:
            if pair.setting != setting:
                continue
            efficiency, speed = (
                [f"{e.value:.2f}" if e else "—" for e in two] for two in (pair.block_efficiency, pair.speed_up)
            )
            row = [pair.drafter, pair.verifier, *efficiency, estimate_text(pair.difference, "+")]
            row += [*speed, estimate_text(pair.ratio)]
            rows.append([*row, ", ".join(pair.differs)] if differs else row)
        heading = f"## {setting}" if style == "github" else setting
        parts.append(f"{heading}\n\n{tabulated(columns, rows, style)}")
    parts.append(
        "B − A: of block efficiency, on the same prompts. B ÷ A: of the speed-ups, each over plain decoding measured "
        "beside it."
    )
    lines = list(comparison.remarks)
    for name, alone in zip("AB", comparison.only, strict=True):
        lines += [f"only in {name}: {cell}" for cell in alone]
    if lines:
        parts.append("\n".join(f"- {line}" if style == "github" else line for line in lines))
    return "\n\n".join(parts) + "\n"


# -- pieces -----------------------------------------------------------------------------------------------------


def _same_prompts(runs: Sequence[FinishedRun]) -> None:
    """Raise UsageError unless both runs answered the same prompts."""
    digests = [{r.provenance.get("prompts") for r in run.summary.results} for run in runs]
    asked = [{(record.prompt, record.question_id) for r in run.summary.results for record in r.records} for run in runs]
    if asked[0] == asked[1] and (digests[0] == digests[1] or {None} in digests):
        return
    counts = [len(some) for some in asked]
    if asked[0] != asked[1] and asked[0] & asked[1] and counts[0] != counts[1]:
        raise UsageError(
            f"the runs cannot be compared: one answered {counts[0]} prompts and the other {counts[1]}; run both with "
            "the same limit"
        )
    if asked[0] == asked[1]:
        raise UsageError("the runs cannot be compared: their prompts have the same names, but not the same texts")
    sources = [printable(run.summary.recipe.prompts.source) for run in runs]
    which = " and ".join(f"{count} of {source}" for count, source in zip(counts, sources, strict=True))
    raise UsageError(f"the runs cannot be compared: they answered other prompts, {which}")


def _settled(drafting: Sequence[Sequence[CellResult]], remarks: list[str]) -> tuple[str, ...]:
    """The keys that tell cells apart: not those that have one value in each run. Where the two differ is remarked."""
    keys = []
    for key in _WHOLE:
        values = [list(dict.fromkeys(shown(getattr(r.config, key)) for r in some)) for some in drafting]
        if key == "batch_size" or any(len(some) != 1 for some in values):
            keys.append(key)
        elif values[0] != values[1]:
            remarks.append(
                f"the runs differ in {key}: {values[0][0] or 'default'} in A, {values[1][0] or 'default'} in B"
            )
    for key, what in (("crossdraft", "crossdraft"), ("torch", "torch"), ("device", "the device")):
        found = [sorted({str(r.provenance[key]) for r in some if key in r.provenance}) for some in drafting]
        if found[0] and found[1] and found[0] != found[1]:
            remarks.append(f"the runs differ in {what}: {', '.join(found[0])} in A, {', '.join(found[1])} in B")
    return tuple(keys)


def _setting(config: CellConfig, keys: Sequence[str]) -> tuple[Any, ...]:
    return (config.sampling, *(getattr(config, key) for key in keys))


def _pair(config: CellConfig) -> tuple[str, ...]:
    """Both strategies with all their options."""
    return tuple(f"{side.name} {sorted(side.config.items())}" for side in (config.drafter, config.verifier))


def _matched(
    a: Sequence[CellResult], b: Sequence[CellResult], key: Callable[[CellConfig], Any]
) -> list[tuple[CellResult, CellResult]]:
    """The cells that have the same key and are the only ones that have it."""
    sides: list[dict[Any, list[CellResult]]] = [{}, {}]
    for found, some in zip(sides, (a, b), strict=True):
        for result in some:
            found.setdefault(str(key(result.config)), []).append(result)
    both = [name for name in sides[0] if name in sides[1]]
    return [(sides[0][n][0], sides[1][n][0]) for n in both if len(sides[0][n]) == len(sides[1][n]) == 1]


def _difference(
    one: CellResult, other: CellResult, runs: Sequence[FinishedRun], cells: Sequence[CellConfig]
) -> PairDifference:
    assert one.metrics is not None and other.metrics is not None
    depth = max(one.metrics.depth, other.metrics.depth)
    difference = paired_difference(uncut_steps(other.records, depth), uncut_steps(one.records, depth))
    differs = []
    for kind in ("drafter", "verifier"):
        mine, theirs = getattr(one.config, kind), getattr(other.config, kind)
        options = {"name": (mine.name, theirs.name)}
        options |= {key: (mine.config.get(key), theirs.config.get(key)) for key in mine.config | theirs.config}
        differs += [f"{key} {shown(x)} / {shown(y)}" for key, (x, y) in options.items() if x != y]
    marks = [str(mark_of(result)) for result in (one, other)]
    differs += [" / ".join(marks)] * (marks[0] != marks[1])
    efficiency = one.metrics.block_efficiency, other.metrics.block_efficiency
    speeds = one.metrics.speed_up, other.metrics.speed_up
    setting = group_title(one.config, cells)
    names = one.config.drafter.title, verifier_title(one)
    return PairDifference(setting, *names, differs, efficiency, difference, speeds, _ratio(one, other, runs))


def _ratio(one: CellResult, other: CellResult, runs: Sequence[FinishedRun]) -> Estimate | None:
    """Of the speed-ups; without an interval where pieces held other prompts."""
    if (speeds := _speed_ups((other, one))) is None:
        return None
    if _same_pieces(one, other, runs) is not None:
        found = speed_up_ratio(_times(other, runs[1]), _times(one, runs[0]))
        return None if isinstance(found, Withheld) else found
    return Estimate(speeds[0] / speeds[1])


def _times(result: CellResult, run: FinishedRun) -> tuple[ComponentTimes, int, int]:
    """The component times of a cell's group, which of its cells it is, and which plain decoding."""
    group = _group(result, run)
    cell, baseline = (next(i for i, r in enumerate(group) if of(r)) for of in (lambda r: r is result, _is_baseline))
    return ComponentTimes(cells_of(group)), cell, baseline


def _is_baseline(result: CellResult) -> bool:
    return result.config.is_baseline


def _group(result: CellResult, run: FinishedRun) -> list[CellResult]:
    return [r for r in run.summary.results if r.config.group == result.config.group and r.metrics is not None]


def _speed_ups(pair: tuple[CellResult, CellResult]) -> tuple[float, float] | None:
    """Of both cells, if both have one."""
    found = [r.metrics.speed_up.value for r in pair if r.metrics is not None and r.metrics.speed_up is not None]
    return (found[0], found[1]) if len(found) == 2 else None


def _same_pieces(one: CellResult, other: CellResult, runs: Sequence[FinishedRun]) -> list[CellResult] | None:
    """The second cell, its baseline, the first cell and its own, if piece i of all four held the same prompts."""
    four: list[CellResult] = []
    for result, run in ((other, runs[1]), (one, runs[0])):
        four += [result, *(r for r in _group(result, run) if r.config.is_baseline)]
    pieces = {tuple(prompts_of_pieces(r.records, r.pieces)) for r in four}
    return four if len(four) == 4 and len(pieces) == 1 else None


def _called(result: CellResult) -> str:
    return f"{result.config.drafter.title} × {verifier_title(result)}"
