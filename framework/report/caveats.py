"""Remarks below the tables: agreement, differences, skipped and failed cells, notes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from ..metrics.cell_metrics import counted_steps, paired_difference
from ..metrics.component_times import ENOUGH, FAULT, MOST_BORROWED, TOO_FEW
from ..runs.labels import group_title, is_lossless, verifier_title
from ..runs.marks import Mark, mark_of
from ..util.estimate import estimate_text
from .batch_sizes import drafts_chains

if TYPE_CHECKING:
    from ..cost.summary import Summary
    from ..metrics.cell_metrics import Metrics
    from ..runs.records import CellResult


def remarks_of(summary: Summary) -> list[list[str]]:
    """The remarks on a summary, as paragraphs of lines, the most important first; a first line stands by itself."""
    results = summary.results
    remarks = [
        _faults(results),
        _failures(summary.failed),
        [f"stopped: {summary.stopped}"] if summary.stopped else [],
        ["interrupted: unfinished cells are missing; run again to resume"] if summary.interrupted else [],
        _untimed(summary),
        _other_traffic(results),
        _withheld(summary),
        _agreement(results),
        _marks(results),
        _all_cut(results),
        *([f"note: {note}"] for note in summary.notes),
        _temperature_zero(results),
        [f"skipped: {reason}" for reason in summary.skipped],
        _padding(results),
        _truncated_steps(results),
        _prediction_error(summary),
        [f"charts, in the run directory: {', '.join(summary.charts)}"] if summary.charts else [],
    ]
    return [lines for lines in remarks if lines]


def differences(summary: Summary) -> list[str]:
    """Paired differences of block efficiency between verifiers of a drafter, on the same prompts and random numbers.

    Equal differences at several batch sizes share a line; pairs without a difference are counted.
    """
    cells = [result.config for result in summary.results]
    batch_sizes: dict[tuple[str, str, str], list[int]] = {}  # by group, pair and difference
    equal = 0
    for _, results in summary.groups:
        firsts: dict[str, CellResult] = {}
        for result in results:
            config, drafter = result.config, result.config.drafter
            if result.metrics is None or config.is_baseline:
                continue
            first = firsts.setdefault(json.dumps([drafter.name, drafter.config]), result)
            if first is result:
                continue
            assert first.metrics is not None
            difference = paired_difference(*(counted_steps(r.records, first.metrics.depth) for r in (result, first)))
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
                f"{mark}: '{name}' is declared lossless, but changes the target's distribution {mark.place}".rstrip()
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
    errors = [abs(p.tokens_per_second / m.tokens_per_second - 1) for p, m in pairs if p and m and not m.withheld]
    if not errors:
        return []
    return [
        f"predicted: tok/s from the cost curve; median |error| {100 * median(errors):.0f} % over {len(errors)} cells"
    ]


def _truncated_steps(results: Sequence[CellResult]) -> list[str]:
    """The fraction of steps that block efficiency excludes."""
    metrics = [m for m in _drafting(results) if not m.all_cut]
    steps, cut = (sum(getattr(m, key) for m in metrics) for key in ("steps", "steps_cut"))
    if not cut:
        return []
    return [f"BE excludes {100 * cut / steps:.0f} % of the steps, whose drafts the end of a sequence truncated"]


def _all_cut(results: Sequence[CellResult]) -> list[str]:
    """The pairs whose block efficiency is of all steps."""
    depths: dict[str, int] = {}
    for result in results:
        if result.metrics and not result.config.is_baseline and result.metrics.all_cut:
            depths[_pair(result)] = result.metrics.depth
    if not depths:
        return []
    return [
        f"* BE of all steps: {', '.join(depths)} had no step with room for a full draft; set max_new_tokens above "
        f"{max(depths.values())}, the depth of the drafts"
    ]


def _withheld(summary: Summary) -> list[str]:
    """The speed-ups that are withheld, with the reasons, and the disturbance of each group."""
    reasons: dict[str, list[str]] = {}
    shares, pairs = {}, 0
    for title, results in summary.groups:
        timed = [(r, r.metrics) for r in results if r.metrics and r.metrics.timed]
        if timed:
            steps = sum(metrics.steps for _, metrics in timed)
            shares[title] = sum(metrics.undisturbed * metrics.steps for _, metrics in timed) / steps
        for result, metrics in timed:
            pairs += not result.config.is_baseline
            if metrics.withheld and not result.config.is_baseline:
                reasons.setdefault(metrics.withheld, []).append(_pair(result))
    busy = {title: share for title, share in shares.items() if share < _UNDISTURBED}
    if not busy and not reasons:
        return []
    low, high = (f"{100 * end(busy.values() or shares.values()):.0f}" for end in (min, max))
    steps = f"{low} to {high} %" if low != high else f"{low} %"
    count = sum(map(len, reasons.values()))
    first = f"{count} of {pairs} speed-ups are withheld ({', '.join(reasons)}), ~: by the clock"
    lines = [f"{steps} of the steps were undisturbed by other programs{f'; {first}' * bool(reasons)}"]
    if len(shares) > 1:
        lines += [f"{title}: {100 * share:.0f} % of the steps were undisturbed" for title, share in busy.items()]
    if TOO_FEW in reasons:
        lines.append(
            f"{TOO_FEW}: components with more than {100 * MOST_BORROWED:.0f} % of a cell's time had fewer than "
            f"{ENOUGH} undisturbed steps; run again on a quieter machine or with more prompts"
        )
    if FAULT in reasons:
        lines.append(
            f"{FAULT}: of {', '.join(dict.fromkeys(reasons[FAULT]))}, a pass over several tokens was measured as "
            "faster than one over a single token; run again on a quieter machine or with more prompts"
        )
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
                f"{_pair(result)}, B = {config.batch_size}: the server counted "
                f"{numbers} during the measurement, so it served other requests, too: its counters and all times "
                "contain them"
            )
    return lines


def _temperature_zero(results: Sequence[CellResult]) -> list[str]:
    """Equalities by construction at temperature 0."""
    chains, equal = dict[str, None](), dict[str, None]()
    firsts: dict[str, CellResult] = {}
    for result in results:
        config = result.config
        if config.is_baseline or result.metrics is None or config.sampling.temperature > 0:
            continue
        sampled = config.model_copy(update={"sampling": config.sampling.model_copy(update={"temperature": 1.0})})
        if drafts_chains(config) and not drafts_chains(sampled):
            chains[config.drafter.title] = None
        if is_lossless(config):
            first = firsts.setdefault(json.dumps([config.group, config.drafter.name, config.drafter.config]), result)
            if first is not result and first.records == result.records:
                equal[config.drafter.title] = None
    lines = []
    if chains:
        lines.append(f"at temperature 0, all draft sequences of {', '.join(chains)} are equal, so it drafts one chain")
    if equal:
        lines.append(
            "at temperature 0, lossless verifiers accept the same tokens by construction, so the rows of "
            f"{', '.join(equal)} differ in time only"
        )
    return lines


def _padding(results: Sequence[CellResult]) -> list[str]:
    """A note if the target's positions per token of a pair grow with the batch size."""
    rows: dict[str, dict[int, float]] = {}
    for result in results:
        if result.metrics is not None and not result.config.is_baseline and result.config.engine is None:
            key = result.config.model_copy(update={"batch_size": 1}).hash
            rows.setdefault(key, {})[result.config.batch_size] = result.metrics.target_rows_per_token
    if not any(by_size[max(by_size)] > 1.02 * by_size[min(by_size)] for by_size in rows.values()):
        return []
    return ["rows/tok grows with the batch size, because the rows of a batch are padded to the widest draft"]


#: Runs with a smaller fraction of undisturbed steps get a note.
_UNDISTURBED = 0.75


def _agreement(results: Sequence[CellResult]) -> list[str]:
    """Agreement of lossless pairs with plain decoding at temperature 0, where they differ by ties within rounding."""
    checked = [m for r in results if (m := _greedy(r)) is not None]
    if not checked:
        return []
    total = sum(m.sequences for m in checked)
    differ = sum(round(m.sequences * (1 - (m.same_as_baseline or 0))) for m in checked)
    ties, undecided = sum(m.ties or 0 for m in checked), sum(m.undecided for m in checked)
    line = f"at temperature 0, {total - differ} of {total} responses equal those of plain decoding, token for token"
    if ties:
        gaps = [m.largest_gap for m in checked if m.largest_gap is not None and not m.faults]
        largest = f" (largest gap {max(gaps):.2g})" if gaps else ""
        all_ties = "all " * (ties == differ)
        line += f"; {ties} differ, {all_ties}at ties within rounding{largest}"
    if undecided:
        line += f"; {undecided} differ for an unknown reason: crossdraft compare-texts finds it"
    return [line]


def _faults(results: Sequence[CellResult]) -> list[str]:
    """Responses at temperature 0 that are not the target's."""
    lines = []
    for result in results:
        metrics = _greedy(result)
        if metrics is not None and metrics.faults:
            first = next(r for r in result.responses if (r.get("difference") or {}).get("fault"))
            place = f"prompt {first['question_id']!r}, token {first['difference']['token']}"
            gap = first["difference"]["gap"]
            reason = "the text ends early" if gap is None else f"the logits differ by {gap:.2g}"
            lines.append(
                f"FAULT: {metrics.faults} of {metrics.sequences} responses of {_pair(result)} (batch size "
                f"{result.config.batch_size}) are not those of plain decoding, beyond rounding; the first at {place}: "
                f"{reason}"
            )
    return lines


def _greedy(result: CellResult) -> Metrics | None:
    """The metrics of a lossless pair that was compared with plain decoding at temperature 0; else None."""
    metrics = result.metrics
    if metrics is None or metrics.same_as_baseline is None or result.config.is_baseline:
        return None
    return metrics if is_lossless(result.config) else None


def _drafting(results: Sequence[CellResult]) -> list[Metrics]:
    return [r.metrics for r in results if r.metrics is not None and not r.config.is_baseline]


def _pair(result: CellResult) -> str:
    return f"{result.config.drafter.title} × {verifier_title(result)}"


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
