"""Faults of a draft model's server that no reading of `crossdraft diagnose` describes; used by `diagnose_matching`.

A fault is built into the drafter: a change of its model, or of what it drafts. Constants of the diagnosis were chosen
without those that are held out.
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
    """A fault: its name, the base class that builds it in, and the change of the prompts by such a server."""

    name: str
    mixin: type = object
    prompt: Callable[[list[int]], list[int]] | None = None
    held_out: bool = False

    def drafter(self, cls: type) -> type:
        """The drafter with the fault."""
        return cls if self.mixin is object else type(cls.__name__, (self.mixin, cls), {})


def changed(change: Callable[[Any], Any]) -> type:
    """A base class whose instances apply ``change`` to their model."""

    class Changed:
        def __init__(self, config: Any, context: Any):
            super().__init__(config, context)  # type: ignore[call-arg]
            with torch.no_grad():
                change(self.context.load_model(self.config.model).model)  # type: ignore[attr-defined]

    return Changed


def _permuted(rows: int, share: float) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randperm(rows, generator=generator)[: int(share * rows)]
    order = torch.arange(rows)
    order[chosen] = chosen.roll(1)
    return order


def _other_tokenizer(model: Any) -> None:
    table = model.get_input_embeddings().weight
    table.copy_(table[_permuted(len(table), 0.15)])


def _missing_layer(model: Any) -> None:
    layer = model.model.layers[2]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


def _dropped_norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.register_forward_hook(lambda _, inputs, out: inputs[0])


def _attention_scale(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(_SIZE**-0.5)


def _swapped_gate(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    gate = mlp.gate_proj.weight.clone()
    mlp.gate_proj.weight.copy_(mlp.up_proj.weight)
    mlp.up_proj.weight.copy_(gate)


def _coarse_cache(model: Any) -> None:
    """Keys and values in the cache have 2 bits."""

    def rounded(_: Any, inputs: Any, out: Tensor) -> Tensor:
        scale = out.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 1.5
        return ((out / scale - 0.5).round() + 0.5) * scale

    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.register_forward_hook(rounded)


def _other_key_heads(model: Any) -> None:
    keys = model.model.layers[1].self_attn.k_proj.weight
    keys.copy_(keys.roll(_SIZE, 0))


def _other_weights(model: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.add_(0.5 * weight.std() * torch.randn(weight.shape, generator=generator))


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
        super().start(row, [*[2] * cut, *list(prompt)[cut:]], hidden)  # type: ignore[misc]


def _doubled(prompt: list[int]) -> list[int]:
    return [*prompt[:5], *prompt, *prompt[-2:]]


FAULTS = (
    Fault("another base of the rotation", changed(lambda lm: lm.model.rotary_emb.inv_freq.pow_(0.25)), held_out=True),
    Fault("another tokenizer", changed(_other_tokenizer)),
    Fault("the embedding is scaled by 1.5", changed(lambda lm: lm.get_input_embeddings().weight.mul_(1.5))),
    Fault("a layer is missing", changed(_missing_layer)),
    Fault("a norm is dropped", changed(_dropped_norm)),
    Fault("attention is scaled twice", changed(_attention_scale), held_out=True),
    Fault("gate and up projection are swapped", changed(_swapped_gate)),
    Fault("keys and values are cached in 2 bits", changed(_coarse_cache)),
    Fault("heads of the keys are permuted", changed(_other_key_heads), held_out=True),
    Fault("weights of another training", changed(_other_weights), held_out=True),
    Fault("rows of the batch are mixed", Mixed),
    Fault("the context is cut", Cut, held_out=True),
    Fault("the chat template is doubled", prompt=_doubled),
)
