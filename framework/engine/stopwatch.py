"""Timer of the phases of decoding."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

#: What is timed: the target's prefill, the drafter's, and the phases of a step. ``draft`` is proposing and observing,
#: ``rest`` the loop's own bookkeeping.
PHASES = ("prefill", "draft_prefill", "draft", "target", "verify", "rest")


class Stopwatch:
    """Wall time by phase, in seconds.

    An accelerator works on its own, so a phase there lasts from what the device had reached when it began to what it
    reaches when it ends: marks are events among its work, for which nobody waits. Only reading `seconds` waits, for
    the last mark. ``enabled=False`` notes nothing.
    """

    def __init__(self, device: torch.device, enabled: bool = True):
        self.enabled = enabled
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._module: Any = getattr(torch, device.type) if device.type != "cpu" else None
        self._device = device
        self._last = time.perf_counter()
        #: Of a device: events and the phases that ended with them, the oldest first; the first one ended none.
        self._marks: deque[tuple[str | None, Any]] = deque()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, up to the last mark."""
        if self._marks:
            self._marks[-1][1].synchronize()
            self._book()
        return self._seconds

    def start(self) -> None:
        self.mark(None)

    def mark(self, phase: str | None) -> None:
        """Book the time since the last mark to ``phase`` (None: to nothing)."""
        if not self.enabled:
            return
        if self._module is not None:
            event = self._module.Event(enable_timing=True)
            # Of the device that is timed, which need not be the current one; some kinds have one stream.
            current = getattr(self._module, "current_stream", None)
            event.record(*([current(self._device)] if current else []))
            self._marks.append((phase, event))
            self._book()
            return
        now = time.perf_counter()
        if phase is not None:
            self._seconds[phase] += max(now - self._last, 0.0)  # on some machines even this clock has gone backwards
        self._last = now

    def _book(self) -> None:
        """Phases that the device has come to the end of."""
        while len(self._marks) > 1 and self._marks[1][1].query():
            _, before = self._marks.popleft()
            phase, event = self._marks[0]
            if phase is not None:
                self._seconds[phase] += before.elapsed_time(event) / 1e3
