"""How long this process waited for a processor that another one had: Linux counts it for every thread."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_THREADS = Path("/proc/self/task")


class Waiting:
    """Seconds that the threads of this process were ready to run, and did not, all threads added up.

    As long as one other program takes one processor, no two threads wait at a time, and a step that all threads share
    is that much later. Always 0 where the system does not say, and for work on another device, which goes on meanwhile.
    """

    def __init__(self, device: torch.device):
        self._counted = device.type == "cpu" and _THREADS.is_dir()
        self._files: dict[str, int] = {}
        self._before = 0

    def start(self) -> None:
        """From here on; threads that begin later are not counted until the next start."""
        self.close()
        if self._counted:
            for thread in os.listdir(_THREADS):
                with suppress(OSError):  # a thread that has ended
                    self._files[thread] = os.open(_THREADS / thread / "schedstat", os.O_RDONLY)
            self._before = self._total()

    def since(self) -> float:
        """Seconds since `start`, or since it was last asked."""
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
