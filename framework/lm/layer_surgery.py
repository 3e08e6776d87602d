"""A model in modules of its own, or with some of its layers: weights are shared, nothing is copied."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..models.placement import is_spread

#: What the parts of a decoder layer are called.
_ATTENTION, _MLP = ("self_attn", "attn", "attention", "self_attention"), ("mlp", "feed_forward", "block_sparse_moe")


def with_layers(
    model: Any, layers: Sequence[int], no_attention: Collection[int] = (), no_mlp: Collection[int] = ()
) -> Any:
    """A causal LM that shares everything with ``model`` but runs only these of its decoder's layers, in this order.

    Args:
        no_attention, no_mlp: layers of them whose attention, or feed-forward network, adds nothing.

    Raises:
        ModelError: layers that there are not, or that cannot be run alone, or without a part of them.
    """
    shared = [name for name in ("num_kv_shared_layers", "hidden_size_per_layer_input") if _set(model, name)]
    if shared:
        raise ModelError(
            f"{type(model).__name__} has layers that need each other, or their number ({', '.join(shared)} in its "
            "config), so some of them cannot be run alone"
        )
    if is_spread(model):
        raise ModelError(
            f"{type(model).__name__} is spread over several devices, by hooks that run the whole of it, so some of its "
            "layers cannot be run alone; load it on one device"
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
    if strange := sorted({*no_attention, *no_mlp} - set(layers)):
        raise ModelError(f"layers {strange} are to run without a part of them, but are not among {list(layers)}")
    config = copy.copy(decoder.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    place = next(name for name, module in model.named_modules() if module is decoder)
    twin = at = _shallow(model)
    for part in place.split("."):  # copies of what holds the layers, and of nothing else
        at._modules[part] = at = _shallow(at._modules[part])
    at.config, at._layers_name = config, stacks[0]
    stack = at._modules[stacks[0]]
    at._modules[stacks[0]] = nn.ModuleList(
        _without(stack[layer], type(model).__name__, layer in no_attention, layer in no_mlp) for layer in layers
    )
    return twin


def insert_seam(model: Any, index: int) -> Seam:
    """Put a `Seam` around layer ``index`` of a result of `with_layers`, and return it."""
    decoder = model.get_decoder()
    stack = decoder._modules[decoder._layers_name]
    stack[index] = seam = Seam(stack[index])
    return seam


class Seam(nn.Module):
    """A decoder layer at which a pass can be cut in two: its output is kept, and its input can be replaced.

    Attributes:
        output: the hidden states ``[B, W, H]`` that the layer returned last.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.output: Tensor | None = None
        self._input: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # decoders read attributes of their layers, such as the type of attention
            return getattr(super().__getattr__("layer"), name)

    @contextmanager
    def replacing(self, hidden_states: Tensor) -> Iterator[None]:
        """Within the context, run the layer on ``hidden_states [B, W, H]`` instead of the previous layer's output."""
        self._input = hidden_states
        try:
            yield
        finally:
            self._input = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(hidden_states if self._input is None else self._input, *args, **kwargs)
        self.output = out[0] if isinstance(out, tuple) else out
        return out


class _Nothing(nn.Module):
    """In the place of a part that adds nothing to the residual stream; attention returns its weights, too."""

    def __init__(self, attention: bool):
        super().__init__()
        self._attention = attention

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self._attention else nothing


def _without(layer: nn.Module, model: str, attention: bool, mlp: bool) -> nn.Module:
    """``layer`` with nothing in the place of its attention, of its feed-forward network, or of both."""
    if not attention and not mlp:
        return layer
    twin = _shallow(layer)
    for leave_out, names, what in ((attention, _ATTENTION, "attention"), (mlp, _MLP, "feed-forward network")):
        found = [name for name in names if isinstance(twin._modules.get(name), nn.Module)]
        if leave_out and len(found) != 1:
            raise ModelError(f"a layer of {model} has no one module that is its {what}, so it cannot run without")
        if leave_out:
            twin._modules[found[0]] = _Nothing(what == "attention")
    return twin


#: Of each model, the layers whose parts add up, or do not.
_known: WeakKeyDictionary[Any, dict[int, bool]] = WeakKeyDictionary()


def parts_add_up(model: Any, layer: int) -> bool:
    """Does ``layer`` without attention and feed-forward network do nothing, as if it were not there?

    That is so where both add what they return to the residual stream, and nothing else does. Tried once a layer.
    """
    known = _known.setdefault(model, {})
    if layer not in known:
        known[layer] = _parts_add_up(model, layer)
    return known[layer]


@torch.inference_mode()
def _parts_add_up(model: Any, layer: int) -> bool:
    count = model.config.get_text_config().num_hidden_layers
    ids = (torch.arange(8, device=model.device) * 7 + 3)[None] % model.get_output_embeddings().weight.shape[0]
    others = [i for i in range(count) if i != layer]
    try:
        empty = with_layers(model, range(count), [layer], [layer])(input_ids=ids, use_cache=False).logits
        if others:
            return close(empty, with_layers(model, others)(input_ids=ids, use_cache=False).logits, model.dtype)
        return bool(empty.isfinite().all())
    except (TypeError, ValueError, IndexError, RuntimeError, AttributeError):  # a layer that reads more of its parts
        return False


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Are logits the same but for the rounding of another order of sums?"""
    off = (found.double() - expected.double()).square().mean().sqrt() / expected.double().std()
    return bool(off <= (1e-3 if dtype in (torch.float32, torch.float64) else 0.1))


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
