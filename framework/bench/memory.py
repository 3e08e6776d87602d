"""What a cell holds in memory: measured, and computed for the sentence that an exhausted memory is reported with."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..models.quantization import nbytes


def start(device: torch.device) -> None:
    """Forget the peak so far, where that is possible."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """Most bytes held at once: on CUDA by tensors on the device since `start`, elsewhere by the process since it began.

    What the other cells of the group hold meanwhile is in it. None where the system does not say (Windows).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def total(device: torch.device) -> int | None:
    """Bytes of memory that the device has; None where the system does not say (Windows)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return None if sys.platform == "win32" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def exhausted(error: BaseException) -> bool:
    """Does the error say that memory ran out? PyTorch's allocator for CPUs has no class of its own for that."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def explain(
    models: Sequence[Any], batch_size: int, slot: int, positions: int, available: int | None, recorded: int = 0
) -> str:
    """What a cell that ran out of memory needed, and the batch size that would have fitted, in one sentence.

    Counts what grows large: weights, the caches of all slots, the logits of a target pass with the law that is made of
    them, both in float32, and what recorded passes return into.

    Args:
        models: transformers models, the target first; an embedding that two share counts once.
        slot: tokens that a slot holds.
        positions: that the target evaluates a row in a step.
        available: bytes, see `total`.
        recorded: bytes that the graphs of all models in the process hold (`graphs.held`), of slots as many as these.
    """
    weights = sum({id(p): nbytes(p) for model in models for p in model.parameters()}.values())
    cache = slot * sum(_bytes_per_token(model) for model in models)
    logits = 2 * 4 * positions * models[0].get_output_embeddings().weight.shape[0]
    needs = (
        f"out of memory at batch size {batch_size}: weights {_gb(weights)}, cache {_gb(batch_size * cache)} "
        f"({batch_size} slots of {slot} tokens), logits and law {_gb(batch_size * logits)} "
        f"({batch_size} × {positions} positions)"
    ) + (f", what recorded passes return {_gb(recorded)}" if recorded else "")
    if available is None:
        return f"{needs}; set a smaller batch_size or max_new_tokens"
    fits = max(available - weights, 0) // (cache + logits + -(-recorded // batch_size))
    if fits >= batch_size:
        rest = "other programs, or the other pairs of the group, hold the rest: run fewer of them at once"
        return f"{needs} are less than the {_gb(available)} there are; {rest}"
    if fits == 0:
        return f"{needs}, of {_gb(available)} in all; not even batch size 1 fits: take a draft model or dtype bfloat16"
    return f"{needs}, of {_gb(available)} in all; batch size {fits} would fit, other programs' memory not counted"


def _bytes_per_token(model: Any) -> int:
    """Keys and values of one token in all layers."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv_heads * size * model.dtype.itemsize


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
