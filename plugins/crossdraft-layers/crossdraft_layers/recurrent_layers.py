"""Recurrent layers of transformers models: calling one with explicit states.

Each adapter calls a module that keeps a state (a convolution's last inputs, an SSM or delta-rule state, ..) as a
function of its inputs and its states, so that `RecurrentCache` can run it from any state. The modules themselves are
transformers' own, on their reference path in PyTorch if the fast kernels are not installed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import cache_utils

from crossdraft import ModelError, cache_argument
from crossdraft.framework.util.cache_argument import plain_signature

#: Calls ``forward`` of a module with ``arguments``, from ``states`` (None = the start of a text) on; returns its output
#: and the states after its last token.
Call = Callable[[Any, Callable[..., Any], dict[str, Any], "list[Tensor] | None"], tuple[Any, list[Tensor]]]


@dataclass(frozen=True)
class Adapter:
    """The way to call one class of recurrent modules.

    Attributes:
        call: see `Call`.
        cache: name of the argument that receives the state, if not that of `cache_argument`.
        joint_rows: several rows may share a call of one token.
    """

    call: Call
    cache: str = ""
    joint_rows: bool = True

    def initial(self, module: Any, forward: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
        """States ``[1, ..]`` before the first token; ``arguments`` are those of one row and at least two tokens."""
        if self.call is _rwkv:
            return _rwkv_initial(module, arguments["hidden"])
        return [torch.zeros_like(state) for state in self.call(module, forward, arguments, None)[1]]


class _AnyLayer(list):
    """A cache's list of layers in which every index is the same layer."""

    def __getitem__(self, _: Any) -> Any:
        return super().__getitem__(0)

    def __len__(self) -> int:
        return 1 << 30


def _states_in_cache(
    module: Any, forward: Callable[..., Any], arguments: dict[str, Any], states: list[Tensor] | None
) -> tuple[Any, list[Tensor]]:
    """Modules that keep their states in a layer of transformers' cache."""
    layer: Any = cache_utils.LinearAttentionLayer(number_of_states=getattr(module, "conv_idx", 0) + 1)
    index = layer.number_of_states - 1
    if states is not None:
        layer.conv_states[index], layer.conv_kernel_size[index] = states[0], states[0].shape[-1]
        layer.dtype, layer.device = states[0].dtype, states[0].device
        layer.is_conv_states_initialized[index] = layer.has_previous_state[index] = True
        if len(states) > 1:
            layer.recurrent_states[index], layer.is_recurrent_states_initialized[index] = states[1], True
    arguments = {**arguments, cache_argument(forward): cache_utils.Cache(layers=_AnyLayer([layer]))}
    with _time_steps_clamped(module) if states is not None else nullcontext():
        output = forward(**arguments)
    after = [layer.conv_states[index], layer.recurrent_states[index]]
    return output, [state for state in after if state is not None]


@contextmanager
def _time_steps_clamped(module: Any) -> Iterator[None]:
    """Clamp the time steps of a Mamba-2 mixer, which it does for several tokens but not for a single one.

    It clamps ``softplus(dt + dt_bias)``; here the inverse bounds apply to ``dt``, the end of `in_proj`'s output.
    """
    low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    if low <= 0 and high == math.inf:
        yield
        return
    bounds = [
        x + math.log(-math.expm1(-x)) if 0 < x < math.inf else math.copysign(math.inf, x or -1) for x in (low, high)
    ]

    def clamp(_: Any, __: Any, output: Tensor) -> Tensor:
        dt, bias = output[..., -module.num_heads :], module.dt_bias.to(output.dtype)
        scale = module.mup_vector[..., -1:] if hasattr(module, "mup_vector") else 1.0
        steps = dt * scale + bias
        inside = (steps >= bounds[0]) & (steps <= bounds[1])
        clamped = torch.where(inside, dt, (steps.clamp(*bounds) - bias) / scale)
        return torch.cat([output[..., : -module.num_heads], clamped], -1)

    hook = module.in_proj.register_forward_hook(clamp)
    try:
        yield
    finally:
        hook.remove()


class _LinearCache:
    """The part of ``MiniMaxCache`` that its lightning attention uses."""

    def __init__(self, state: Tensor | None):
        self.state = state

    def get_linear_cache(self, _: int) -> Tensor | None:
        return self.state

    def set_linear_cache(self, _: int, state: Tensor) -> None:
        self.state = state


def _minimax(
    module: Any, forward: Callable[..., Any], arguments: dict[str, Any], states: list[Tensor] | None
) -> tuple[Any, list[Tensor]]:
    linear = _LinearCache(None if states is None else states[0])
    output = forward(**{**arguments, cache_argument(forward): linear})
    assert linear.state is not None
    return output, [linear.state]


def _recurrent_gemma(
    module: Any, forward: Callable[..., Any], arguments: dict[str, Any], states: list[Tensor] | None
) -> tuple[Any, list[Tensor]]:
    """States are attributes of the module; a call of several tokens ignores the convolution's."""
    module.conv1d_state, module.rg_lru.recurrent_states = (None, None) if states is None else states
    output = forward(**{**arguments, "use_cache": True})
    after: list[Any] = [module.conv1d_state, module.rg_lru.recurrent_states]
    module.conv1d_state = module.rg_lru.recurrent_states = None
    return output, after


class _Slot:
    """One layer of a state tensor ``[R, H, layers]`` of RWKV."""

    def __init__(self, value: Tensor):
        self.value = value

    def __getitem__(self, _: Any) -> Tensor:
        return self.value

    def __setitem__(self, _: Any, value: Tensor) -> None:
        self.value = value


def _rwkv_initial(module: Any, hidden: Tensor) -> list[Tensor]:
    inner, outer = module.attention.attention_hidden_size, hidden.shape[-1]
    shifted = [hidden.new_zeros(hidden.shape[0], outer) for _ in range(2)]
    sums = [hidden.new_zeros(hidden.shape[0], inner, dtype=torch.float32) for _ in range(3)]
    sums[2] -= 1e38
    return shifted + sums


def _rwkv(
    module: Any, forward: Callable[..., Any], arguments: dict[str, Any], states: list[Tensor] | None
) -> tuple[Any, list[Tensor]]:
    slots = [_Slot(state) for state in states or _rwkv_initial(module, arguments["hidden"])]
    output = forward(**{**arguments, "state": slots, "use_cache": True})
    return output, [slot.value for slot in slots]


def _xlstm(
    module: Any, forward: Callable[..., Any], arguments: dict[str, Any], states: list[Tensor] | None
) -> tuple[Any, list[Tensor]]:
    output = forward(**{**arguments, "state": None if states is None else tuple(states)})
    return output, list(output[1])


#: By name of the module's class.
ADAPTERS: Mapping[str, Adapter] = {
    **dict.fromkeys(
        (
            "BailingHybridDeltaAttention",
            "BambaMixer",
            "FalconH1Mixer",
            "FalconMambaMixer",
            "GraniteMoeHybridMambaLayer",
            "Inkling2DynamicShortConvolution",
            "Inkling2ShortConvolution",
            "InklingShortConvolution",
            "JambaMambaMixer",
            "KimiLinearDeltaAttention",
            "LaraMiniGatedDeltaNet",
            "Lfm2MoeShortConv",
            "Lfm2ShortConv",
            "Lfm3ShortConv",
            "Mamba2Mixer",
            "MambaMixer",
            "NemotronHMamba2Mixer",
            "OlmoHybridGatedDeltaNet",
            "Qwen3NextGatedDeltaNet",
            "Qwen3_5GatedDeltaNet",
            "Qwen3_5MoeGatedDeltaNet",
            "Zamba2MambaMixer",
            "ZambaMambaMixer",
            "ZayaCCAProjection",
        ),
        Adapter(_states_in_cache),
    ),
    "MiniMaxLightningAttention": Adapter(_minimax),
    "RecurrentGemmaRecurrentBlock": Adapter(_recurrent_gemma, "use_cache"),
    # A single token of several rows: RWKV's time shift broadcasts rows against each other.
    "RwkvBlock": Adapter(_rwkv, "state", joint_rows=False),
    "xLSTMBlock": Adapter(_xlstm, "state"),
}


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that keep a state and have an adapter."""
    return [module for module in model.modules() if type(module).__name__ in ADAPTERS]


class StateStore(Protocol):
    """Holder of the states of recurrent modules, for the passes inside `keep_states`."""

    def run(
        self, index: int, module: Any, adapter: Adapter, forward: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """Return the output of recurrent module ``index`` of the model for ``arguments``; keep its states."""
        ...


_thread = threading.local()


@contextmanager
def keep_states(store: Any, positions: Tensor, key_positions: Tensor | None) -> Iterator[None]:
    """Within the context, in this thread, recurrent modules run over ``store``, if it is a `StateStore`.

    Args:
        positions: ``[R, W]`` or ``[1, W]``, of the queries of the pass.
        key_positions: ``[R, kv_len]``, of the slots; ``None`` = their indices.
    """
    before = getattr(_thread, "current", None)
    _thread.current = (store, positions, key_positions) if hasattr(store, "run") else None
    try:
        yield
    finally:
        _thread.current = before


class _Stateful:
    """Added to the class of a recurrent module: its states are those of the `StateStore` of the pass, if it has one."""

    recurrent_index: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        current, plain = getattr(_thread, "current", None), super().forward  # type: ignore[misc]
        if current is None:
            return plain(*args, **kwargs)
        arguments = dict(plain_signature(type(self)).bind(*args, **kwargs).arguments)
        arguments |= arguments.pop("kwargs", {})
        return current[0].run(self.recurrent_index, self, ADAPTERS[type(self).__name__], plain, arguments)


class _RelativeByRow:
    """Added to Inkling's relative position biases: the positions of every row, not of a cache with one length."""

    rel_extent: int
    proj: Tensor

    def forward(self, relative_states: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = _distances(len(key_positions))
        if distance is None:
            return super().forward(relative_states, query_positions, key_positions)  # type: ignore[misc]
        logits = (relative_states @ self.proj).transpose(1, 2)
        index = distance.clamp(0, self.rel_extent - 1).expand(*logits.shape[:2], -1, -1)
        return logits.gather(-1, index).masked_fill((distance < 0) | (distance >= self.rel_extent), 0.0)


class _DistanceByRow:
    """Added to relative position biases that receive the distances, of one cache for all rows."""

    def forward(self, hidden_states: Tensor, relative_distance: Tensor, position_ids: Tensor) -> Tensor:
        distance = _distances(relative_distance.shape[-1])
        plain: Any = super()
        return plain.forward(hidden_states, relative_distance if distance is None else distance, position_ids)


#: By name of the class of the biases; Inkling2's receive distances from transformers 5.24 on.
_RELATIVE = {
    "InklingRelativeLogits": _RelativeByRow,
    "Inkling2RelativeLogits": _RelativeByRow,
    "Inkling2RelativePositionBias": _DistanceByRow,
}


def _distances(kv_len: int) -> Tensor | None:
    """``[R, 1, W, kv_len]`` from keys to queries, within `keep_states` with a `StateStore`; None otherwise."""
    current = getattr(_thread, "current", None)
    if current is None:
        return None
    _, queries, keys = current
    keys = torch.arange(kv_len, device=queries.device)[None] if keys is None else keys
    return queries[:, None, :, None] - keys[:, None, None, :]


@cache
def _extended(cls: type, own: type) -> type:
    # The same name: adapters are looked up by it.
    return type(cls.__name__, (own, cls), {"__module__": cls.__module__})


def extend_modules(model: nn.Module) -> None:
    """Let the recurrent modules of ``model`` run over a `StateStore`; without one they run as before."""
    for module in model.modules():
        own = _RELATIVE.get(type(module).__name__)
        if own is not None and not isinstance(module, own):
            module.__class__ = _extended(type(module), own)
    for index, module in enumerate(recurrent_modules(model)):
        if "forward" in vars(module):
            raise ModelError(
                f"{type(model).__name__} is spread over several devices by hooks, which its recurrent layers do not "
                "support; load it on one device"
            )
        if not isinstance(module, _Stateful):
            module.recurrent_index = index  # type: ignore[assignment]
            module.__class__ = _extended(type(module), _Stateful)
