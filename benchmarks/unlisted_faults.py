"""Faults of servers that no reading of `crossdraft diagnose` describes; used by `diagnose_matching`.

A fault is built into the drafter: `Fault.weights` change its modules, `Fault.drafts` what it drafts. Every second one,
by name, is held out: constants of the diagnosis were chosen without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

#: Prompt tokens at the end that a drafter with a cut context reads.
_WINDOW = 4
_SIZE = 32  # of an attention head in `tiny_heads`


@dataclass(frozen=True)
class Fault:
    """A fault: its name, the drafters that it is built into, and the base class that builds it in.

    Attributes:
        prompt: change of the prompts, if the server renders them otherwise.
        temperature: of the drafts; None = the target's. Such a fault exists above temperature 0 only.
    """

    name: str
    kinds: tuple[str, ...]
    mixin: type = object
    prompt: Callable[[list[int]], list[int]] | None = None
    temperature: float | None = None

    def applies(self, kind: str, temperature: float) -> bool:
        return kind in self.kinds and (self.temperature is not None) == bool(temperature)

    def drafter(self, cls: type, config: Any) -> tuple[type, Any]:
        """The drafter with the fault."""
        options = config.model_dump(exclude_unset=True)
        if self.temperature is not None:
            options["temperature"] = self.temperature
        bases = (cls,) if self.mixin is object else (self.mixin, cls)
        return type(cls.__name__, bases, {}), cls.Config(**options)


def held_out(name: str) -> bool:
    return sorted(fault.name for fault in FAULTS).index(name) % 2 == 1


def _module(drafter: Any) -> Any:
    """The draft model, EAGLE-3's head, or Medusa's heads."""
    for name in ("head", "heads"):
        if hasattr(drafter, name):
            return getattr(drafter, name)
    return drafter.context.load_model(drafter.config.model).model


def _layer(module: Any, number: int) -> Any:
    layers = module.model.layers if hasattr(module, "lm_head") and hasattr(module, "model") else module.layers
    return layers[min(number, len(layers) - 1)]


def changed(change: Callable[[Any], None]) -> type:
    """A base class whose instances apply ``change`` to their module."""

    class Changed:
        def __init__(self, config: Any, context: Any):
            super().__init__(config, context)  # type: ignore[call-arg]
            with torch.no_grad():
                change(_module(self))

    return Changed


def _permuted(rows: int, share: float) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randperm(rows, generator=generator)[: int(share * rows)]
    order = torch.arange(rows)
    order[chosen] = chosen.roll(1)
    return order


def _other_tokenizer(module: Any) -> None:
    tables = [module.get_input_embeddings().weight] if hasattr(module, "get_input_embeddings") else []
    tables += [module.embed_tokens.weight] if hasattr(module, "embed_tokens") else []
    for table in tables:
        table.copy_(table[_permuted(len(table), 0.15)])


def _other_rotation(module: Any) -> None:
    embedding = getattr(module, "model", module).rotary_emb
    frequencies = getattr(embedding, "rotary", embedding).inv_freq
    frequencies.copy_(frequencies**0.25)


def _scaled_embedding(module: Any) -> None:
    module.get_input_embeddings().weight.mul_(1.5)


def _missing_layer(module: Any) -> None:
    _layer(module, 2).self_attn.o_proj.weight.zero_()
    _layer(module, 2).mlp.down_proj.weight.zero_()


def _dropped_norm(module: Any) -> None:
    layer = _layer(module, 1)
    norm = layer.hidden_norm if hasattr(layer, "hidden_norm") else layer.post_attention_layernorm
    norm.register_forward_hook(lambda _, inputs, out: inputs[0])


def _attention_scale(module: Any) -> None:
    for number in range(4):
        _layer(module, number).self_attn.q_proj.weight.mul_(_SIZE**-0.5)
        if not hasattr(module, "model"):
            break


def _swapped_gate(module: Any) -> None:
    mlp = _layer(module, 1).mlp
    gate = mlp.gate_proj.weight.clone()
    mlp.gate_proj.weight.copy_(mlp.up_proj.weight)
    mlp.up_proj.weight.copy_(gate)


def _coarse_cache(module: Any) -> None:
    """Keys and values in the cache have 2 bits."""

    def rounded(_: Any, inputs: Any, out: Tensor) -> Tensor:
        scale = out.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 1.5
        return ((out / scale - 0.5).round() + 0.5) * scale

    for number in range(4):
        for name in ("k_proj", "v_proj"):
            getattr(_layer(module, number).self_attn, name).register_forward_hook(rounded)
        if not hasattr(module, "model"):
            break


def _other_key_heads(module: Any) -> None:
    keys = _layer(module, 1).self_attn.k_proj.weight
    keys.copy_(keys.roll(_SIZE, 0))


def _other_weights(module: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    for weight in module.parameters():
        if weight.dim() == 2:
            weight.add_(0.5 * weight.std() * torch.randn(weight.shape, generator=generator))


def _wrong_layer(module: Any) -> None:
    fuse = module.fuse
    module.fuse = lambda hidden: fuse(hidden[..., [0, 0, 2], :])


def _late_features(module: Any) -> None:
    """A feature in a pass is that of the token before."""
    fuse = module.fuse

    def late(hidden: Tensor) -> Tensor:
        return fuse(torch.cat([hidden[:1], hidden[:-1]]) if hidden.dim() == 3 else hidden)

    module.fuse = late


def _positions(module: Any) -> None:
    """Drafted tokens are one position behind their own."""
    advance = module.advance

    def shifted(embeds: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any) -> Tensor:
        return advance(embeds, features, position_ids + 1 if embeds.shape[1] == 1 else position_ids, mask, cache)

    module.advance = shifted


def _swapped_heads(heads: Any) -> None:
    first, second = heads[1].state_dict(), heads[2].state_dict()
    first = {name: tensor.clone() for name, tensor in first.items()}
    heads[1].load_state_dict(second)
    heads[2].load_state_dict(first)


def _no_residual(heads: Any) -> None:
    for head in heads:
        head[0].register_forward_hook(lambda _, inputs, out: out - inputs[0])


def _permuted_output(heads: Any) -> None:
    for head in heads:
        head[-1].weight.copy_(head[-1].weight[_permuted(len(head[-1].weight), 0.15)])


class Mixed:
    """In a third of the steps, a row gets the draft of its neighbour."""

    def propose(self, sequences: Any, rng: Any) -> Any:
        draft = super().propose(sequences, rng)  # type: ignore[misc]
        self._step = getattr(self, "_step", 0) + 1
        if self._step % 3 or not draft.width or draft.q is not None:
            return draft
        return replace(draft, tokens=draft.tokens.roll(1, 0))


class Cut:
    """The drafter reads the end of the prompt only; what comes before is replaced by padding."""

    def start(self, row: int, prompt: Any, hidden: Any = None) -> None:
        cut = max(len(prompt) - _WINDOW, 0)
        if hidden is not None:
            hidden = hidden.clone()
            hidden[:cut] = 0
        super().start(row, [*[2] * cut, *list(prompt)[cut:]], hidden)  # type: ignore[misc]


def _doubled(prompt: list[int]) -> list[int]:
    return [*prompt[:5], *prompt, *prompt[-2:]]


_MODEL, _HEAD, _MEDUSA = "draft-model", "eagle3", "medusa"
FAULTS = (
    Fault("another base of the rotation", (_MODEL, _HEAD), changed(_other_rotation)),
    Fault("another tokenizer", (_MODEL, _HEAD), changed(_other_tokenizer)),
    Fault("the embedding is scaled by 1.5", (_MODEL,), changed(_scaled_embedding)),
    Fault("a layer is missing", (_MODEL,), changed(_missing_layer)),
    Fault("a norm is dropped", (_MODEL, _HEAD), changed(_dropped_norm)),
    Fault("attention is scaled twice", (_MODEL, _HEAD), changed(_attention_scale)),
    Fault("gate and up projection are swapped", (_MODEL, _HEAD), changed(_swapped_gate)),
    Fault("keys and values are cached in 2 bits", (_MODEL, _HEAD), changed(_coarse_cache)),
    Fault("heads of the keys are permuted", (_MODEL, _HEAD), changed(_other_key_heads)),
    Fault("weights of another training", (_MODEL, _HEAD, _MEDUSA), changed(_other_weights)),
    Fault("a layer of the target is read twice", (_HEAD,), changed(_wrong_layer)),
    Fault("features are one token late", (_HEAD,), changed(_late_features)),
    Fault("positions of drafted tokens are one too high", (_HEAD,), changed(_positions)),
    Fault("two heads are swapped", (_MEDUSA,), changed(_swapped_heads)),
    Fault("the residual of the heads is missing", (_MEDUSA,), changed(_no_residual)),
    Fault("rows of the output are permuted", (_MEDUSA,), changed(_permuted_output)),
    Fault("rows of the batch are mixed", (_MODEL, _HEAD, _MEDUSA), Mixed),
    Fault("the context is cut", (_MODEL, _HEAD), Cut),
    Fault("the chat template is doubled", (_MODEL,), prompt=_doubled),
    Fault("drafts are sampled at temperature 0.2", (_MODEL,), temperature=0.2),
)
