"""Memory of a cell: measured peak, and an explanation of out-of-memory errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..models.quantization import nbytes


def start(device: torch.device) -> None:
    """Reset the peak, if the device supports it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """Peak memory in bytes: on CUDA of tensors since `start`, elsewhere of the process since it began.

    Memory held by other cells of the group is included. None if the system does not report it (Windows).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def exhausted(error: BaseException) -> bool:
    """Return True for an out-of-memory error. PyTorch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def memory_message(
    models: Sequence[Any], batch_size: int, slot: int, positions: int, available: int | None, recorded: int = 0
) -> str:
    """Message for a cell that ran out of memory: the memory it needs, and the batch size that would fit.

    Includes weights, the caches of all slots, logits and probabilities of a target pass (both float32), and the output
    buffers of CUDA graphs.

    Args:
        models: transformers models, the target first; shared embeddings count once.
        slot: length of a slot in tokens.
        positions: positions evaluated by the target per row and step.
        available: bytes, see `models.device.total_memory`.
        recorded: bytes held by the CUDA graphs of all models at this batch size, see `cuda_graphs.held`.
    """
    weights = sum({id(p): nbytes(p) for model in models for p in model.parameters()}.values())
    cache = slot * sum(_bytes_per_token(model) for model in models)
    logits = 2 * 4 * positions * models[0].get_output_embeddings().weight.shape[0]
    needs = (
        f"out of memory at batch size {batch_size}: weights {_gb(weights)}, cache {_gb(batch_size * cache)} "
        f"({batch_size} slots of {slot} tokens), logits and probabilities {_gb(batch_size * logits)} "
        f"({batch_size} × {positions} positions)"
    ) + (f", CUDA graph outputs {_gb(recorded)}" if recorded else "")
    if available is None:
        return f"{needs}; set a smaller batch_size or max_new_tokens"
    fits = max(available - weights, 0) // (cache + logits + -(-recorded // batch_size))
    if fits >= batch_size:
        advice = "the rest is used by other programs or other cells of the group: run fewer at once"
        return f"{needs}; this is less than the {_gb(available)} of the device; {advice}"
    if fits == 0:
        return f"{needs}, of {_gb(available)}; batch size 1 does not fit either: use a smaller model or dtype bfloat16"
    return f"{needs}, of {_gb(available)}; batch size {fits} would fit if no other program uses memory"


def _bytes_per_token(model: Any) -> int:
    """Bytes of the keys and values of one token in all layers."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv_heads * size * model.dtype.itemsize


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
