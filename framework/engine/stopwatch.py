"""Timer of the phases of decoding."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import torch

#: Timed phases: prefill of the target and of the drafter, and the phases of a step. ``draft`` includes `observe`;
#: ``rest`` is the bookkeeping of the loop.
PHASES = ("prefill", "draft_prefill", "draft", "target", "verify", "rest")


class StepTiming(NamedTuple):
    """Shape and times of a finished step of the batch.

    Attributes:
        width: nodes of the widest row.
        resumed: True if the target resumed from layers computed by the drafter.
        prompts: per slot, the index of its prompt; None for a free slot or a failed row.
        emitted: per slot, the number of tokens committed.
        lengths: per slot, the length of the sequence after the step.
        seconds: `Stopwatch.seconds` at its end.
    """

    width: int
    resumed: bool
    prompts: list[int | None]
    emitted: list[int]
    lengths: list[int]
    seconds: dict[str, float]


class Stopwatch:
    """Wall time by phase, in seconds.

    On an accelerator, marks are events in its stream and a phase is the device time between two of them; only reading
    `seconds` waits, for the last mark. ``enabled=False`` records nothing.
    """

    def __init__(self, device: torch.device, enabled: bool = True):
        self.enabled = enabled
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._module: Any = getattr(torch, device.type) if device.type != "cpu" else None
        self._device = device
        self._last = time.perf_counter()
        #: Events of a device and the phase that each ends (None for the first), oldest first.
        self._marks: deque[tuple[str | None, Any]] = deque()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, up to the last mark."""
        if self._marks:
            self._marks[-1][1].synchronize()
            self._book()
        return self._seconds

    def mark(self, phase: str | None = None) -> None:
        """Add the time since the last mark to ``phase`` (None: discard it)."""
        if not self.enabled:
            return
        if self._module is not None:
            event = self._module.Event(enable_timing=True)
            # The timed device need not be the current one; some device types have one stream only.
            current = getattr(self._module, "current_stream", None)
            event.record(*([current(self._device)] if current else []))
            self._marks.append((phase, event))
            self._book()
            return
        now = time.perf_counter()
        if phase is not None:
            self._seconds[phase] += max(now - self._last, 0.0)  # this clock has gone backwards on some machines
        self._last = now

    def _book(self) -> None:
        """Add the times of phases that the device has finished."""
        while len(self._marks) > 1 and self._marks[1][1].query():
            _, before = self._marks.popleft()
            phase, event = self._marks[0]
            if phase is not None:
                self._seconds[phase] += before.elapsed_time(event) / 1e3
