"""Models larger than one device: their layers spread over several, or every layer split over several processes.

``device: spread`` and a mapping are a ``device_map`` (accelerate): a pass goes from device to device. ``device: tp`` is
tensor parallelism by the plan that transformers has for the architecture, under ``torchrun``: every process has a part
of each layer (`models.distributed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import finalize

from ..errors import ModelError, UsageError, printable, quoted
from ..util.extras import need
from . import distributed
from .device import pick_device
from .distributed import SPLIT

if TYPE_CHECKING:
    import torch

#: The device of a model whose layers lie on as many devices as it takes.
SPREAD = "spread"
#: Where `Device` says that weights are, and they are not in memory.
_DISK = "disk"

#: A device, its name, `SPREAD`, `SPLIT`, or a device (or "disk") for each part of the model, by the part's name.
Device = Any


def larger(device: Device) -> bool:
    """Does it ask for more than one device?"""
    return device in (SPREAD, SPLIT) or isinstance(device, Mapping)


def first_device(device: Device) -> torch.device:
    """Where tokens go in and logits come out of a model that is loaded with ``device``. Raises UsageError."""
    import torch

    if device == SPLIT:
        return torch.device("cuda", distributed.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if isinstance(device, Mapping):
        if not device:
            raise UsageError("the device map is empty; name a device for every part of the model, {'': cpu} for all")
        places = [_place(where) for where in device.values()]
        return next((place for place in places if place is not None), torch.device("cpu"))
    return pick_device("auto" if device == SPREAD else device)


def described(device: Device) -> str:
    """How it was loaded, for what a result depends on; "" for one device."""
    import torch

    if device == SPREAD:
        return f" spread over {max(torch.cuda.device_count(), 1)}"
    if device == SPLIT:
        return f" split over {distributed.count()} processes"
    if isinstance(device, Mapping):
        return f" spread over {', '.join(dict.fromkeys(map(str, device.values())))}"
    return ""


def load_options(name: str, device: Device, quantization: str) -> dict[str, Any]:
    """What ``from_pretrained`` is told about ``device``; nothing where it is one.

    Raises:
        ModelError: accelerate is not installed.
        UsageError: a quantised model.
    """
    if not larger(device):
        return {}
    if quantization:
        raise UsageError(f"{printable(name)} is quantised as it is loaded, and then has one device; give cpu or cuda")
    if device == SPLIT:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=distributed.count(), tp_plan="auto")}
    # transformers places layers with it
    need(f"{printable(name)} on several devices", "spread", "accelerate", error=ModelError)
    return {"device_map": "auto" if device == SPREAD else dict(device)}


def check_divides(name: str, config: Mapping[str, Any], device: Device) -> None:
    """Raise ModelError for a model whose heads cannot be shared out evenly among the processes."""
    if device != SPLIT:
        return
    nested, n = config.get("text_config"), distributed.count()
    text = nested if isinstance(nested, Mapping) else config
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = text.get(key)
        if isinstance(heads, int) and heads % n:
            raise ModelError(
                f"{printable(name)} has {heads} heads ({key}), which {n} processes cannot share evenly; start a number "
                "of processes that divides them"
            )


def check_split(name: str, model: Any, device: Device) -> None:
    """Raise ModelError if a model was to be split, and transformers has no plan for its architecture."""
    if device == SPLIT and not any(hasattr(weight, "placements") for weight in model.parameters()):
        raise ModelError(
            f"{printable(name)} cannot be split: transformers has no plan for {type(model).__name__}; take device "
            f"{SPREAD}, or one device"
        )


def lead(model: Any, key: int) -> None:
    """See that nobody runs a split model, or a part of it, in this process alone: it would wait for the others."""
    if distributed.rank():
        return
    model._crossdraft_split = Split(key)
    finalize(model._crossdraft_split, distributed.drop, key)
    for part in (model, model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()):
        part.register_forward_pre_hook(_only_together)


@dataclass(eq=False)
class Split:
    """What all processes call a split model; `own_modules` and the like share it with the model."""

    key: int


def split_of(model: Any) -> Split:
    """Raises AttributeError for a model that is not split, see `is_split`."""
    return model._crossdraft_split


def is_split(model: Any) -> bool:
    """Do several processes hold ``model``, of which this is the first?"""
    return "_crossdraft_split" in vars(model)


def input_device(model: Any) -> torch.device:
    """Where a model takes tokens and says logits: with weights that are moved in when they are needed, not where they
    lie."""
    where = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    place = None if where is None else _place(where)
    return model.device if place is None else place


def is_spread(model: Any) -> bool:
    """Is it run by hooks that move what a layer needs to the layer's device?"""
    return hasattr(model, "_hf_hook")


def _only_together(module: Any, arguments: Any) -> None:
    if not distributed.inside():
        raise ModelError(
            f"the target is split over {distributed.count()} processes (device {SPLIT}), which make its passes "
            "together; what wants to run it by itself needs a target on one device"
        )


def _place(where: Any) -> torch.device | None:
    """The torch device of an entry of a device map, None for the disk. Raises UsageError for none."""
    import torch

    if where == _DISK:
        return None
    if isinstance(where, int) and not isinstance(where, bool):
        where = f"cuda:{where}"
    if not isinstance(where, str | torch.device):
        raise UsageError(f"{quoted(where)} in the device map is no device; write cpu, cuda:0 or {_DISK}")
    return pick_device(where)
