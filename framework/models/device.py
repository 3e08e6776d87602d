"""Devices and dtypes that models run on, and features of the processor."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError, quoted

if TYPE_CHECKING:
    import torch

#: Kinds of device that models run on; PyTorch knows others that compute nothing (meta), or that nobody has tried.
DEVICES = ("cpu", "cuda", "mps", "xpu")
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "sve", "bf16")


@cache
def cpu_features() -> frozenset[str]:
    """The instruction sets among `FEATURES` that Linux reports; empty on other systems."""
    for line in lines_of("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split()) & frozenset(FEATURES)
    return frozenset()


def lines_of(file: str) -> list[str]:
    """The lines of a file of the system; none where it has no such file."""
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def pick_device(device: str | torch.device) -> torch.device:
    """The torch device called `device`; ``"auto"`` is the CUDA device if there is one, else the CPU."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in DEVICES:
        raise UsageError(f"there is no device {quoted(device)}; write auto, cpu, cuda or cuda:0") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"there is no device {device!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return found


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype called `dtype`; ``"auto"`` is bfloat16 where `device` computes in it, else float32."""
    import torch

    if dtype == "auto":
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            native = device.type == "cpu" and not {"amx_bf16", "avx512_bf16"}.isdisjoint(cpu_features())
        return torch.bfloat16 if native else torch.float32
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return found
    raise UsageError(f"there is no dtype {quoted(dtype)}; write auto, float32, bfloat16 or float16")
