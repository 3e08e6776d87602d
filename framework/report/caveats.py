"""What stands below the tables: what agrees, differs, was skipped, failed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from ..metrics.cell_metrics import paired_difference, uncut_steps
from ..metrics.component_times import ENOUGH, FAULT, MOST_BORROWED, TOO_FEW
from ..runs.labels import group_title, is_lossless, verifier_title
from ..runs.marks import Mark, mark_of
from .table_utils import estimate_text, groups_of

if TYPE_CHECKING:
    from ..runs.records import CellResult
    from .summary import Summary


def remarks_of(summary: Summary) -> list[list[str]]:
    """What else stands below the tables: agreement, skipped, failed, notes; lines in paragraphs."""
    remarks = [
        _untimed(summary),
        _prediction_error(summary),
        _agreement(summary.results),
        _cut_steps(summary),
        _busy(summary),
    ]
    remarks.append(_marks(summary.results))
    remarks.append([f"skipped: {sentence}" for sentence in summary.skipped])
    remarks.append(_failures(summary.failed))
    remarks.append([f"note: {note}" for note in summary.notes])
    if summary.charts:
        remarks.append([f"charts, beside the records: {', '.join(summary.charts)}"])
    if summary.interrupted:
        remarks.append(["interrupted: what was not finished is missing; run again to go on"])
    if summary.stopped:
        remarks.append([f"stopped: {summary.stopped}"])
    return remarks


def shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _DIFFERENCES
    return lines if more <= 0 else [*lines[:_DIFFERENCES], f"and {more} more in summary.md"]


def differences(summary: Summary) -> list[str]:
    """Between verifiers of the same drafter: the same prompts and the same random numbers.

    What is the same at several batch sizes is said once; pairs without any difference are counted.
    """
    cells = [result.config for result in summary.results]
    found: dict[tuple[str, str, str], list[int]] = {}  # where, which two, what: at which batch sizes
    none = 0
    for _, results in groups_of(summary):
        firsts: dict[str, CellResult] = {}
        for result in results:
            config, drafter = result.config, result.config.drafter
            if result.metrics is None or config.is_baseline:
                continue
            first = firsts.setdefault(json.dumps([drafter.name, drafter.config]), result)
            if first is result:
                continue
            assert first.metrics is not None
            mine, theirs = (uncut_steps(r.records, first.metrics.depth) for r in (result, first))
            difference = paired_difference(mine, theirs)
            if difference is not None and difference.low is None and difference.value == 0:
                none += 1
            elif difference is not None:
                what = f"{drafter.title}: BE of {verifier_title(result)} − {verifier_title(first)}"
                key = group_title(config, cells, but="batch_size"), what, estimate_text(difference, "+")
                found.setdefault(key, []).append(config.batch_size)
    lines = []
    for (where, what, text), sizes in found.items():
        batch = f"batch size{'s' if len(sizes) > 1 else ''} {', '.join(map(str, sizes))}"
        lines.append(f"{where}, {batch}, {what}, on the same prompts: {text}")
    if none:
        pairs = "1 pair of verifiers has" if none == 1 else f"{none} pairs of verifiers have"
        lines.append(f"{pairs} the same BE on the same prompts")
    return lines


def _marks(results: Sequence[CellResult]) -> list[str]:
    """Explain the marks beside verifiers, with advice."""
    marks: dict[str, Mark] = {}
    for result in results:
        if result.metrics and not result.config.is_baseline:
            marks.setdefault(f"{result.config.verifier.name} {(mark := mark_of(result)).kind}", mark)
    kinds = {mark.kind for mark in marks.values()}
    lines = ["lossy verifiers change the target's distribution: their speed-up is bought with that"] * (
        "lossy" in kinds
    )
    for key, mark in marks.items():
        name = key.rpartition(" ")[0]
        if mark.kind == "failed":
            lines.append(
                f"{mark}: '{name}' claims to be lossless, but changes the target's distribution {mark.where}".rstrip()
            )
        elif mark.kind == "uncertified":
            lines.append(f"not certified: try crossdraft certify --verifier {name}")
    return lines


def _untimed(summary: Summary) -> list[str]:
    if all(result.metrics.timed for result in summary.results if result.metrics):
        return []
    what = "there is no tok/s, no share of time and no speed-up; tokens and BE hold"
    return [f"not timed (--untimed): cells may have shared their device, so {what}"]


def _prediction_error(summary: Summary) -> list[str]:
    pairs = [(summary.predicted.get(r.config.hash), r.metrics) for r in summary.results]
    off = [abs(p.tokens_per_second / m.tokens_per_second - 1) for p, m in pairs if p and m]
    if not off:
        return []
    return [f"predicted: tok/s from the cost curve; median |error| {100 * median(off):.0f} % over {len(off)} cells"]


def _cut_steps(summary: Summary) -> list[str]:
    """How much of the block efficiency the end of the sequences would have decided."""
    found = [r for r in summary.results if r.metrics and not r.config.is_baseline]
    steps, cut = (sum(getattr(r.metrics, key) for r in found) for key in ("steps", "steps_cut"))
    lines = []
    if cut:
        lines.append(f"BE leaves out {100 * cut / steps:.0f} % of the steps, which the end of a sequence cut short")
    if any(r.metrics and r.metrics.block_efficiency is None for r in found):
        lines.append("no BE: max_new_tokens leaves no step room for a whole draft; set it above the draft's depth")
    return lines


#: A group of which less than this share of the steps was undisturbed is worth a note.
_UNDISTURBED = 0.75


def _busy(summary: Summary) -> list[str]:
    """Where other programs disturbed the machine, and why a speed-up is not shown."""
    lines, reasons = [], set[str]()
    for title, results in groups_of(summary):
        measured = [r.metrics for r in results if r.metrics and r.metrics.timed]
        reasons |= {m.withheld for m in measured}
        share = sum(m.undisturbed * m.steps for m in measured) / sum(m.steps for m in measured) if measured else 1.0
        if share < _UNDISTURBED:
            lines.append(f"note: this machine was busy ({title}): {100 * share:.0f} % of the steps were undisturbed")
    if lines:
        lines.append("tok/s and speed-up are those of the undisturbed steps; summary.csv has both by the clock")
    if TOO_FEW in reasons:
        lines.append(
            f"— ({TOO_FEW}): components that take more than {100 * MOST_BORROWED:.0f} % of a cell's time had fewer than"
        )
        lines.append(f"{ENOUGH} undisturbed steps; run again on a quieter machine or with more prompts")
    if FAULT in reasons:
        lines.append(f"— ({FAULT}): a pass over several tokens was measured as faster than one over a single token:")
        lines.append("a fault of the measurement; run again on a quieter machine or with more prompts")
    return lines


def _agreement(results: Sequence[CellResult]) -> list[str]:
    """At temperature 0 a lossless pair says exactly what the target says alone, up to rounding."""
    checked = [
        r
        for r in results
        if r.metrics and r.metrics.same_as_baseline is not None
        if not r.config.is_baseline and is_lossless(r.config)
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


#: As many paired differences are shown on the terminal; all are in the Markdown.
_DIFFERENCES = 12
