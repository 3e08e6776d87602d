"""Heads made of decoder layers over pairs of token and feature: the module, and its slots.

A *pair* is the token at t + 1 and the feature at t: the target's hidden state if token t is committed, the head's own
output if it is drafted. Pair t has index t in the head's cache, and position t; rotary embeddings are invariant to the
constant shift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...framework.contracts.draft import on_device
from ...framework.util.cache_argument import cache_argument


@dataclass
class HeadOutput:
    """Output of a head's forward pass.

    Attributes:
        logits: ``[B, W, Vd]`` after each pair (fewer positions with ``logits_to_keep``).
        features: ``[B, W, H]``, the features of the next pairs of drafted tokens.
    """

    logits: Tensor
    features: Tensor

    @property
    def hidden_states(self) -> tuple[Tensor]:
        return (self.features,)


class HeadModule(nn.Module):
    """Base of the heads with decoder layers of their own.

    Attributes:
        config: transformers config of the decoder layers.
        embed_tokens: ``[V, H]``, frozen; the target's tensor if the checkpoint has none.
        lm_head: ``[Vd, H]``; the same.
        target_ids: ``[Vd]`` int64, the target's id of each row of ``lm_head``; ``None`` = identical ids.
    """

    config: Any
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    target_ids: Tensor | None

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


class FeatureHead(HeadModule):
    """Base of the heads that draft token by token; they run over whole sequences or, with a cache, incrementally."""

    layers: nn.ModuleList
    rotary_emb: nn.Module

    def fuse(self, hidden: Tensor) -> Tensor:
        """Compute features ``[.., H]`` from ``hidden [.., L, Ht]``, the target's hidden states of L layers."""
        return hidden.to(self.dtype).flatten(-2)

    def pairs(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Compute the input of the first layer from ``embeds [B, W, H]`` and ``features [B, W, H]``."""
        return torch.cat([embeds, features], -1)

    def advance(self, embeds: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any) -> Tensor:
        """Run the decoder layers on pairs of ``embeds [B, W, H]`` and ``features [B, W, H]``; return ``[B, W, H]``.

        Args:
            mask: attention mask of the layers, or a dict of masks by layer type.
            cache: a transformers cache, or ``None``.
        """
        rotary, out = self.rotary_emb(embeds, position_ids), self.pairs(embeds, features)
        for i, layer in enumerate(self.layers):
            options: dict[str, Any] = {cache_argument(layer.forward): cache, "position_ids": position_ids}
            own = mask[self.config.layer_types[i]] if isinstance(mask, Mapping) else mask
            out = layer(out, attention_mask=own, position_embeddings=rotary, **options)
        return out

    def recurrent(self, out: Tensor) -> Tensor:
        """Compute the features ``[B, W, H]`` to feed back from the last layer's output."""
        return out

    def head_input(self, out: Tensor) -> Tensor:
        """Compute the input of ``lm_head`` from the last layer's output."""
        return out

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        attention_mask: Tensor | Mapping[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> HeadOutput:
        """Compute logits of the token after each pair.

        Args:
            input_ids: ``[B, W]`` tokens, each one position after its feature.
            features: ``[B, W, H]`` fused features of the target, or the head's own.
            attention_mask: additive ``[B, 1, W, keys]``; ``None`` = causal over the W pairs (then without a cache).
            position_ids: ``[B, W]``; 0, 1, .. by default.
            past_key_values: a transformers cache that the layers append to.
            logits_to_keep: number of last positions, 0 = all; ``[B]`` or ``[B, n]`` = one or n positions of each row.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        mask = self._sliding_masks(input_ids.shape[1]) if attention_mask is None else attention_mask
        out = self.advance(self.embed_tokens(input_ids), features, position_ids, mask, past_key_values)
        if isinstance(logits_to_keep, Tensor):
            rows = torch.arange(len(out), device=out.device)[:, None]
            kept = out[rows, logits_to_keep.view(len(out), -1)]
        else:
            kept = out[:, -logits_to_keep:]
        return HeadOutput(self.lm_head(self.head_input(kept)), self.recurrent(out))

    def _sliding_masks(self, width: int) -> dict[str, Tensor | None] | None:
        """Masks by layer type for W pairs without a cache; ``None`` without sliding layers."""
        kinds = getattr(self.config, "layer_types", None) or ()
        if "sliding_attention" not in kinds or getattr(self.config, "use_sliding_window", True) is False:
            return None
        window = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        window &= window.triu(1 - self.config.sliding_window)
        mask = torch.zeros(width, width, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill(~window, torch.finfo(self.dtype).min)[None, None]
        return {"full_attention": None, "sliding_attention": mask}


class FeatureLM:
    """B slots of a head, used like an :class:`~crossdraft.framework.contracts.lm.LM` but counting pairs, not tokens.

    `forward` feeds each drafted node its parent's feature, so chains and trees are drafted as with any model.

    Args:
        lm: slots of the head, from `DraftContext.slots`.
        vocab_size: V, of the target.
    """

    def __init__(self, head: FeatureHead, lm: Any, vocab_size: int):
        self.head, self.vocab_size, self.batch_size = head, vocab_size, lm.batch_size
        self._lm = lm
        self._lm.hidden_layers = (-1,)
        # A head's context length is its training length, which rotary positions may exceed; the target's context
        # length bounds every sequence.
        self._lm.context_length = None
        self.device = self._lm.device

    @property
    def lengths(self) -> list[int]:
        return self._lm.lengths

    @property
    def passes(self) -> int:
        return self._lm.passes

    def start(self, row: int, tokens: Sequence[int], features: Tensor) -> None:
        """Start slot ``row`` with the pairs of all ``tokens`` except the last, ``features [len(tokens) - 1, H]``."""
        self._lm.start(row, tokens, features=features)

    def commit(self, tokens: Tensor, features: Tensor, counts: Sequence[int]) -> Tensor:
        """Feed and commit the first ``counts[b]`` pairs of each row; return logits ``[B, V]`` after the last one.

        ``tokens [B, W]`` and ``features [B, W, H]`` are padded; the logits of a row without pairs are meaningless.
        """
        last = on_device(list(counts), self.device).clamp(min=1) - 1
        logits, hidden = self._lm.forward(tokens, features=features, logits_to_keep=last)
        assert hidden is not None
        self._lm.commit(counts)
        #: ``[B, 1 + n, H]``: the feature after the last pair, then those of the n nodes drafted since.
        self._features = hidden[torch.arange(len(last), device=self.device), last]
        return expand_vocab(logits, self.head.target_ids, self.vocab_size)[:, 0]

    def forward(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Feed drafted nodes, see :meth:`LM.forward`; return logits ``[B, W, V]``. Without parents, W = 1."""
        if parents is None:
            features = self._features[:, -1:]
        else:
            features = self._features.gather(1, (parents + 1)[..., None].expand(-1, -1, self._features.shape[2]))
        logits, hidden = self._lm.forward(tokens, parents, features=features)
        assert hidden is not None
        self._features = torch.cat([self._features, hidden[:, :, 0]], 1)
        return expand_vocab(logits, self.head.target_ids, self.vocab_size)

    def forget(self) -> None:
        """Drop all drafted nodes."""
        self._lm.commit([0] * self.batch_size)

    def free(self, row: int) -> None:
        self._lm.free(row)


def expand_vocab(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Expand logits ``[.., Vd]`` of the reduced vocabulary ``ids [Vd]`` to ``[.., V]``; ``ids`` None = not reduced.

    Other tokens get -inf: q is 0 there, and the residual [p - q]+ covers them.
    """
    if ids is None:
        return logits
    expanded = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    expanded[..., ids] = logits
    return expanded
