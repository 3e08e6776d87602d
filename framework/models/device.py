"""Selection of device and dtype, rounding of dtypes, and CPU features."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError, quoted

if TYPE_CHECKING:
    import torch

    from ..contracts.models import LoadedModel

#: Supported device types.
DEVICES = ("cpu", "cuda", "mps", "xpu")
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "sve", "bf16")
#: Largest difference of two logits that the rounding of another implementation can turn around, by dtype.
TIE = {"float32": 1e-3, "float16": 0.06, "bfloat16": 0.5}


@cache
def cpu_features() -> frozenset[str]:
    """Instruction sets of `FEATURES` reported by Linux; empty on other systems."""
    for line in lines_of("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split()) & frozenset(FEATURES)
    return frozenset()


@cache
def cpu_model() -> str:
    """Name of the processor."""
    for line in lines_of("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def lines_of(file: str) -> list[str]:
    """Lines of a system file; empty if it does not exist."""
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def pick_device(device: str | torch.device) -> torch.device:
    """Return the torch device `device`; ``"auto"`` is CUDA if available, else the CPU."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        result = torch.device(device)
    except (RuntimeError, TypeError):
        result = None
    if result is None or result.type not in DEVICES:
        raise UsageError(f"unknown device {quoted(device)}; use auto, cpu, cuda or cuda:0") from None
    if result.type == "cuda" and (result.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {device!r} is not available: PyTorch finds {torch.cuda.device_count()} CUDA devices; use another"
        )
    return result


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the torch dtype `dtype`; ``"auto"`` is bfloat16 if `device` supports it natively, else float32."""
    import torch

    if dtype == "auto":
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            native = device.type == "cpu" and not {"amx_bf16", "avx512_bf16"}.isdisjoint(cpu_features())
        return torch.bfloat16 if native else torch.float32
    result = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if result in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return result
    raise UsageError(f"unknown dtype {quoted(dtype)}; use auto, float32, bfloat16 or float16")


def total_memory(device: torch.device) -> int | None:
    """Memory of the device in bytes; None if the system does not report it (Windows)."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return None if sys.platform == "win32" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def tie_of(target: LoadedModel) -> tuple[str, float]:
    """The dtype of a loaded target, and its `TIE`: the largest one for a backend whose models have no parameters."""
    parameters = getattr(target.model, "parameters", None)
    dtype = str(next(parameters()).dtype).removeprefix("torch.") if parameters is not None else "unknown"
    return dtype, TIE.get(dtype, max(TIE.values()))
