"""Where the time of decoding goes."""

from __future__ import annotations

import time

import torch

#: What is timed: the target's prefill, the drafter's, and the phases of a round. ``draft`` is proposing and observing,
#: ``rest`` the loop's own bookkeeping.
PHASES = ("prefill", "draft_prefill", "draft", "target", "verify", "rest")


class Stopwatch:
    """Wall time by phase, in seconds. On an accelerator each mark waits for the device, so shares are true
    there at the price of a synchronisation per phase; pass ``enabled=False`` to run free."""

    def __init__(self, device: torch.device, enabled: bool = True):
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.enabled = enabled
        self._synchronise = getattr(torch, device.type).synchronize if device.type != "cpu" else None
        self._last = time.perf_counter()

    def start(self) -> None:
        self.mark(None)

    def mark(self, phase: str | None) -> None:
        """Book the time since the last mark to ``phase`` (None: to nothing)."""
        if not self.enabled:
            return
        if self._synchronise is not None:
            self._synchronise()
        now = time.perf_counter()
        if phase is not None:
            self.seconds[phase] += max(now - self._last, 0.0)  # on some machines even this clock has gone backwards
        self._last = now
