"""Models larger than one device: layers spread over devices, or tensor-parallel over processes.

``device: spread`` and a mapping are a ``device_map`` (accelerate): a pass goes from device to device. ``device: tp`` is
tensor parallelism by transformers' plan for the architecture, under ``torchrun``: every process has a shard of each
layer. crossdraft-cluster has it: a `Spread` of its own, and the slots and tables of `split_of`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..contracts.models import LoadedModel
from ..errors import ModelError, UsageError, printable, quoted
from ..util.extras import need
from .device import pick_device

if TYPE_CHECKING:
    import torch

#: Device name of a model that is spread over all devices.
SPREAD = "spread"
#: Device name of a tensor-parallel model.
SPLIT = "tp"
#: Device map entry of offloaded weights.
_DISK = "disk"

#: A device, its name, `SPREAD`, `SPLIT`, or a mapping from module names to devices (or "disk").
Device = Any


class Spread:
    """Placement of a model on several devices: by accelerate, or as a subclass defines it."""

    def __init__(self, device: Device):
        self.device = device

    def first_device(self) -> torch.device:
        """Device of inputs and logits. Raises UsageError."""
        import torch

        if self.device == SPREAD:
            return pick_device("auto")
        if not self.device:
            raise UsageError("the device map is empty; set a device for every module, or {'': cpu} for all")
        devices = [_entry_device(entry) for entry in self.device.values()]
        return next((torch_device for torch_device in devices if torch_device is not None), torch.device("cpu"))

    def description(self) -> str:
        """Placement as text for provenance."""
        import torch

        if self.device == SPREAD:
            return f" spread over {max(torch.cuda.device_count(), 1)}"
        return f" spread over {', '.join(dict.fromkeys(map(str, self.device.values())))}"

    def options(self, name: str) -> dict[str, Any]:
        """Options of ``from_pretrained``. Raises ModelError if accelerate is not installed."""
        need(f"{printable(name)} on several devices", "spread", "accelerate", error=ModelError)  # it places the layers
        return {"device_map": "auto" if self.device == SPREAD else dict(self.device)}

    def check_config(self, name: str, config: Mapping[str, Any]) -> None:
        """Raise ModelError if a model with this config cannot be placed."""

    def check_model(self, name: str, model: Any) -> None:
        """Raise ModelError if the loaded model was not placed."""

    def load(self, load: Callable[[], LoadedModel], name: str, options: Mapping[str, Any]) -> LoadedModel:
        """``load()``, which loads the model ``name`` with these options, wherever it has to be called."""
        return load()


def process_count() -> int:
    """Number of processes started by ``torchrun``; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def several_devices(device: Device) -> Spread | None:
    """Placement of a model loaded with ``device``; None for one device."""
    if device == SPLIT:
        return plugins.of_companion("tensor parallelism")(device)
    return Spread(device) if device == SPREAD or isinstance(device, Mapping) else None


def first_device(device: Device) -> torch.device:
    """Device of inputs and logits of a model loaded with ``device``. Raises UsageError."""
    spread = several_devices(device)
    return pick_device(device) if spread is None else spread.first_device()


def load_options(name: str, spread: Spread | None, device: torch.device, quantization: str) -> dict[str, Any]:
    """Options of ``from_pretrained``; empty for a CPU, and without accelerate, for one ``device``.

    Raises:
        ModelError: accelerate is not installed.
        UsageError: the model is quantised.
    """
    if spread is None:  # transformers needs accelerate to put weights on the device while it reads them
        direct = device.type != "cpu" and not quantization and find_spec("accelerate") is not None
        return {"device_map": {"": device}} if direct else {}
    if quantization:
        raise UsageError(f"{printable(name)} is quantised on load, which requires one device; use cpu or cuda")
    return spread.options(name)


def split_of(model: Any) -> Any:
    """Object with ``slots`` and ``tables`` of a model that is split over processes, in rank 0; None for others."""
    return vars(model).get("_crossdraft_split")


def input_device(model: Any) -> torch.device:
    """Device of a model's inputs and logits; with offloaded weights, the execution device."""
    entry = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    torch_device = None if entry is None else _entry_device(entry)
    return model.device if torch_device is None else torch_device


def is_spread(model: Any) -> bool:
    """True if accelerate's hooks move inputs between the devices of layers."""
    return hasattr(model, "_hf_hook")


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
