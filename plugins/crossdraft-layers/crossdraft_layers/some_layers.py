"""Copies of a model that share its weights and run some of its layers, whole or without one of their parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from crossdraft import ModelError
from crossdraft.framework.lm.layer_surgery import layer_stack, shallow_copy
from crossdraft.models import close

#: Names of the parts of a decoder layer.
_ATTENTION, _MLP = ("self_attn", "attn", "attention", "self_attention"), ("mlp", "feed_forward", "block_sparse_moe")


def with_layers(
    model: Any, layers: Sequence[int], no_attention: Collection[int] = (), no_mlp: Collection[int] = ()
) -> Any:
    """A causal LM that shares its weights with ``model`` but runs only these layers of its decoder, in this order.

    Args:
        no_attention, no_mlp: those of the layers whose attention, or feed-forward network, is skipped.

    Raises:
        ModelError: the layers do not exist, or cannot be run separately, or without one of their parts.
    """
    config, keys = model.config.get_text_config(), ("num_kv_shared_layers", "hidden_size_per_layer_input")
    if shared := [name for name in keys if getattr(config, name, None)]:
        raise ModelError(
            f"{type(model).__name__} has layers that depend on each other ({', '.join(shared)} in its config), so some "
            "of them cannot be run alone"
        )
    count, decoder = model.config.get_text_config().num_hidden_layers, model.get_decoder()
    stack = layer_stack(model, count)
    if stack is None:
        raise ModelError(
            f"{type(model).__name__} does not have exactly one list of {count} layers, so some of them cannot be run "
            "alone"
        )
    if not layers or any(not 0 <= layer < count for layer in layers) or list(layers) != sorted(set(layers)):
        raise ModelError(
            f"{type(model).__name__} has layers 0 to {count - 1}, so {layers} cannot be run; give some of "
            "its layers in ascending order"
        )
    if unknown := sorted({*no_attention, *no_mlp} - set(layers)):
        raise ModelError(f"layers {unknown} cannot run without one of their parts: they are not among {list(layers)}")
    config = copy.copy(decoder.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    path = next(name for name, module in model.named_modules() if module is decoder)
    twin = module = shallow_copy(model)
    for part in path.split("."):  # only the modules on the way to the layers are copied
        module._modules[part] = module = shallow_copy(module._modules[part])
    name = next(name for name, child in decoder.named_children() if child is stack)
    module.config, module._layers_name = config, name
    module._modules[name] = nn.ModuleList(
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
            self._input = self.output = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(hidden_states if self._input is None else self._input, *args, **kwargs)
        self.output = out[0] if isinstance(out, tuple) else out
        return out


class _Zeros(nn.Module):
    """Replaces a skipped part: adds zeros to the residual stream; attention also returns its weights."""

    def __init__(self, attention: bool):
        super().__init__()
        self._attention = attention

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self._attention else zeros


def _without(layer: nn.Module, model: str, attention: bool, mlp: bool) -> nn.Module:
    """``layer`` without its attention, its feed-forward network, or both."""
    if not attention and not mlp:
        return layer
    twin = shallow_copy(layer)
    for skip, names, part in ((attention, _ATTENTION, "attention"), (mlp, _MLP, "feed-forward network")):
        matches = [name for name in names if isinstance(twin._modules.get(name), nn.Module)]
        if skip and len(matches) != 1:
            raise ModelError(f"a layer of {model} does not have exactly one {part} module, so it cannot run without it")
        if skip:
            twin._modules[matches[0]] = _Zeros(part == "attention")
    return twin


def once_per_model(test: Callable[[Any, int], bool]) -> Callable[[Any, int], bool]:
    """``test(model, number)``, run once per model and number; False if the model's layers do not support it."""
    results: WeakKeyDictionary[Any, dict[int, bool]] = WeakKeyDictionary()

    @wraps(test)
    @torch.inference_mode()
    def tried(model: Any, number: int) -> bool:
        known = results.setdefault(model, {})
        if number not in known:
            passed = False
            with suppress(TypeError, ValueError, IndexError, KeyError, RuntimeError, AttributeError):
                passed = test(model, number)
            known[number] = passed
        return known[number]

    return tried


@once_per_model
def parts_add_up(model: Any, layer: int) -> bool:
    """True if ``layer`` without attention and feed-forward network is the identity.

    That holds if both add their outputs to the residual stream, and nothing else does. Otherwise the layer may read
    more than the outputs of its parts.
    """
    count = model.config.get_text_config().num_hidden_layers
    ids = (torch.arange(8, device=model.device) * 7 + 3)[None] % model.get_output_embeddings().weight.shape[0]
    others = [i for i in range(count) if i != layer]
    empty = with_layers(model, range(count), [layer], [layer])(input_ids=ids, use_cache=False).logits
    if others:
        return close(empty, with_layers(model, others)(input_ids=ids, use_cache=False).logits, model.dtype)
    return bool(empty.isfinite().all())
