"""``--launcher local``: processes on this machine, one per device."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from typing import Any

from .launcher import Launcher, Work, Worker, exit_status


class Local(Launcher):
    """Local processes: one per CUDA device for ``auto`` and ``cuda``, a single one for other devices."""

    name = "local"

    def __init__(self, config: Any, device: str, timed: bool):
        super().__init__(config, device, timed)
        self._free = _cuda_devices() if device in ("auto", "cuda") else []
        self._used: Counter[str] = Counter()

    def devices(self) -> int:
        return max(len(self._free), 1)

    def start(self, work: Work) -> Worker:
        if not self._free:  # the CPU, or the device of the recipe
            self._used[""] += 1
            return _Process(self, "", work.start(own_session=True))
        device = min(self._free, key=lambda name: self._used[name])
        self._used[device] += 1
        return _Process(self, device, work.start({"CUDA_VISIBLE_DEVICES": device}, own_session=True))

    def release(self, device: str) -> None:
        self._used[device] -= 1


class _Process(Worker):
    def __init__(self, launcher: Local, device: str, process: subprocess.Popen[bytes]):
        self._launcher, self._device, self._process, self._over = launcher, device, process, False

    def poll(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        if not self._over:
            self._over = True
            self._launcher.release(self._device)
        return exit_status(code)

    def stop(self, force: bool = False) -> None:
        if self._process.poll() is None:
            self._process.kill() if force else self._process.terminate()


def _cuda_devices() -> list[str]:
    """Names of the CUDA devices visible to PyTorch, for ``CUDA_VISIBLE_DEVICES``."""
    import torch

    count = torch.cuda.device_count()
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] if names else [str(i) for i in range(count)]
