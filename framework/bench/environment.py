"""Description of machine and software, printed by ``crossdraft list env`` and stored by every run.

Only `describe` imports PyTorch.
"""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from ..models.device import cpu_features, cpu_model, pick_device, pick_dtype, total_memory
from ..runs import threads
from ..util.output_files import cache_dir
from ..util.releases import release

PACKAGES = ("crossdraft", "torch", "transformers", "datasets", "tokenizers", "safetensors", "huggingface-hub")
PACKAGES += ("pluggy", "pydantic", "numpy", "pyarrow")


def describe() -> dict[str, Any]:
    """Versions, machine, devices and defaults derived from them, as JSON values."""
    import torch

    device, size = pick_device("auto"), total_memory(torch.device("cpu"))
    return {
        "versions": {package: release(package) or None for package in PACKAGES},
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": {
            "model": cpu_model(),
            "features": sorted(cpu_features()),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "threads": threads.settings(),
        },
        "memory_gib": size and round(size / 2**30, 1),
        "cuda": torch.version.cuda,
        "gpus": [_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())],
        "device": str(device),
        "dtype": str(pick_dtype("auto", device)).removeprefix("torch."),
        "attention": "sdpa",  # default of transformers
        "flash_attn": release("flash-attn") or None,
        "cache_dir": str(cache_dir()),
        "git_commit": git_commit(),
    }


def git_commit() -> str | None:
    """Commit of the checkout, with ``+changes`` if it is dirty; None outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, *lines = done.stdout.removeprefix("# branch.oid ").splitlines()
    return commit + "+changes" * any(not line.startswith("# ") for line in lines)


def _gpu(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
    }
