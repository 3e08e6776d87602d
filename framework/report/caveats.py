"""Remarks below the tables: agreement, differences, skipped and failed cells, notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from ..metrics.cell_metrics import counted_steps, paired_difference
from ..metrics.component_times import ENOUGH, FAULT, MOST_BORROWED, TOO_FEW
from ..runs.labels import counted, group_title, pair_title, verifier_title
from ..runs.marks import Mark, mark_by_verifier, mark_of
from ..util.estimate import estimate_text

if TYPE_CHECKING:
    from ..cost.summary import Summary
    from ..metrics.cell_metrics import Metrics
    from ..runs.records import CellResult

_NOT_TIMED = (
    "not timed (--untimed): the device may have been shared, so there are no tok/s, time shares or speed-ups; tokens "
    "and BE are valid"
)


def remarks_of(summary: Summary) -> list[list[str]]:
    """The remarks on a summary, as paragraphs of lines, the most important first; a first line stands by itself."""
    results = summary.results
    remarks: list[Iterable[str]] = [
        _faults(results),
        _failures(summary.failed),
        [f"stopped: {summary.stopped}"] * bool(summary.stopped),
        ["interrupted: unfinished cells are missing; run again to resume"] * summary.interrupted,
        [_NOT_TIMED] * any(result.metrics and not result.metrics.timed for result in results),
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
        [f"charts, in the run directory: {', '.join(summary.charts)}"] * bool(summary.charts),
    ]
    return [lines for lines in map(list, remarks) if lines]


def differences(summary: Summary) -> list[str]:
    """Paired differences of block efficiency between verifiers of a drafter, on the same prompts and random numbers.

    Pairs without a difference are counted.
    """
    gains = verifier_gains(summary, certified=False)
    lines = [f"{group}, {pair}, on the same prompts: {text}" for group, pair, text, _ in gains if text]
    if equal := sum(not text for _, _, text, _ in gains):
        verb = "has" if equal == 1 else "have"
        lines.append(f"{counted(equal, 'pair')} of verifiers {verb} the same BE on the same prompts")
    return lines


def verifier_gains(summary: Summary, certified: bool = True) -> list[tuple[str, str, str, bool]]:
    """Settings, pair and difference of BE of each verifier to the first of its drafter; True if the sign is sure.

    Equal differences at several batch sizes are one; the text is empty for pairs with the same BE.

    Args:
        certified: leave out pairs that are not certified, and those with the same BE.
    """
    cells = [result.config for result in summary.results]
    gains: dict[tuple[str, str, str, bool], list[int]] = {}  # batch sizes
    equal = 0
    for _, results in summary.groups:
        firsts: dict[str, CellResult] = {}
        for result in results:
            config, drafter = result.config, result.config.drafter
            if result.drafting is None or (certified and not mark_of(result).headline):
                continue
            first = firsts.setdefault(drafter.identity, result)
            if first is result or first.metrics is None:
                continue
            e = paired_difference(*(counted_steps(r.records, first.metrics.depth) for r in (result, first)))
            if e is not None and e.low is None and e.value == 0:
                equal += not certified
            elif e is not None:
                pair = f"{drafter.title}: BE of {verifier_title(result)} − {verifier_title(first)}"
                sure = e.low is not None and e.high is not None and not e.low <= 0 <= e.high
                key = group_title(config, cells, but="batch_size"), pair, estimate_text(e, "+"), sure
                gains.setdefault(key, []).append(config.batch_size)
    named = [
        (f"{group}, batch size{'s' * (len(sizes) > 1)} {', '.join(map(str, sizes))}", pair, text, sure)
        for (group, pair, text, sure), sizes in gains.items()
    ]
    return named + equal * [("", "", "", False)]


def _marks(results: Sequence[CellResult]) -> Iterator[str]:
    """Explanations of the verifiers' marks."""
    marks: dict[tuple[str, str], tuple[str, Mark]] = {}
    for result in [r for r in results if r.drafting]:
        engine, mark = result.config.engine, mark_of(result)
        name = f"engine {engine.name}" if engine else result.config.verifier.name
        by_drafter = mark.kind == "uncertified" and not engine and mark_by_verifier(result).kind == "certified"
        name = result.config.drafter.name if by_drafter else name
        command = "verify-engine" if engine else f"certify --{'drafter' if by_drafter else 'verifier'} {name}"
        marks.setdefault((name, mark.kind), (f"crossdraft {command}{f' ({name})' if engine else ''}", mark))
    if any(kind == "lossy" for _, kind in marks):
        yield "lossy verifiers change the target's distribution, so their speed-ups are not comparable"
    for (name, kind), (command, mark) in marks.items():
        if kind == "failed":
            yield f"{mark}: '{name}' is declared lossless, but changes the target's distribution {mark.place}".rstrip()
        elif kind == "uncertified":
            yield f"not certified: run {command}"
        elif kind == "unexercised":
            yield f"not exercised: enumeration proves nothing of pairs with '{name}' ({mark.place})"


def _prediction_error(summary: Summary) -> Iterator[str]:
    pairs = [(summary.predicted.get(r.config.hash), r.metrics) for r in summary.results]
    errors = [abs(p.tokens_per_second / m.tokens_per_second - 1) for p, m in pairs if p and m and not m.withheld]
    if errors:
        error = f"{100 * median(errors):.0f} % over {len(errors)} cells"
        yield f"predicted: tok/s from the cost curve; median |error| {error}"


def _truncated_steps(results: Sequence[CellResult]) -> Iterator[str]:
    """The fraction of steps that block efficiency excludes."""
    metrics = [m for r in results if (m := r.drafting) and not m.all_cut]
    if cut := sum(m.steps_cut for m in metrics):
        share = cut / sum(m.steps for m in metrics)
        yield f"BE excludes {100 * share:.0f} % of the steps, whose drafts the end of a sequence truncated"


def _all_cut(results: Sequence[CellResult]) -> Iterator[str]:
    """The pairs whose block efficiency is of all steps."""
    if depths := {pair_title(r): m.depth for r in results if (m := r.drafting) and m.all_cut}:
        yield (
            f"* BE of all steps: {', '.join(depths)} had no step with room for a full draft; set max_new_tokens above "
            f"{max(depths.values())}, the depth of the drafts"
        )


def _withheld(summary: Summary) -> Iterator[str]:
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
                reasons.setdefault(metrics.withheld, []).append(pair_title(result))
    busy = {title: share for title, share in shares.items() if share < _UNDISTURBED}
    if not busy and not reasons:
        return
    low, high = (f"{100 * end(busy.values() or shares.values()):.0f}" for end in (min, max))
    steps = f"{low} to {high} %" if low != high else f"{low} %"
    count = sum(map(len, reasons.values()))
    first = f"{count} of {pairs} speed-ups are withheld ({', '.join(reasons)}), ~: by the clock"
    yield f"{steps} of the steps were undisturbed by other programs{f'; {first}' * bool(reasons)}"
    if len(shares) > 1:
        yield from (f"{title}: {100 * share:.0f} % of the steps were undisturbed" for title, share in busy.items())
    if TOO_FEW in reasons:
        yield (
            f"{TOO_FEW}: components with more than {100 * MOST_BORROWED:.0f} % of a cell's time had fewer than "
            f"{ENOUGH} undisturbed steps; run again on a quieter machine or with more prompts"
        )
    if FAULT in reasons:
        yield (
            f"{FAULT}: of {', '.join(dict.fromkeys(reasons[FAULT]))}, a pass over several tokens was measured as "
            "faster than one over a single token; run again on a quieter machine or with more prompts"
        )


def _other_traffic(results: Sequence[CellResult]) -> Iterator[str]:
    """Cells whose server served other requests, too."""
    for result in results:
        traffic = result.metrics.other_traffic if result.metrics else {}
        if numbers := ", ".join(f"{total:.0f} {name} instead of {own:.0f}" for name, (total, own) in traffic.items()):
            yield (
                f"{pair_title(result)}, B = {result.config.batch_size}: the server counted {numbers} during the "
                "measurement, so it served other requests, too: its counters and all times contain them"
            )


def _temperature_zero(results: Sequence[CellResult]) -> Iterator[str]:
    """Equalities by construction at temperature 0."""
    chains, equal = dict[str, None](), dict[str, None]()
    firsts: dict[str, CellResult] = {}
    for result in results:
        config = result.config
        if result.drafting is None or config.sampling.temperature > 0:
            continue
        sampled = config.model_copy(update={"sampling": config.sampling.model_copy(update={"temperature": 1.0})})
        if config.drafter_traits.is_chain and not sampled.drafter_traits.is_chain:
            chains[config.drafter.title] = None
        if config.verifier_traits.lossless:
            first = firsts.setdefault(config.group + config.drafter.identity, result)
            if first is not result and first.records == result.records:
                equal[config.drafter.title] = None
    if chains:
        yield f"at temperature 0, all draft sequences of {', '.join(chains)} are equal, so it drafts one chain"
    if equal:
        yield (
            "at temperature 0, lossless verifiers accept the same tokens by construction, so the rows of "
            f"{', '.join(equal)} differ in time only"
        )


def _padding(results: Sequence[CellResult]) -> Iterator[str]:
    """A note if the target's positions per token of a pair grow with the batch size."""
    rows: dict[str, dict[int, float]] = {}
    for result in results:
        if result.drafting is not None and result.config.engine is None:
            key = result.config.model_copy(update={"batch_size": 1}).hash
            rows.setdefault(key, {})[result.config.batch_size] = result.drafting.target_rows_per_token
    if any(by_size[max(by_size)] > 1.02 * by_size[min(by_size)] for by_size in rows.values()):
        yield "rows/tok grows with the batch size, because the rows of a batch are padded to the widest draft"


#: Runs with a smaller fraction of undisturbed steps get a note.
_UNDISTURBED = 0.75


def _agreement(results: Sequence[CellResult]) -> Iterator[str]:
    """Agreement of lossless pairs with plain decoding at temperature 0, where they differ by ties within rounding."""
    checked = [m for r in results if (m := _greedy(r)) is not None]
    if not checked:
        return
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
    yield line


def _faults(results: Sequence[CellResult]) -> Iterator[str]:
    """Responses at temperature 0 that are not the target's."""
    for result in results:
        metrics = _greedy(result)
        if metrics is not None and metrics.faults:
            first = next(r for r in result.responses if (r.get("difference") or {}).get("fault"))
            place = f"prompt {first['question_id']!r}, token {first['difference']['token']}"
            gap = first["difference"]["gap"]
            reason = "the text ends early" if gap is None else f"the logits differ by {gap:.2g}"
            yield (
                f"FAULT: {metrics.faults} of {metrics.sequences} responses of {pair_title(result)} (batch size "
                f"{result.config.batch_size}) are not those of plain decoding, beyond rounding; the first at {place}: "
                f"{reason}"
            )


def _greedy(result: CellResult) -> Metrics | None:
    """The metrics of a lossless pair that was compared with plain decoding at temperature 0; else None."""
    metrics = result.drafting
    compared = metrics is not None and metrics.same_as_baseline is not None
    return metrics if compared and result.config.verifier_traits.lossless else None


def _failures(failed: Sequence[CellResult]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for result in failed:
        config = result.config
        pair = f"{config.drafter.title} × {config.verifier.label or config.verifier.name}"
        setting = f"temperature {config.sampling.temperature:g}, batch size {config.batch_size}"
        reasons.setdefault(str(result.error), []).append(f"{pair} ({setting})")
    for reason, cells in reasons.items():
        more = f" and {len(cells) - 3} more" if len(cells) > 3 else ""
        yield f"failed: {', '.join(cells[:3])}{more}: {reason}"
