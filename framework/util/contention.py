"""CPU contention: time that threads of this process waited for a processor, as counted by Linux."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_THREADS = Path("/proc/self/task")


class CpuWait:
    """Seconds that threads of this process were runnable but not running, summed over threads.

    If one other program occupies one processor, at most one thread waits at a time, and a step of all threads is
    delayed by the same time. Always 0 on systems without these counters, and for other devices.
    """

    def __init__(self, device: torch.device):
        self._counted = device.type == "cpu" and _THREADS.is_dir()
        self._files: dict[str, int] = {}
        self._before = 0

    def start(self) -> None:
        """Start counting; threads created later are not counted until the next start."""
        self.close()
        if self._counted:
            for thread in os.listdir(_THREADS):
                with suppress(OSError):  # a thread that has ended
                    self._files[thread] = os.open(_THREADS / thread / "schedstat", os.O_RDONLY)
            self._before = self._total()

    def since(self) -> float:
        """Seconds of waiting since `start` or the last call."""
        if not self._files:
            return 0.0
        before, self._before = self._before, self._total()
        return max(self._before - before, 0) / 1e9  # less, if a thread has ended

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def _total(self) -> int:
        total = 0
        for thread, file in list(self._files.items()):
            try:
                total += int(os.pread(file, 96, 0).split()[1])  # nanoseconds run, nanoseconds waited, times run
            except (OSError, ValueError, IndexError):
                os.close(self._files.pop(thread))
        return total
