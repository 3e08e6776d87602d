"""Remarks below the tables: agreement, differences, skipped and failed cells, notes."""

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
    """The remarks on a summary, as paragraphs of lines."""
    remarks = [
        _untimed(summary),
        _prediction_error(summary),
        _agreement(summary.results),
        _truncated_steps(summary),
        _contention(summary),
        _other_traffic(summary.results),
    ]
    remarks.append(_marks(summary.results))
    remarks.append([f"skipped: {reason}" for reason in summary.skipped])
    remarks.append(_failures(summary.failed))
    remarks.append([f"note: {note}" for note in summary.notes])
    if summary.charts:
        remarks.append([f"charts, in the run directory: {', '.join(summary.charts)}"])
    if summary.interrupted:
        remarks.append(["interrupted: unfinished cells are missing; run again to resume"])
    if summary.stopped:
        remarks.append([f"stopped: {summary.stopped}"])
    return remarks


def shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_DIFFERENCES
    return lines if more <= 0 else [*lines[:_MAX_DIFFERENCES], f"and {more} more in summary.md"]


def differences(summary: Summary) -> list[str]:
    """Paired differences of block efficiency between verifiers of a drafter, on the same prompts and random numbers.

    Equal differences at several batch sizes share a line; pairs without a difference are counted.
    """
    cells = [result.config for result in summary.results]
    batch_sizes: dict[tuple[str, str, str], list[int]] = {}  # by group, pair and difference
    equal = 0
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
            difference = paired_difference(*(uncut_steps(r.records, first.metrics.depth) for r in (result, first)))
            if difference is not None and difference.low is None and difference.value == 0:
                equal += 1
            elif difference is not None:
                pair = f"{drafter.title}: BE of {verifier_title(result)} − {verifier_title(first)}"
                key = group_title(config, cells, but="batch_size"), pair, estimate_text(difference, "+")
                batch_sizes.setdefault(key, []).append(config.batch_size)
    lines = []
    for (group, pair, text), sizes in batch_sizes.items():
        batch = f"batch size{'s' if len(sizes) > 1 else ''} {', '.join(map(str, sizes))}"
        lines.append(f"{group}, {batch}, {pair}, on the same prompts: {text}")
    if equal:
        pairs = "1 pair of verifiers has" if equal == 1 else f"{equal} pairs of verifiers have"
        lines.append(f"{pairs} the same BE on the same prompts")
    return lines


def _marks(results: Sequence[CellResult]) -> list[str]:
    """Explanations of the verifiers' marks."""
    marks: dict[str, Mark] = {}
    for result in results:
        if result.metrics and not result.config.is_baseline:
            engine = result.config.engine
            name = f"engine {engine.name}" if engine else result.config.verifier.name
            marks.setdefault(f"{name} {(mark := mark_of(result)).kind}", mark)
    kinds = {mark.kind for mark in marks.values()}
    lines = ["lossy verifiers change the target's distribution, so their speed-ups are not comparable"] * (
        "lossy" in kinds
    )
    for key, mark in marks.items():
        name = key.rpartition(" ")[0]
        if mark.kind == "failed":
            lines.append(
                f"{mark}: '{name}' is declared lossless, but changes the target's distribution {mark.where}".rstrip()
            )
        elif mark.kind == "uncertified":
            engine = name.removeprefix("engine ")
            command = "crossdraft verify-engine" if engine != name else f"crossdraft certify --verifier {name}"
            lines.append(f"not certified: run {command}" + (f" ({name})" if engine != name else ""))
    return lines


def _untimed(summary: Summary) -> list[str]:
    if all(result.metrics.timed for result in summary.results if result.metrics):
        return []
    return [
        "not timed (--untimed): the device may have been shared, so there are no tok/s, time shares or speed-ups; "
        "tokens and BE are valid"
    ]


def _prediction_error(summary: Summary) -> list[str]:
    pairs = [(summary.predicted.get(r.config.hash), r.metrics) for r in summary.results]
    errors = [abs(p.tokens_per_second / m.tokens_per_second - 1) for p, m in pairs if p and m]
    if not errors:
        return []
    return [
        f"predicted: tok/s from the cost curve; median |error| {100 * median(errors):.0f} % over {len(errors)} cells"
    ]


def _truncated_steps(summary: Summary) -> list[str]:
    """The fraction of steps that block efficiency excludes."""
    drafting = [r for r in summary.results if r.metrics and not r.config.is_baseline]
    steps, cut = (sum(getattr(r.metrics, key) for r in drafting) for key in ("steps", "steps_cut"))
    lines = []
    if cut:
        lines.append(
            f"BE excludes {100 * cut / steps:.0f} % of the steps, whose drafts the end of a sequence truncated"
        )
    if any(r.metrics and r.metrics.block_efficiency is None for r in drafting):
        lines.append("no BE: max_new_tokens is too small for a full draft in any step; set it above the draft's depth")
    return lines


def _other_traffic(results: Sequence[CellResult]) -> list[str]:
    """Cells whose server served other requests, too."""
    lines = []
    for result in results:
        if result.metrics and result.metrics.other_traffic:
            config = result.config
            numbers = ", ".join(
                f"{counted:.0f} {name} instead of {own:.0f}"
                for name, (counted, own) in result.metrics.other_traffic.items()
            )
            lines.append(
                f"{config.drafter.title} × {config.verifier.title}, B = {config.batch_size}: the server counted "
                f"{numbers} during the measurement, so it served other requests, too: its counters and all times "
                "contain them"
            )
    return lines


#: Groups with a smaller fraction of undisturbed steps get a note.
_UNDISTURBED = 0.75


def _contention(summary: Summary) -> list[str]:
    """Notes on contention with other programs, and reasons for withheld speed-ups."""
    lines, reasons = [], set[str]()
    for title, results in groups_of(summary):
        measured = [r.metrics for r in results if r.metrics and r.metrics.timed]
        reasons |= {m.withheld for m in measured}
        share = sum(m.undisturbed * m.steps for m in measured) / sum(m.steps for m in measured) if measured else 1.0
        if share < _UNDISTURBED:
            lines.append(f"note: this machine was busy ({title}): {100 * share:.0f} % of the steps were undisturbed")
    if lines:
        lines.append("tok/s and speed-up are for undisturbed steps; summary.csv also has wall-clock values")
    if TOO_FEW in reasons:
        lines.append(
            f"— ({TOO_FEW}): components with more than {100 * MOST_BORROWED:.0f} % of a cell's time had fewer than"
        )
        lines.append(f"{ENOUGH} undisturbed steps; run again on a quieter machine or with more prompts")
    if FAULT in reasons:
        lines.append(f"— ({FAULT}): a pass over several tokens was measured as faster than one over a single token,")
        lines.append("a measurement error; run again on a quieter machine or with more prompts")
    return lines


def _agreement(results: Sequence[CellResult]) -> list[str]:
    """Agreement of lossless pairs with plain decoding at temperature 0, where they differ only by rounding."""
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
    return [line if same == total else line + "; others differ because of rounding in ties, or a bug"]


def _failures(failed: Sequence[CellResult]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for result in failed:
        config = result.config
        pair = f"{config.drafter.title} × {config.verifier.label or config.verifier.name}"
        setting = f"temperature {config.sampling.temperature:g}, batch size {config.batch_size}"
        reasons.setdefault(str(result.error), []).append(f"{pair} ({setting})")
    lines = []
    for reason, cells in reasons.items():
        more = f" and {len(cells) - 3} more" if len(cells) > 3 else ""
        lines.append(f"failed: {', '.join(cells[:3])}{more}: {reason}")
    return lines


#: Paired differences shown on the terminal; the Markdown has all.
_MAX_DIFFERENCES = 12
