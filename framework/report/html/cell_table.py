"""The cells of runs as rows of the page's table, and what the page says of their rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ... import plugins
from ...metrics.columns import meaning
from ...runs.code_digest import source_of
from ...runs.labels import group_title, verifier_title
from ...runs.marks import mark_of
from ..table_utils import speed_up_text

if TYPE_CHECKING:
    from ...metrics.intervals import Estimate
    from ...runs.records import CellResult
    from ..load_run import FinishedRun

RUNS = Sequence[tuple[str, "FinishedRun"]]


@dataclass(frozen=True)
class Column:
    """A column: its header, what it means, and whether readers choose among its values."""

    key: str
    header: str
    meaning: str
    chosen: bool = False


#: What is read first stands first: on a phone the others are a swipe away.
COLUMNS = (
    Column("drafter", "drafter", meaning("drafter"), True),
    Column("verifier", "verifier", meaning("verifier"), True),
    Column("batch_size", "B", meaning("batch_size"), True),
    Column("block_efficiency", "BE", meaning("block_efficiency")),
    Column("speed_up", "speed-up", meaning("speed_up")),
    Column("setting", "setting", "Temperature, and whatever else varies but drafter, rule and batch size.", True),
    Column("rate", "tok/s", meaning("tokens_per_second")),
    Column("per_user", "tok/s/user", "Tokens per second of one sequence: tok/s over the batch size."),
    Column("rows", "rows/tok", meaning("target_rows_per_token")),
    Column("first", "Pr(τ ≥ 1)", f"{meaning('acceptance_<i>')} Here i is 1."),
    Column("draft", "draft %", meaning("draft_share")),
    Column("same", "same %", meaning("same_as_baseline")),
    Column("run", "run", "The run that the cell belongs to.", True),
)


def where(title: str, run: FinishedRun, result: CellResult, several: bool) -> str:
    """A cell in words: its run, if there are several, its pair and its group."""
    config = result.config
    cells = [r.config for r in run.summary.results]
    pair = "plain decoding" if config.is_baseline else f"{config.drafter.title} × {verifier_title(result)}"
    return ", ".join([*([title] if several else []), pair, group_title(config, cells)])


def cells_of(runs: RUNS) -> list[dict[str, dict[str, Any]]]:
    """A row for every finished cell: by the column's key a value to show (`text`), one to sort by (`order`), and of an
    estimate its `bar`: left end, value and right end in per cent of the column's width."""
    every = [(title, run, r) for title, run in runs for r in run.summary.results if r.metrics is not None]
    most: dict[str, float] = {}
    for _, _, result in every:
        for key in ("block_efficiency", "speed_up"):
            if found := getattr(result.metrics, key):
                most[key] = max(most.get(key, 1.0), found.high or found.value)
    return [_row(title, run, result, most) for title, run, result in every]


def _row(title: str, run: FinishedRun, result: CellResult, most: dict[str, float]) -> dict[str, dict[str, Any]]:
    config, metrics = result.config, result.metrics
    assert metrics is not None
    plain = config.is_baseline
    strong = not plain and mark_of(result).headline
    setting = group_title(config, [r.config for r in run.summary.results], but="batch_size")
    same = metrics.same_as_baseline
    rate = metrics.tokens_per_second if metrics.timed and not metrics.withheld else None
    return {
        "run": _text(title),
        "drafter": _text(config.drafter.title),
        "verifier": _text("" if plain else verifier_title(result)),
        "setting": _text(setting),
        "batch_size": {"text": str(config.batch_size), "order": config.batch_size, "bar": None},
        "block_efficiency": _estimate(
            None if plain else metrics.block_efficiency, most.get("block_efficiency", 1.0), strong
        ),
        "first": _number(metrics.acceptance[0] if metrics.acceptance and not plain else None, ".2f"),
        "rows": _number(metrics.target_rows_per_token, ".2f"),
        "rate": _number(rate, ".1f"),
        "per_user": _number(None if rate is None else rate / config.batch_size, ".1f"),
        "speed_up": _number(None, "") | {"text": speed_up_text(metrics)}
        if metrics.withheld and not plain
        else _estimate(None if plain else metrics.speed_up, most.get("speed_up", 1.0), strong),
        "draft": _number(100 * metrics.shares.get("draft", 0.0) if metrics.timed else None, ".0f"),
        "same": _number(None if plain or same is None else 100 * same, ".0f"),
    }


def _text(text: str) -> dict[str, Any]:
    return {"text": text, "order": None, "bar": None}


def _number(value: float | None, form: str) -> dict[str, Any]:
    """Cells without a number are sorted below all others."""
    return {"text": "" if value is None else f"{value:{form}}", "order": -1.0 if value is None else value, "bar": None}


def _estimate(found: Estimate | None, most: float, strong: bool) -> dict[str, Any]:
    if found is None:
        return _number(None, ".2f")
    low, high = (found.value if end is None else end for end in (found.low, found.high))
    interval = f" [{low:.2f}, {high:.2f}]" if found.low is not None else ""
    bar = {name: round(100 * end / most, 2) for name, end in (("low", low), ("value", found.value), ("high", high))}
    return {
        "text": f"{found.value:.2f}",
        "interval": interval,
        "strong": strong,
        "order": found.value,
        "bar": bar | {"one": round(100 / most, 2), "width": round(bar["high"] - bar["low"], 2)},
    }


def columns_of(runs: RUNS, cells: Sequence[dict[str, dict[str, Any]]]) -> list[Column]:
    """The columns that say something; which run a cell is of is told where there are several."""
    told = [c for c in COLUMNS if c.key != "run" or len(runs) > 1]
    return [c for c in told if any(row[c.key]["text"] for row in cells)]


def filters_of(
    columns: Sequence[Column], cells: Sequence[dict[str, dict[str, Any]]]
) -> list[tuple[int, Column, list[str]]]:
    """What readers may choose: the place of a column, the column, its values; columns with one value are left out."""
    found = []
    for i, column in enumerate(columns):
        values = list(dict.fromkeys(row[column.key]["text"] for row in cells))
        if column.chosen and len(values) > 1:
            found.append((i, column, [value for value in values if value]))
    return found


def best_of(runs: RUNS) -> list[tuple[str, str, str]]:
    """The greatest speed-up and the greatest block efficiency of certified cells: what, how much, and the cell."""
    found = []
    for what, key in (("greatest speed-up", "speed_up"), ("greatest block efficiency", "block_efficiency")):
        cells = [
            (getattr(r.metrics, key), title, run, r)
            for title, run in runs
            for r in run.summary.results
            if r.metrics and not r.config.is_baseline and mark_of(r).headline and getattr(r.metrics, key)
        ]
        if cells:
            estimate, title, run, result = max(cells, key=lambda cell: cell[0].value)
            interval = "" if estimate.low is None else f" [{estimate.low:.2f}, {estimate.high:.2f}]"
            found.append((what, f"{estimate.value:.2f}{interval}", where(title, run, result, len(runs) > 1)))
    return found


def certificates(runs: RUNS) -> list[dict[str, str]]:
    """The verifiers of runs: what each claims, its mark, and whose code it is."""
    found: dict[tuple[str, str], dict[str, str]] = {}
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
            says = "lossy: it changes the target's distribution" if mark.kind == "lossy" else "lossless"
            state = "there is nothing to certify" if mark.kind == "lossy" else f"{mark} {mark.where}".rstrip()
            if digest and digest != installed:
                state += " (other code than is installed here)"
            code = " ".join(str(source.get(key) or "") for key in ("distribution", "version")).strip()
            found[config.verifier.name, digest] = {
                "verifier": config.verifier.name,
                "promise": says,
                "certificate": state,
                "code": code,
                "sha256": digest,
            }
    return list(found.values())
