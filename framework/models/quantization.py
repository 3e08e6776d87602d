"""Models whose linear layers are quantised as they are loaded, by torchao: ``NAME@int8``, ``NAME@int4``, ``NAME@fp8``.

A quantised model is a model of its own: as a target its own law is kept, as a drafter it drafts from its own. The
embedding and the output head stay as they are, and so do activations.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, UsageError, printable
from ..util.extras import need

if TYPE_CHECKING:
    import torch
    from torch import nn

#: What ``NAME@`` may be followed by: integers of 8 bits, one scale an output; integers of 4 bits, a scale and a zero
#: point for each group of weights; floats of 8 bits (e4m3), one scale an output.
QUANTIZATIONS = ("int8", "int4", "fp8")
#: Weights of a row that share a scale in int4.
GROUP = 32


def split(name: str) -> tuple[str, str]:
    """The name of a model, and how it is to be quantised, "" = not at all."""
    stem, _, last = name.rpartition("@")
    return (stem, last) if stem and last in QUANTIZATIONS else (name, "")


def refuse_quantized(name: str, what: str) -> None:
    """Raise UsageError for a quantised model where ``what`` cannot be had of one."""
    stem, quantization = split(name)
    if quantization:
        raise UsageError(f"{printable(name)}: {what}; give {printable(stem)}")


def quantizer() -> str:
    """The package that quantises, with its version."""
    try:
        return f"torchao {version('torchao')}"
    except PackageNotFoundError:
        return "torchao"


def load_options(name: str, quantization: str, device: torch.device) -> dict[str, Any]:
    """What ``from_pretrained`` is told for a quantised model. Raises ModelError without torchao."""
    if not quantization:
        return {}
    # transformers places quantised weights with accelerate
    need(printable(name), "quantize", "accelerate", "torchao", error=ModelError)
    import torch
    from torchao import quantization as ao  # pyright: ignore[reportMissingImports]  # an extra
    from torchao.quantization.granularity import PerGroup, PerRow  # pyright: ignore[reportMissingImports]
    from transformers import TorchAoConfig

    how: Any
    if quantization == "int8":
        how = ao.Int8WeightOnlyConfig()
    elif quantization == "fp8":
        how = ao.Float8WeightOnlyConfig()
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
            how = ao.Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    elif device.type == "cuda":
        how = ao.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
    else:
        asymmetric = ao.MappingType.ASYMMETRIC
        bits: Any = getattr(torch, "int4")  # noqa: B009  the stubs lack it
        how = ao.IntxWeightOnlyConfig(weight_dtype=bits, granularity=PerGroup(GROUP), mapping_type=asymmetric)
    return {"quantization_config": TorchAoConfig(how), "device_map": {"": device}}


def check_quantized(name: str, quantization: str, model: nn.Module) -> None:
    """Raise ModelError unless something of ``model`` is quantised: only plain linear layers are."""
    if quantization and not any(hasattr(weight, "__tensor_flatten__") for weight in model.parameters()):
        raise ModelError(f"nothing of {printable(name)} was quantised: it has no linear layers that torchao knows")


def nbytes(weight: torch.Tensor) -> int:
    """Bytes that a weight takes, quantised or not."""
    if hasattr(weight, "__tensor_flatten__"):
        return sum(getattr(weight, part).nbytes for part in weight.__tensor_flatten__()[0])  # type: ignore[operator]
    return weight.nbytes
