"""A model in modules of its own, or with some of its layers: weights are shared, nothing is copied."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..contracts.errors import ModelError


def with_layers(model: Any, layers: Sequence[int]) -> Any:
    """A causal LM that shares everything with ``model`` but runs only these of its decoder's layers, in this order."""
    shared = [name for name in ("num_kv_shared_layers", "hidden_size_per_layer_input") if _set(model, name)]
    if shared:
        raise ModelError(
            f"{type(model).__name__} has layers that need each other, or their number ({', '.join(shared)} in its "
            "config), so some of them cannot be run alone"
        )
    count, decoder = model.config.get_text_config().num_hidden_layers, model.get_decoder()
    stacks = [name for name, m in decoder.named_children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise ModelError(
            f"{type(model).__name__} has no one list of {count} layers, so some of them cannot be run alone"
        )
    if not layers or any(not 0 <= layer < count for layer in layers) or list(layers) != sorted(set(layers)):
        raise ModelError(
            f"{type(model).__name__} has layers 0 to {count - 1}; name some of them, ascending, not {layers}"
        )
    config = copy.copy(decoder.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    place = next(name for name, module in model.named_modules() if module is decoder)
    twin = at = _shallow(model)
    for part in place.split("."):  # copies of what holds the layers, and of nothing else
        at._modules[part] = at = _shallow(at._modules[part])
    at.config = config
    at._modules[stacks[0]] = nn.ModuleList(at._modules[stacks[0]][layer] for layer in layers)
    return twin


def own_modules(model: Any) -> Any:
    """The same model in modules of its own, which share the weights.

    What is done to them (eval mode, other classes of linear layers, hooks, buffers that a pass replaces) reaches
    neither the caller's ``model`` nor another thread that decodes with it.
    """
    twins: dict[nn.Module, Any] = {}  # a module may stand in several places, or hold one that holds it

    def twin(module: nn.Module) -> Any:
        if module not in twins:
            twins[module] = made = _shallow(module)
            for name, child in module._modules.items():
                made._modules[name] = None if child is None else twin(child)
        return twins[module]

    return twin(model)


#: What every module holds by name (parameters, buffers, submodules, hooks): a copy needs containers of its own.
_HELD = [name for name, held in vars(nn.Module()).items() if isinstance(held, dict | set)]


def _set(model: Any, name: str) -> bool:
    return bool(getattr(model.config.get_text_config(), name, None))


def _shallow(module: nn.Module) -> Any:
    twin = copy.copy(module)
    held = vars(twin)  # directly: a module looks at whatever is set, which takes longer than all the rest
    for name in _HELD:
        held[name] = held[name].copy()
    return twin
