"""The answer at the top of the page, its table of cells, and the certificates of the verifiers in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ... import plugins
from ...metrics.columns import meaning
from ...runs.code_digest import source_of
from ...runs.labels import group_title, verifier_title
from ...runs.marks import Mark, mark_of
from ..charts.style import visible
from ..table_utils import estimate_text, groups_of, speed_up_text
from .svg import Axis, ticks

if TYPE_CHECKING:
    from ...metrics.cell_metrics import Metrics
    from ...metrics.intervals import Estimate
    from ...runs.records import CellResult
    from ..load_run import FinishedRun

RUNS = Sequence[tuple[str, "FinishedRun"]]


@dataclass(frozen=True)
class Column:
    """A column of the table: header, meaning, and True if its values are estimates with an interval."""

    key: str
    header: str
    meaning: str
    estimate: bool = False


COLUMNS = (
    Column("pair", "pair", "Drafter × verifier."),
    Column("block_efficiency", "block efficiency", meaning("block_efficiency"), True),
    Column("speed_up", "speed-up", meaning("speed_up"), True),
    Column("rate", "tok/s", meaning("tokens_per_second")),
    Column("per_user", "tok/s/user", "Tokens per second of one sequence: tok/s over the batch size."),
    Column("rows", "rows/tok", meaning("target_rows_per_token")),
    Column("first", "Pr(τ ≥ 1)", f"{meaning('acceptance_<i>')} Here i is 1."),
    Column("draft", "draft %", meaning("draft_share")),
    Column("same", "same %", meaning("same_as_baseline")),
)
ESTIMATES = tuple(column.key for column in COLUMNS if column.estimate)


@dataclass(frozen=True)
class Value:
    """An entry of the table: its text, the number it is sorted by, and the interval of an estimate."""

    text: str = ""
    order: float = -1.0
    estimate: Estimate | None = None

    @property
    def interval(self) -> str:
        e = self.estimate
        return "" if e is None or e.low is None or e.high is None else f"[{e.low:.2f}, {e.high:.2f}]"


@dataclass(frozen=True)
class Row:
    """A cell that drafts."""

    drafter: str
    verifier: str
    mark: Mark
    values: dict[str, Value]


@dataclass(frozen=True)
class Group:
    """The rows that were measured side by side.

    Attributes:
        title: the settings in which it differs from the other groups; empty if there is one group.
        plain: tokens/s of plain decoding; empty if it was not measured.
    """

    title: str
    plain: str
    rows: list[Row]


@dataclass(frozen=True)
class Scale:
    """The axis of a column's intervals, the same in every row."""

    axis: Axis

    def percent(self, value: float) -> float:
        return round(100 * min(max(self.axis.fraction(value), 0.0), 1.0), 2)

    @property
    def labels(self) -> list[tuple[str, float]]:
        return [(label, self.percent(value)) for value, label in self.axis.labels.items()]

    @property
    def grid(self) -> str:
        """CSS background with a line at each tick and a stronger one at 1."""
        lines = [(self.percent(1.0), "--soft")] if self.axis.low <= 1.0 <= self.axis.high else []
        lines += [(at, "--line") for _, at in self.labels]
        return ", ".join(f"linear-gradient(var({ink}), var({ink})) {at}% 0 / 1px 100% no-repeat" for at, ink in lines)


@dataclass(frozen=True)
class Table:
    """The table of all cells.

    Attributes:
        settings: settings of all cells, for the heading.
        columns: those with at least one value.
        scales: by the key of a column of estimates.
    """

    settings: list[str]
    columns: list[Column]
    groups: list[Group]
    scales: dict[str, Scale]

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    @property
    def filters(self) -> list[tuple[str, list[str]]]:
        """Name and values of each filter with more than one value."""
        by_setting = {
            "drafter": [row.drafter for row in self.rows],
            "verifier": [row.verifier for row in self.rows],
            "group": [group.title for group in self.groups],
        }
        distinct = {name: list(dict.fromkeys(values)) for name, values in by_setting.items()}
        return [(name, values) for name, values in distinct.items() if len(values) > 1]


def table_of(runs: RUNS) -> Table:
    """The table of the finished cells of ``runs``."""
    shared, groups = _groups(runs)
    results = [result for *_, group_results in groups for result in group_results]
    targets = {result.config.target for result in results}
    batched = any(result.config.batch_size > 1 for result in results)
    tables = []
    for title, _, group_results in groups:
        rows = [_row(r, batched) for r in group_results if r.metrics is not None and not r.config.is_baseline]
        plain = _plain_rate(group_results)
        if rows or plain:
            tables.append(Group(title, "" if plain is None else f"{plain:.1f}", rows))
    rows = [row for group in tables for row in group.rows]
    columns = [c for c in COLUMNS if c.key == "pair" or any(row.values[c.key].text for row in rows)]
    scales = {}
    for key in ESTIMATES:
        if estimates := [e for row in rows if (e := row.values[key].estimate) is not None]:
            low, high = visible(estimates, 1.0) if key == "speed_up" else visible(estimates)
            scales[key] = Scale(Axis(key, low, high, labels={t: f"{t:g}" for t in ticks(low, high, 4)}))
    settings = [*shared, f"target {targets.pop()}"] if len(targets) == 1 else shared
    return Table(settings, columns, tables, scales)


def _groups(runs: RUNS) -> tuple[list[str], list[tuple[str, str, list[CellResult]]]]:
    """The settings that all groups share; of each group the settings of its own, all its settings, and its results."""
    groups = [(title, group.split(", "), results) for title, run in runs for group, results in groups_of(run.summary)]
    shared = [part for part in groups[0][1] if all(part in parts for _, parts, _ in groups)] if groups else []
    split_groups = []
    for title, parts, results in groups:
        run = [title] * (len(runs) > 1)
        own = [part for part in parts if part not in shared]
        split_groups.append((", ".join(run + own), ", ".join(run + parts), results))
    return shared, split_groups


def _plain_rate(results: Sequence[CellResult]) -> float | None:
    """Tokens/s of plain decoding in a group; None if it was not measured."""
    metrics = next((r.metrics for r in results if r.config.is_baseline and r.metrics), None)
    return metrics.tokens_per_second if metrics and metrics.timed and not metrics.withheld else None


def _row(result: CellResult, batched: bool) -> Row:
    config, metrics = result.config, result.metrics
    assert metrics is not None
    rate = metrics.tokens_per_second if metrics.timed and not metrics.withheld else None
    same, draft = metrics.same_as_baseline, metrics.shares.get("draft", 0.0) if metrics.timed else None
    values = {
        "block_efficiency": _estimate(metrics.block_efficiency),
        "speed_up": Value(speed_up_text(metrics)) if metrics.withheld else _estimate(metrics.speed_up),
        "rate": _number(rate, ".1f"),
        "per_user": _number(rate / config.batch_size if rate and batched else None, ".1f"),
        "rows": _number(metrics.target_rows_per_token, ".2f"),
        "first": _number(metrics.acceptance[0] if metrics.acceptance else None, ".2f"),
        "draft": _number(None if draft is None else 100 * draft, ".0f"),
        "same": _number(None if same is None else 100 * same, ".0f"),
    }
    return Row(config.drafter.title, config.verifier.title, mark_of(result), values)


def _number(value: float | None, form: str) -> Value:
    return Value() if value is None else Value(f"{value:{form}}", value)


def _estimate(estimate: Estimate | None) -> Value:
    return Value() if estimate is None else Value(f"{estimate.value:.2f}", estimate.value, estimate)


def cell_title(title: str, run: FinishedRun, result: CellResult, with_run: bool) -> str:
    """A cell in words: its run, if there are several, its pair and its group."""
    configs = [r.config for r in run.summary.results]
    pair = f"{result.config.drafter.title} × {verifier_title(result)}"
    return ", ".join([*([title] if with_run else []), pair, group_title(result.config, configs)])


# -- the answer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """The best certified pair of a group.

    Attributes:
        group: settings in which the group differs from the others; ``setting``: all its settings.
        conditions: target, device and number of prompts.
        plain: tokens/s of plain decoding, None if unknown.
        of: number of certified pairs in the group.
    """

    group: str
    setting: str
    drafter: str
    verifier: str
    metrics: Metrics
    conditions: str
    plain: float | None
    certified_pairs: int

    @property
    def speed_up(self) -> Estimate | None:
        return None if self.metrics.withheld else self.metrics.speed_up

    @property
    def verdict(self) -> str:
        """Conclusion from the interval of the speed-up."""
        e = self.speed_up
        if e is None:
            return self.metrics.withheld or "not measured"
        if e.low is None or e.high is None:
            return "too few prompts for an interval"
        if e.low > 1:
            return "faster than plain decoding"
        return "slower than plain decoding" if e.high < 1 else "no difference from plain decoding was shown"

    @property
    def efficiency(self) -> str:
        return estimate_text(self.metrics.block_efficiency)


def best_of(runs: RUNS) -> list[Best]:
    """The best certified pair of each group, see `_order`.

    Lossy, failed and uncertified pairs are left out: their speed-up may be bought with a changed distribution.
    """
    best = []
    for group, setting, results in _groups(runs)[1]:
        certified = [(r, r.metrics) for r in results if r.metrics and not r.config.is_baseline and mark_of(r).headline]
        if certified:
            result, metrics = max(certified, key=lambda cell: _order(cell[1]))
            where = ", ".join(str(result.provenance[key]) for key in ("device", "dtype") if key in result.provenance)
            conditions = filter(None, (f"target {result.config.target}", where, f"{result.prompts} prompts"))
            drafter, verifier = result.config.drafter.title, result.config.verifier.title
            words = ", ".join(conditions)
            plain = _plain_rate(results)
            best.append(Best(group, setting, drafter, verifier, metrics, words, plain, len(certified)))
    return best


def headline_of(bests: Sequence[Best]) -> Best | None:
    """The best of all groups; None if no pair is certified."""
    return max(bests, key=lambda best: _order(best.metrics), default=None)


def _order(metrics: Metrics) -> tuple[bool, float, float]:
    """Sort key: shown to be faster than plain decoding, then speed-up, then block efficiency."""
    speed_up, efficiency = None if metrics.withheld else metrics.speed_up, metrics.block_efficiency
    faster = speed_up is not None and (speed_up.low or 0.0) > 1
    return faster, speed_up.value if speed_up else -1.0, efficiency.value if efficiency else -1.0


# -- certificates -------------------------------------------------------------------------------------------------


def certificates(runs: RUNS) -> list[dict[str, Any]]:
    """Name, mark, certificate and code of each verifier."""
    by_verifier: dict[tuple[str, str], dict[str, Any]] = {}
    for _, run in runs:
        for result in run.summary.results:
            config = result.config
            if config.is_baseline:
                continue
            source = result.provenance.get("verifier")
            source = source if isinstance(source, dict) else {}
            digest = str(source.get("sha256") or "")
            installed = source_of(plugins.get("verifiers", config.verifier.name))["sha256"]
            mark = mark_of(result)
            state = "changes the target's distribution" if mark.kind == "lossy" else f"{mark} {mark.where}".rstrip()
            if digest and digest != installed:
                state += " (other code than is installed here)"
            code = " ".join(str(source.get(key) or "") for key in ("distribution", "version")).strip()
            by_verifier[config.verifier.name, digest] = {
                "verifier": config.verifier.name,
                "promise": "lossy" if mark.kind == "lossy" else "lossless",
                "mark": mark,
                "certificate": state,
                "code": code,
                "sha256": digest,
            }
    return list(by_verifier.values())
