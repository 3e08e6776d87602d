"""Quantization of linear layers on load, by torchao: ``NAME@int8``, ``NAME@int4``, ``NAME@fp8``.

A quantised model is a separate model with its own distribution, as target and as drafter. Embedding, output head and
activations are not quantised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ModelError, UsageError, printable
from ..util.extras import need
from ..util.releases import release

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Suffixes of ``NAME@``: int8 with one scale per output; int4 with scale and zero point per group; fp8 (e4m3) with one
#: scale per output.
QUANTIZATIONS = ("int8", "int4", "fp8")
#: Group size of int4.
GROUP = 32


def split(name: str) -> tuple[str, str]:
    """Split a model name into stem and quantization ("" = none)."""
    stem, _, last = name.rpartition("@")
    return (stem, last) if stem and last in QUANTIZATIONS else (name, "")


def refuse_quantized(name: str, unsupported: str) -> None:
    """Raise UsageError with the reason ``unsupported`` if the model is quantised."""
    stem, quantization = split(name)
    if quantization:
        raise UsageError(f"{printable(name)}: {unsupported}; use {printable(stem)}")


def quantizer() -> str:
    """Quantization package and version."""
    return f"torchao {release('torchao')}".rstrip()


def quantization_options(name: str, quantization: str, device: torch.device) -> dict[str, Any]:
    """Options of ``from_pretrained`` for a quantised model. Raises ModelError without torchao."""
    # transformers places quantised weights with accelerate
    need(printable(name), "quantize", "accelerate", "torchao", error=ModelError)
    import torch
    from torchao import quantization as ao  # pyright: ignore[reportMissingImports]  # an extra
    from torchao.quantization.granularity import PerGroup, PerRow  # pyright: ignore[reportMissingImports]
    from transformers import TorchAoConfig

    config: Any
    if quantization == "int8":
        config = ao.Int8WeightOnlyConfig()
    elif quantization == "fp8":
        config = ao.Float8WeightOnlyConfig()
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
            config = ao.Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    elif device.type == "cuda":
        config = ao.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
    else:
        asymmetric = ao.MappingType.ASYMMETRIC
        bits: Any = getattr(torch, "int4")  # noqa: B009  the stubs lack it
        config = ao.IntxWeightOnlyConfig(weight_dtype=bits, granularity=PerGroup(GROUP), mapping_type=asymmetric)
    return {"quantization_config": TorchAoConfig(config), "device_map": {"": device}}


def check_quantized(name: str, quantization: str, model: nn.Module) -> None:
    """Raise ModelError if no weight was quantised; only plain linear layers are."""
    if quantization and not any(hasattr(weight, "__tensor_flatten__") for weight in model.parameters()):
        raise ModelError(f"{printable(name)} was not quantised: it does not have linear layers supported by torchao")


def nbytes(weight: torch.Tensor) -> int:
    """Bytes of a weight, quantised or not."""
    if hasattr(weight, "__tensor_flatten__"):
        return sum(getattr(weight, part).nbytes for part in weight.__tensor_flatten__()[0])  # type: ignore[operator]
    return weight.nbytes
