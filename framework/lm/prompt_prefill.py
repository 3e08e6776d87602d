"""Prefill: prompts are fed to the cache one row in chunks, or several rows in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..util.tensors import on_device
from .forward_pass import ForwardPass
from .kv_cache import WritePlan

#: Most prompt tokens of a row in one pass: bounds the memory of the mask.
PREFILL_CHUNK = 1024


@dataclass
class PrefilledPrompt:
    """The prompt tokens that a row holds before its sequence starts.

    Attributes:
        layers: layers whose hidden states were requested.
        tokens: the tokens in the cache.
        hidden: hidden states, ``[n, L, H]`` for each pass.
    """

    layers: tuple[float, ...]
    tokens: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


class PromptPrefill:
    """Feeds prompts into the cache and tracks what each row already holds.

    Methods write the new length of a row to ``lengths`` after every pass, so an interrupted prefill stays consistent.
    """

    def __init__(self, forward_pass: ForwardPass):
        self._pass = forward_pass
        self._prompts: dict[int, PrefilledPrompt] = {}

    def feed(
        self,
        row: int,
        tokens: list[int],
        lengths: list[int],
        layers: tuple[float, ...],
        inputs: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Feed the part of ``tokens`` that ``row`` does not hold yet, one pass per chunk.

        Args:
            inputs: further inputs of the model by name, ``[len(tokens), ..]`` each; the whole prompt is fed again.
        """
        inputs, slots = inputs or {}, self._pass.masks.slots
        prompt = self._prompts.get(row)
        if prompt is None or inputs or prompt.layers != layers or prompt.tokens != tokens[: len(prompt.tokens)]:
            prompt = self._prompts[row] = PrefilledPrompt(layers)
        lengths[row] = len(prompt.tokens)
        self._pass.cache.reserve(row, len(tokens))
        ids = on_device([tokens], self._pass.dims.device)
        for start in range(len(prompt.tokens), len(tokens), PREFILL_CHUNK):
            chunk = ids[:, start : start + PREFILL_CHUNK]
            end = start + chunk.shape[1]
            plan = WritePlan(slots[None, start:end], end, start, row)
            visibility = self._pass.masks.causal(plan.slots, end)
            chunk_inputs = {name: value[None, start:end] for name, value in inputs.items()}
            _, hidden = self._pass.run(chunk, plan, visibility, chunk_inputs, layers, want_logits=False)
            if hidden is not None:
                prompt.hidden.append(hidden[0])
            prompt.tokens = tokens[:end]
            lengths[row] = end

    def feed_batch(self, prompts: Mapping[int, list[int]], lengths: list[int], layers: tuple[float, ...]) -> None:
        """Feed the prompts of several rows from their first token on, in one pass as wide as the longest."""
        if not prompts:
            return
        device, width = self._pass.dims.device, max(map(len, prompts.values()))
        for row in prompts:
            self._pass.cache.reserve(row, width)
        # Padding repeats the last token of its own row, so it is NaN only if the row is; nothing attends to it.
        padded = [[*tokens, *tokens[-1:] * (width - len(tokens))] for tokens in prompts.values()]
        ids, rows = on_device(padded, device), on_device(list(prompts), device)
        counts = {row: len(tokens) for row, tokens in prompts.items()}
        plan = WritePlan(self._pass.masks.slots[None, :width], width, 0, rows=rows, counts=counts)
        visibility = self._pass.masks.causal(plan.slots, width).expand(len(prompts))
        _, hidden = self._pass.run(ids, plan, visibility, {}, layers, want_logits=False)
        for i, (row, tokens) in enumerate(prompts.items()):
            states = [] if hidden is None else [hidden[i, : len(tokens)]]
            self._prompts[row] = PrefilledPrompt(layers, tokens, states)
            lengths[row] = len(tokens)

    def pop_hidden(self, row: int) -> Tensor | None:
        """Return the hidden states ``[n, L, H]`` of the prompt of ``row``, and forget the prompt."""
        hidden = self._prompts.pop(row).hidden
        return torch.cat(hidden) if hidden else None

    def forget(self, row: int) -> None:
        self._prompts.pop(row, None)
