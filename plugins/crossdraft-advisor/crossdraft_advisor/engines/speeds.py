"""Seconds of a step that a source has beside its counts.

Formats add a `SpeedPoint` in the pass that reads the counts; `speed_points` selects those of undisturbed steps. Tokens
of a row and step times running rows over tokens per second are the seconds of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from crossdraft.runs import counted

from ..cost.step_cost import SpeedPoint
from .engine_log import Source
from .prometheus import Key, Sample, by_model, samples

#: Flaws of a `SpeedPoint`: a prefill, and steps of other batch sizes or without a draft among them; no draft length.
PREFILL, OTHER_SIZE, NO_DRAFT = "prefill", "another batch size", "steps without a draft"
NO_LENGTH, NO_ROWS = "an unknown draft length", "no running request at its end"
#: Difference of a mean draft length from a whole number that is due to the last drafts of responses.
_LAST_DRAFTS = 0.05
#: The second one is that of older versions.
_LATENCIES = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
#: Names in a scrape: histograms of the time between outputs of a request, running requests, tokens of prompts.
_SCRAPED = {
    "vllm": (_LATENCIES, "vllm:num_requests_running", "vllm:prompt_tokens_total"),
    "sglang": (("sglang:inter_token_latency_seconds",), "sglang:num_running_reqs", "sglang:prompt_tokens_total"),
}


class Drafting(NamedTuple):
    """Steps between two scrapes, summed over rows, their drafted tokens, and the flaw of their seconds."""

    steps: float
    gamma: float = 0.0
    flaw: str = ""


def speed_points(source: Source) -> list[SpeedPoint]:
    """Seconds of undisturbed steps of a source that was read, see `speed_notes`."""
    return _select(source)[0]


def speed_notes(source: Source) -> list[str]:
    """Notes on the speeds of a source that was read: how many are used, and how many are left out and why."""
    return _select(source)[1]


def _select(source: Source) -> tuple[list[SpeedPoint], list[str]]:
    """The steps without a flaw of each draft length (if all have a prefill in them, those), and notes."""
    used: list[SpeedPoint] = []
    skipped: Counter[str] = Counter()
    notes: list[str] = []
    groups: dict[int, list[SpeedPoint]] = {}
    for item in source.timed:
        if math.isnan(item.gamma):
            skipped[NO_LENGTH] += 1
        else:
            groups.setdefault(max(round(item.gamma), item.gamma > 0), []).append(item)
    for gamma, same in sorted(groups.items()):
        whole = [item for item in same if not item.flaw]
        if not whole and (whole := [item for item in same if item.flaw == PREFILL]):
            kind = f"with {counted(gamma, 'drafted token')}" if gamma else "without drafts"
            notes.append(f"{source.name}: all steps {kind} have a prefill among them, so they seem longer")
        if whole:  # seconds are linear in the length, so the mean ones are those of the mean length
            mean = sum(item.gamma * item.weight for item in whole) / sum(item.weight for item in whole)
            length = float(gamma) if abs(mean - gamma) <= _LAST_DRAFTS else mean
            used += [item._replace(gamma=length, flaw="") for item in whole]
        skipped.update(item.flaw or PREFILL for item in same if item not in whole)
    if used:
        sizes = sorted({item.batch_size for item in used})
        span = " to ".join(dict.fromkeys(f"{round(size, 1):g}" for size in (sizes[0], sizes[-1])))
        plain = sum(not item.gamma for item in used)
        kind = "" if not plain else ", without drafts" if plain == len(used) else f", {plain} of them without drafts"
        speeds = counted(len(used), "measured speed")
        notes.insert(0, f"{source.name}: seconds of a step from {speeds} at B = {span}{kind}")
    if skipped:
        reasons = ", ".join(f"{count} with {flaw}" for flaw, count in skipped.items())
        notes.append(f"{source.name}: measured speeds are left out: {reasons}")
    return used, notes


def add_speed(
    source: Source,
    line: int,
    tokens_per_step: float,
    rows: float,
    tokens_per_second: float,
    gamma: float,
    steps: float,
    *,
    context: float = math.nan,
    flaw: str = "",
) -> None:
    """Add the seconds of steps that emit ``tokens_per_step`` in each of ``rows``; nothing if the server was idle."""
    if rows > 0 and tokens_per_second > 0 and steps > 0:
        seconds = tokens_per_step * rows / tokens_per_second
        source.timed.append(SpeedPoint(rows, gamma, context, seconds, steps, source.place(line), flaw))


def flaw_of(prefill: bool, rows: float, before: float | None) -> str:
    """The flaw of a window with ``rows`` at its end and ``before`` at its start, if known."""
    return OTHER_SIZE if before is not None and before != rows else PREFILL if prefill else ""


def add_scraped(engine: str, source: Source, earlier: Source, drafting: Mapping[str, Drafting]) -> None:
    """Add the seconds of a step between two scrapes: the time between the outputs of all requests, over their steps.

    ``drafting``: by model; without drafts each step emits a token.
    """
    histograms, running, prompts = _SCRAPED[engine]
    histogram = next((name for name in histograms if samples(source, {f"{name}_sum"})), histograms[0])
    for model, of_model in by_model(source, (f"{histogram}_sum", f"{histogram}_count", prompts), earlier, {}).items():
        seconds, count, prompt = (
            of_model[name][0] if name in of_model else Sample(0.0, 0)
            for name in (f"{histogram}_sum", f"{histogram}_count", prompts)
        )
        steps, gamma, flaw = drafting.get(model, Drafting(count.value))
        rows, before = (_mean(samples(item, {running}), model) for item in (source, earlier))
        flaw = flaw or ("" if rows else NO_ROWS) or flaw_of(prompt.value > 0, rows, before)
        if seconds.value > 0 and steps > 0:
            rows, place = rows or 1.0, source.place(seconds.line)
            source.timed.append(SpeedPoint(rows, gamma, math.nan, seconds.value / steps, steps / rows, place, flaw))


def _mean(series: Mapping[Key, Sample], model: str) -> float:
    """The mean over engines and ranks of the series of a model."""
    values = [sample.value for (_, labels), sample in series.items() if dict(labels).get("model_name", "") == model]
    return sum(values) / max(len(values), 1)
