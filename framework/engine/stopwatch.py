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
        seconds: `Stopwatch.snapshot` at its end.
    """

    width: int
    resumed: bool
    prompts: list[int | None]
    emitted: list[int]
    lengths: list[int]
    seconds: dict[str, float]


class Stopwatch:
    """Wall time by phase, in seconds.

    On an accelerator, marks are events in its stream and a phase is the device time between two of them; only `wait`
    and reading `seconds` wait, for the last mark. ``enabled=False`` records nothing.
    """

    def __init__(self, device: torch.device, enabled: bool = True):
        self.enabled = enabled
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._module: Any = getattr(torch, device.type) if device.type != "cpu" else None
        self._device = device
        self._last = time.perf_counter()
        #: Events of a device, the phase that each ends (None for the first), and a snapshot to fill; oldest first.
        self._marks: deque[tuple[Any, str | None, dict[str, float]]] = deque()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, up to the last mark."""
        self.wait()
        return self._seconds

    def wait(self) -> None:
        """Wait for the last mark, which completes all snapshots."""
        if self._marks:
            self._marks[-1][0].synchronize()
            self._book()

    def snapshot(self) -> dict[str, float]:
        """A copy of `seconds` without waiting: empty until the device has reached the last mark and it is booked."""
        if len(self._marks) < 2:
            return dict(self._seconds)
        return self._marks[-1][2]

    def mark(self, phase: str | None = None) -> None:
        """Add the time since the last mark to ``phase`` (None: discard it); book what the device has finished."""
        if not self.enabled:
            return
        if self._module is not None:
            event = self._module.Event(enable_timing=True)
            # The timed device need not be the current one; some device types have one stream only.
            current = getattr(self._module, "current_stream", None)
            event.record(*([current(self._device)] if current else []))
            self._marks.append((event, phase, {}))
            self._book()
            return
        now = time.perf_counter()
        if phase is not None:
            self._seconds[phase] += max(now - self._last, 0.0)  # this clock has gone backwards on some machines
        self._last = now

    def _book(self) -> None:
        """Add the times of phases that the device has finished."""
        while len(self._marks) > 1 and self._marks[1][0].query():
            before, *_ = self._marks.popleft()
            event, phase, snapshot = self._marks[0]
            if phase is not None:
                self._seconds[phase] += before.elapsed_time(event) / 1e3
            snapshot.update(self._seconds)
