"""The table of cells of the page, and the certificates of the verifiers in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossdraft import Estimate
from crossdraft.framework import plugins
from crossdraft.framework.metrics.columns import meaning
from crossdraft.framework.report.metrics_text import rate_text, speed_up_text
from crossdraft.framework.runs.code_digest import source_of
from crossdraft.runs import Mark, group_title, mark_of, pair_title

from ..charts.style import visible

if TYPE_CHECKING:
    from crossdraft.runs import CellResult, FinishedRun, Metrics, Summary

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
    """An entry of the table: its text, the number it is sorted by, the interval of an estimate, and its clock."""

    text: str = ""
    order: float = -1.0
    estimate: Estimate | None = None
    clock: bool = False

    @property
    def interval(self) -> str:
        e = self.estimate
        return "" if e is None or e.low is None or e.high is None else f"[{e.low:.2f}, {e.high:.2f}]"


@dataclass(frozen=True)
class CellRow:
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
        plain: tokens/s of plain decoding, see `rate_text`; empty if it was not measured.
    """

    title: str
    plain: str
    rows: list[CellRow]


@dataclass(frozen=True)
class Scale:
    """The axis of a column's intervals, the same in every row."""

    low: float
    high: float

    def percent(self, value: float) -> float:
        return round(100 * min(max((value - self.low) / (self.high - self.low), 0.0), 1.0), 2)

    @property
    def labels(self) -> list[tuple[str, float]]:
        """At most about four round numbers and their places."""
        from matplotlib.ticker import MaxNLocator

        ticks = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(self.low, self.high)
        return [(f"{tick:g}", self.percent(tick)) for tick in ticks if self.low <= tick <= self.high]

    @property
    def grid(self) -> str:
        """CSS background with a line at each tick and a stronger one at 1."""
        lines = [(self.percent(1.0), "--soft")] if self.low <= 1.0 <= self.high else []
        lines += [(at, "--line") for _, at in self.labels]
        return ", ".join(f"linear-gradient(var({ink}), var({ink})) {at}% 0 / 1px 100% no-repeat" for at, ink in lines)


@dataclass(frozen=True)
class CellTable:
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
    def rows(self) -> list[CellRow]:
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


def split_groups(runs: Sequence[tuple[str, Summary]]) -> tuple[list[str], list[tuple[str, str, list[CellResult]]]]:
    """The settings that all groups share; of each group the settings of its own, all its settings, and its results."""
    groups = [(title, group.split(", "), results) for title, run in runs for group, results in run.groups]
    shared = [part for part in groups[0][1] if all(part in parts for _, parts, _ in groups)] if groups else []
    split = []
    for title, parts, results in groups:
        run = [title] * (len(runs) > 1)
        own = [part for part in parts if part not in shared]
        split.append((", ".join(run + own), ", ".join(run + parts), results))
    return shared, split


def table_of(runs: RUNS) -> CellTable:
    """The table of the finished cells of ``runs``."""
    shared, groups = split_groups([(title, run.summary) for title, run in runs])
    results = [result for *_, group_results in groups for result in group_results]
    targets = {result.config.target for result in results}
    batched = any(result.config.batch_size > 1 for result in results)
    tables = []
    for title, _, group_results in groups:
        drafting = [r for r in group_results if r.drafting]
        rows = [_row(r, batched) for r in drafting]
        plain = next((rate_text(r.metrics) for r in group_results if r.config.is_baseline and r.metrics), "")
        if rows or plain:
            tables.append(Group(title, plain, rows))
    rows = [row for group in tables for row in group.rows]
    columns = [c for c in COLUMNS if c.key == "pair" or any(row.values[c.key].text for row in rows)]
    scales = {}
    for key in ESTIMATES:
        if estimates := [e for row in rows if (e := row.values[key].estimate) is not None]:
            low, high = visible(estimates, 1.0) if key == "speed_up" else visible(estimates)
            scales[key] = Scale(low, high)
    settings = [*shared, f"target {targets.pop()}"] if len(targets) == 1 else shared
    return CellTable(settings, columns, tables, scales)


def _row(result: CellResult, batched: bool) -> CellRow:
    config, metrics = result.config, result.metrics
    assert metrics is not None
    same, draft = metrics.same_as_baseline, metrics.shares.get("draft", 0.0) if metrics.timed else None
    values = {
        "block_efficiency": _estimate(metrics.block_efficiency, metrics.all_cut),
        "speed_up": Value(speed_up_text(metrics), clock=True) if metrics.withheld else _estimate(metrics.speed_up),
        "rate": _rate(metrics),
        "per_user": _rate(metrics, config.batch_size) if batched else Value(),
        "rows": _number(metrics.target_rows_per_token, ".2f"),
        "first": _number(metrics.acceptance[0] if metrics.acceptance else None, ".2f"),
        "draft": _number(None if draft is None else 100 * draft, ".0f"),
        "same": _number(None if same is None else 100 * same, ".0f"),
    }
    return CellRow(config.drafter.title, config.verifier.title, mark_of(result), values)


def _number(value: float | None, form: str) -> Value:
    return Value() if value is None else Value(f"{value:{form}}", value)


def _rate(metrics: Metrics, share: int = 1) -> Value:
    """Tokens/s over ``share``; those by the clock are not sorted with the others."""
    order = -1.0 if metrics.withheld else metrics.tokens_per_second / share
    return Value(rate_text(metrics, share), order, clock=bool(metrics.withheld))


def _estimate(estimate: Estimate | None, all_cut: bool = False) -> Value:
    if estimate is None:
        return Value()
    return Value(f"{estimate.value:.2f}{' *' * all_cut}", estimate.value, estimate)


def cell_title(title: str, run: FinishedRun, result: CellResult, with_run: bool) -> str:
    """A cell in words: its run, if there are several, its pair and its group."""
    configs = [r.config for r in run.summary.results]
    return ", ".join([*([title] if with_run else []), pair_title(result), group_title(result.config, configs)])


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
            state = "changes the target's distribution" if mark.kind == "lossy" else f"{mark} {mark.place}".rstrip()
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
