"""The table of a run: for the terminal, as Markdown and as CSV.

Knows finished results only. Cells are grouped as they were measured; a speed-up is always over the drafter
``none`` of the same group.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from .. import plugins

if TYPE_CHECKING:
    from ..bench.cost import Prediction
    from ..bench.metrics import Estimate
    from ..bench.recipe import CellConfig
    from ..bench.records import CellResult
    from ..bench.run import Outcome

_COLUMNS = {  # header: alignment
    "drafter": "left",
    "verifier": "left",
    "BE [95 %]": "left",
    "Pr(τ≥1), Pr(τ≥2), …": "left",
    "rows/tok": "right",
    "d/t/v/r %": "right",
    "tok/s": "right",
    "predicted": "right",
    "speed-up [95 %]": "left",
}
_LEGEND = (
    "BE: tokens emitted per target call. rows/tok: positions the target evaluates per token emitted.\n"
    "d/t/v/r: share of the decoding time in draft, target, verify, rest. These, tok/s and speed-up count rounds with\n"
    "all slots in use; the tail, when fewer prompts than slots are left, is not in them.\n"
    "speed-up: of tok/s over the drafter none in the same group; an interval needs 3 pieces of prompts."
)
_BY_BATCH_SIZE = (
    "pays up to: the last batch size at which a pair is no slower than the drafter none; ~: by the cost curve,\n"
    "between measured ones. best multi-draft ÷ best single: do the extra rows of several draft sequences pay?"
)
#: As many paired differences are shown on the terminal; all are in the Markdown.
_DIFFERENCES = 12
#: As many values of Pr(tau >= i) fit the terminal.
_DEPTHS = 5
_ALWAYS = ("temperature", "batch_size")
_OTHERS = ("target", "dtype", "seed", "max_new_tokens", "top_k", "top_p", "min_p", "compile_verifier")


def group_title(cell: CellConfig, cells: Iterable[CellConfig], but: str = "") -> str:
    """What the cells of a group share: temperature, batch size and whatever else the run varies, but for ``but``."""
    varied = [key for key in _OTHERS if len({_shared(c, key) for c in cells}) > 1]
    shown = []
    for key in (*_ALWAYS, *varied):
        if key == but:
            continue
        value = _shared(cell, key)
        shown.append(f"{key.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}")
    return ", ".join(shown)


def terminal(outcome: Outcome) -> str:
    """The whole report as text, for a terminal of about 130 columns."""
    parts = [f"{title}\n\n{table}" for title, table in _tables(outcome, "simple")]
    if parts:
        parts.append(_LEGEND)
    if more := _by_batch_size(outcome, "simple"):
        parts += [*(f"{title}\n\n{table}" for title, table in more), _BY_BATCH_SIZE]
    for lines in [_shortened(_differences(outcome)), *_remarks(outcome)]:
        if lines:
            parts.append("\n".join(lines))
    if _by_category(outcome):
        parts.append("block efficiency and speed-up by category of prompts: summary.md, beside the records")
    parts.append(f"records: {outcome.directory}")
    return "\n\n".join(parts)


def summary_markdown(outcome: Outcome) -> str:
    """The same as Markdown."""
    recipe = outcome.recipe
    parts = [f"# {recipe.name}"]
    parts += [text for text in (recipe.question, recipe.description) if text]
    parts.append(f"Target {recipe.target}, prompts {recipe.prompts.source}.")
    parts += [f"## {title}\n\n{table}" for title, table in _tables(outcome, "github")]
    parts.append(_LEGEND)
    parts += [f"## {title}\n\n{table}" for title, table in _by_category(outcome)]
    if more := _by_batch_size(outcome, "github"):
        parts += [*(f"## {title}\n\n{table}" for title, table in more), _BY_BATCH_SIZE]
    parts += [f"![{name.partition('.')[0].replace('_', ' ')}]({name})" for name in outcome.charts]
    for lines in [_differences(outcome), *_remarks(outcome)]:
        if lines:
            parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def summary_csv(outcome: Outcome) -> str:
    """Every number of every cell, a line each; a failed cell has its error."""
    rows = [_flat(result, outcome.predicted.get(result.config.hash)) for result in outcome.results]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _shared(cell: CellConfig, key: str) -> Any:
    return getattr(cell.sampling if hasattr(cell.sampling, key) else cell, key)


def _groups(outcome: Outcome) -> list[tuple[str, list[CellResult]]]:
    cells = [result.config for result in outcome.results]
    groups: dict[str, list[CellResult]] = {}
    for result in outcome.results:
        groups.setdefault(result.config.group, []).append(result)
    return [(group_title(results[0].config, cells), results) for results in groups.values()]


def _tables(outcome: Outcome, style: str) -> list[tuple[str, str]]:
    """Title and finished cells of each group; groups without any are left out."""
    shown = {name: align for name, align in _COLUMNS.items() if name != "predicted" or outcome.predicted}
    tables = []
    for title, results in _groups(outcome):
        cells = [_row(r, outcome.predicted.get(r.config.hash)) for r in results if r.metrics is not None]
        if cells:
            tables.append((title, _tabulated(shown, [[cell[name] for name in shown] for cell in cells], style)))
    return tables


def _tabulated(columns: Mapping[str, str], rows: Sequence[Sequence[str]], style: str) -> str:
    align = tuple(columns.values())
    return tabulate(rows, headers=list(columns), tablefmt=style, disable_numparse=True, colalign=align)


def _row(result: CellResult, predicted: Prediction | None) -> dict[str, str]:
    config, metrics = result.config, result.metrics
    assert metrics is not None
    acceptance = [f"{p:.2f}".removeprefix("0") for p in metrics.acceptance]
    more = " …" if len(acceptance) > _DEPTHS else ""
    shares = [f"{100 * metrics.shares[phase]:.0f}" for phase in ("draft", "target", "verify", "rest")]
    cells = (
        config.drafter.title,
        verifier_title(config),
        "1" if config.is_baseline else _estimate(metrics.block_efficiency),
        " ".join(acceptance[:_DEPTHS]) + more,
        f"{metrics.target_rows_per_token:.2f}",
        "/".join(shares),
        f"{metrics.tokens_per_second:.1f}",
        f"{predicted.tokens_per_second:.1f}" if predicted else "",
        "" if metrics.speed_up is None else "1" if config.is_baseline else _estimate(metrics.speed_up),
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def _estimate(estimate: Estimate, sign: str = "") -> str:
    interval = "" if estimate.low is None else f" [{estimate.low:{sign}.2f}, {estimate.high:{sign}.2f}]"
    return f"{estimate.value:{sign}.2f}{interval}"


def _by_category(outcome: Outcome) -> list[tuple[str, str]]:
    """Title and Markdown table of each group that was measured category by category: a line for each pair and one.

    Left out where pieces mix categories or have too few prompts for an interval; the CSV has what there is.
    """
    tables = []
    columns = {"drafter": "left", "verifier": "left", "category": "left", "prompts": "right"}
    columns |= {name: align for name, align in _COLUMNS.items() if name in ("BE [95 %]", "speed-up [95 %]")}
    for title, results in _groups(outcome):
        rows = []
        for result in results:
            if result.config.is_baseline or result.metrics is None:
                continue
            by_category = result.metrics.by_category
            every = by_category.values()
            whole = any(found.speed_up for found in every) and all(found.block_efficiency.low for found in every)
            if len(by_category) < 2 or not whole:
                continue
            for category, found in by_category.items():
                pair = result.config.drafter.title, verifier_title(result.config)
                numbers = _estimate(found.block_efficiency), _estimate(found.speed_up) if found.speed_up else ""
                rows.append([*pair, category, str(found.prompts), *numbers])
        if rows:
            tables.append((f"by category, {title}", _tabulated(columns, rows, "github")))
    return tables


# -- batch size as an axis --------------------------------------------------------------------------------------


@dataclass
class Pair:
    """A drafter and a verifier: their cells by batch size, and the speed-ups of those that have one."""

    drafter: str
    verifier: str
    results: dict[int, CellResult] = field(default_factory=dict)

    @property
    def speed_ups(self) -> dict[int, float]:
        from ..bench.cost import speed_ups_of

        return speed_ups_of(self.results)

    @property
    def single_draft(self) -> bool:
        """Does it draft chains?"""
        config = next(iter(self.results.values())).config
        drafter = plugins.get("drafters", config.drafter.name)
        return drafter.traits(drafter.Config(**config.drafter.config), config.sampling).drawn == "chain"


@dataclass
class Series:
    """The finished cells of a run that differ in drafter, verifier and batch size alone."""

    pairs: list[Pair] = field(default_factory=list)
    baselines: dict[int, CellResult] = field(default_factory=dict)


def batch_size_series(results: Sequence[CellResult]) -> dict[str, Series]:
    """The series of a run by what their cells share; those with one batch size are left out."""
    cells = [result.config for result in results]
    series: dict[str, tuple[Series, dict[str, Pair]]] = {}
    for result in results:
        config = result.config
        if result.metrics is None:
            continue
        title = group_title(config, cells, but="batch_size")
        found, pairs = series.setdefault(title, (Series(), {}))
        if config.is_baseline:
            found.baselines[config.batch_size] = result
            continue
        key = config.model_copy(update={"batch_size": 1}).hash
        if key not in pairs:
            pairs[key] = Pair(config.drafter.title, verifier_title(config))
            found.pairs.append(pairs[key])
        pairs[key].results[config.batch_size] = result
    return {title: found for title, (found, _) in series.items() if len(found.baselines) > 1}


def _by_batch_size(outcome: Outcome, style: str) -> list[tuple[str, str]]:
    """Title and table of the speed-ups of each series; where extra rows of several draft sequences pay, below them."""
    from ..bench.cost import last_paying, pays_until

    tables = []
    for title, series in batch_size_series(outcome.results).items():
        batch_sizes = sorted(series.baselines)
        columns = {"drafter": "left", "verifier": "left", "BE": "right", "rows/tok": "right"}
        columns |= {f"B = {b}": "right" for b in batch_sizes} | {"pays up to": "right"}
        rows, single, multi = [], {}, {}
        for pair in series.pairs:
            metrics = pair.results[min(pair.results)].metrics
            assert metrics is not None
            numbers = f"{metrics.block_efficiency.value:.2f}", f"{metrics.target_rows_per_token:.2f}"
            last = last_paying(pair.results, series.baselines, outcome.curves)
            rows.append([pair.drafter, pair.verifier, *numbers, *_ratios(pair.speed_ups, batch_sizes, last)])
            best = single if pair.single_draft else multi
            best |= {b: max(speed_up, best.get(b, 0.0)) for b, speed_up in pair.speed_ups.items()}
        if single and multi:
            gain = {b: multi[b] / single[b] for b in batch_sizes if b in single and b in multi}
            rows.append(["best multi-draft", "÷ best single", "", "", *_ratios(gain, batch_sizes, pays_until(gain))])
        tables.append((f"speed-up by batch size, {title}", _tabulated(columns, rows, style)))
    return tables


def _ratios(ratios: Mapping[int, float], batch_sizes: Sequence[int], last: int) -> list[str]:
    """Cells of a row: a ratio for each batch size, and the last that pays (0: none)."""
    about = "≥" if last == max(ratios, default=0) else "=" if last in ratios else "~"
    up_to = f"B {about} {last}" if last else "none"
    return [*(f"{ratios[b]:.2f}" if b in ratios else "" for b in batch_sizes), up_to]


# -- remarks ----------------------------------------------------------------------------------------------------


def verifier_title(config: CellConfig) -> str:
    """What tables call the verifier of a cell; a lossy one never without saying so."""
    return config.verifier.title + ("" if _lossless(config) else " (lossy)")


def _lossless(config: CellConfig) -> bool:
    return plugins.get("verifiers", config.verifier.name).traits.lossless


def _remarks(outcome: Outcome) -> list[list[str]]:
    """What else stands below the tables: agreement, skipped, failed, notes; lines in paragraphs."""
    remarks = [_prediction_error(outcome), _agreement(outcome.results)]
    if any(result.metrics and not _lossless(result.config) for result in outcome.results):
        remarks.append(["lossy verifiers change what the target says: their speed-up is bought with that"])
    remarks.append([f"skipped: {sentence}" for sentence in outcome.skipped])
    remarks.append(_failures(outcome.failed))
    remarks.append([f"note: {note}" for note in outcome.notes])
    if outcome.charts:
        remarks.append([f"charts, beside the records: {', '.join(outcome.charts)}"])
    if outcome.interrupted:
        remarks.append(["interrupted: groups that were not finished are missing; run again to continue"])
    return remarks


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _DIFFERENCES
    return lines if more <= 0 else [*lines[:_DIFFERENCES], f"and {more} more in summary.md"]


def _differences(outcome: Outcome) -> list[str]:
    """Between verifiers of the same drafter: the same prompts and the same random numbers."""
    from ..bench.metrics import paired_difference

    lines = []
    for title, results in _groups(outcome):
        firsts: dict[str, CellResult] = {}
        for result in results:
            drafter = result.config.drafter
            if result.metrics is None or result.config.is_baseline:
                continue
            first = firsts.setdefault(json.dumps([drafter.name, drafter.config]), result)
            if first is not result:
                difference = _estimate(paired_difference(result.records, first.records), "+")
                what = f"BE of {verifier_title(result.config)} − {verifier_title(first.config)}"
                lines.append(f"{title}, {drafter.title}: {what}, on the same prompts: {difference}")
    return lines


def _prediction_error(outcome: Outcome) -> list[str]:
    pairs = [(outcome.predicted.get(r.config.hash), r.metrics) for r in outcome.results]
    off = [abs(p.tokens_per_second / m.tokens_per_second - 1) for p, m in pairs if p and m]
    if not off:
        return []
    return [f"predicted: tok/s from the cost curve; median |error| {100 * median(off):.0f} % over {len(off)} cells"]


def _agreement(results: Sequence[CellResult]) -> list[str]:
    """At temperature 0 a lossless pair says exactly what the target says alone, up to rounding."""
    checked = [
        r
        for r in results
        if r.metrics and r.metrics.same_as_baseline is not None
        if not r.config.is_baseline and _lossless(r.config)
    ]
    if not checked:
        return []
    total = sum(r.metrics.sequences for r in checked if r.metrics)
    same = sum(round(r.metrics.sequences * (r.metrics.same_as_baseline or 0)) for r in checked if r.metrics)
    line = f"at temperature 0, {same} of {total} responses equal those of plain decoding, token for token"
    return [line if same == total else line + "; the others come from ties that rounding decides, or a bug"]


def _failures(failed: Sequence[CellResult]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for result in failed:
        config = result.config
        pair = f"{config.drafter.title} × {config.verifier.label or config.verifier.name}"
        where = f"temperature {config.sampling.temperature:g}, batch size {config.batch_size}"
        reasons.setdefault(str(result.error), []).append(f"{pair} ({where})")
    lines = []
    for reason, cells in reasons.items():
        more = f" and {len(cells) - 3} more" if len(cells) > 3 else ""
        lines.append(f"failed: {', '.join(cells[:3])}{more}: {reason}")
    return lines


def _flat(result: CellResult, predicted: Prediction | None) -> dict[str, Any]:
    config = result.config.model_dump(mode="json")
    row: dict[str, Any] = {"cell": result.config.hash}
    for kind in ("drafter", "verifier"):
        strategy = config.pop(kind)
        name, label = strategy.pop("name"), strategy.pop("label", "")
        row |= {kind: name, f"{kind}_label": label or name, f"{kind}_config": json.dumps(strategy)}
    row |= config.pop("sampling") | {"prompts": json.dumps(config.pop("prompts"))} | config
    row["lossless"] = _lossless(result.config)
    row["error"] = result.error or ""
    if result.metrics is None:
        return row
    metrics = result.metrics.to_json()
    for key, value in metrics.items():
        if key in ("block_efficiency", "speed_up"):
            row |= _spread(key, metrics)
        elif key == "acceptance":
            row |= {f"acceptance_{i}": p for i, p in enumerate(value, 1)}
        elif key == "shares":
            row |= {f"{phase}_share": share for phase, share in value.items()}
        elif key == "by_category":
            for category, found in value.items():
                row[f"prompts_{category}"] = found["prompts"]
                row |= _spread("block_efficiency", found, f"_{category}") | _spread("speed_up", found, f"_{category}")
        else:
            row[key] = value
    if predicted:
        row |= {"predicted_tokens_per_second": predicted.tokens_per_second, "predicted_speed_up": predicted.speed_up}
    return row


def _spread(key: str, numbers: Mapping[str, Any], suffix: str = "") -> dict[str, Any]:
    """An estimate in three columns."""
    found = numbers[key] or {"value": None, "low": None, "high": None}
    names = (f"{key}{suffix}", f"{key}{suffix}_low", f"{key}{suffix}_high")
    return dict(zip(names, (found["value"], found["low"], found["high"]), strict=True))
