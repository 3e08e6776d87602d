"""Models larger than one device: layers spread over devices, or tensor-parallel over processes.

``device: spread`` and a mapping are a ``device_map`` (accelerate): a pass goes from device to device. ``device: tp`` is
tensor parallelism by transformers' plan for the architecture, under ``torchrun``: every process has a shard of each
layer (`models.distributed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import finalize

from ..errors import ModelError, UsageError, printable, quoted
from ..util.extras import need
from . import distributed
from .device import pick_device
from .distributed import SPLIT

if TYPE_CHECKING:
    import torch

#: Device name of a model that is spread over all devices.
SPREAD = "spread"
#: Device map entry of offloaded weights.
_DISK = "disk"

#: A device, its name, `SPREAD`, `SPLIT`, or a mapping from module names to devices (or "disk").
Device = Any


def several_devices(device: Device) -> bool:
    """True if ``device`` means several devices."""
    return device in (SPREAD, SPLIT) or isinstance(device, Mapping)


def first_device(device: Device) -> torch.device:
    """Device of inputs and logits of a model loaded with ``device``. Raises UsageError."""
    import torch

    if device == SPLIT:
        return torch.device("cuda", distributed.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if isinstance(device, Mapping):
        if not device:
            raise UsageError("the device map is empty; set a device for every module, or {'': cpu} for all")
        devices = [_entry_device(entry) for entry in device.values()]
        return next((torch_device for torch_device in devices if torch_device is not None), torch.device("cpu"))
    return pick_device("auto" if device == SPREAD else device)


def describe_placement(device: Device) -> str:
    """Placement as text for provenance; "" for one device."""
    import torch

    if device == SPREAD:
        return f" spread over {max(torch.cuda.device_count(), 1)}"
    if device == SPLIT:
        return f" split over {distributed.count()} processes"
    if isinstance(device, Mapping):
        return f" spread over {', '.join(dict.fromkeys(map(str, device.values())))}"
    return ""


def load_options(name: str, device: Device, quantization: str) -> dict[str, Any]:
    """Options of ``from_pretrained`` for ``device``; empty for a CPU, and without accelerate, for one device.

    Raises:
        ModelError: accelerate is not installed.
        UsageError: the model is quantised.
    """
    if not several_devices(device):  # transformers needs accelerate to put weights on the device while it reads them
        direct = device.type != "cpu" and not quantization and find_spec("accelerate") is not None
        return {"device_map": {"": device}} if direct else {}
    if quantization:
        raise UsageError(f"{printable(name)} is quantised on load, which requires one device; use cpu or cuda")
    if device == SPLIT:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=distributed.count(), tp_plan="auto")}
    # transformers places layers with it
    need(f"{printable(name)} on several devices", "spread", "accelerate", error=ModelError)
    return {"device_map": "auto" if device == SPREAD else dict(device)}


def check_divides(name: str, config: Mapping[str, Any], device: Device) -> None:
    """Raise ModelError if the number of attention heads is not divisible by the number of processes."""
    if device != SPLIT:
        return
    nested, n = config.get("text_config"), distributed.count()
    text_config = nested if isinstance(nested, Mapping) else config
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = text_config.get(key)
        if isinstance(heads, int) and heads % n:
            raise ModelError(
                f"{printable(name)} has {heads} heads ({key}), which is not divisible by {n} processes; start another "
                "number of processes"
            )


def check_split(name: str, model: Any, device: Device) -> None:
    """Raise ModelError if transformers does not have a tensor-parallel plan for the architecture."""
    if device == SPLIT and not any(hasattr(weight, "placements") for weight in model.parameters()):
        raise ModelError(
            f"{printable(name)} cannot be split: transformers does not have a plan for {type(model).__name__}; use "
            f"device {SPREAD}, or one device"
        )


def register_split(model: Any, key: int) -> None:
    """Register a split model in rank 0, with hooks against passes outside of collective operations."""
    if distributed.rank():
        return
    model._crossdraft_split = Split(key)
    finalize(model._crossdraft_split, distributed.release_everywhere, key)
    for part in (model, model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()):
        part.register_forward_pre_hook(_require_collective)


@dataclass(eq=False)
class Split:
    """Key of a split model, shared with copies of its modules."""

    key: int


def split_of(model: Any) -> Split:
    """Return the `Split` of a model. Raises AttributeError if it is not split, see `is_split`."""
    return model._crossdraft_split


def is_split(model: Any) -> bool:
    """True in rank 0 if ``model`` is split over processes."""
    return "_crossdraft_split" in vars(model)


def input_device(model: Any) -> torch.device:
    """Device of a model's inputs and logits; with offloaded weights, the execution device."""
    entry = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    torch_device = None if entry is None else _entry_device(entry)
    return model.device if torch_device is None else torch_device


def is_spread(model: Any) -> bool:
    """True if accelerate's hooks move inputs between the devices of layers."""
    return hasattr(model, "_hf_hook")


def _require_collective(module: Any, arguments: Any) -> None:
    if not distributed.in_collective():
        raise ModelError(
            f"the target is split over {distributed.count()} processes (device {SPLIT}) and runs in collective passes "
            "only; use a target on one device"
        )


def _entry_device(entry: Any) -> torch.device | None:
    """Torch device of an entry of a device map, None for the disk. Raises UsageError for an invalid entry."""
    import torch

    if entry == _DISK:
        return None
    if isinstance(entry, int) and not isinstance(entry, bool):
        entry = f"cuda:{entry}"
    if not isinstance(entry, str | torch.device):
        raise UsageError(f"{quoted(entry)} in the device map is not a device; use cpu, cuda:0 or {_DISK}")
    return pick_device(entry)
