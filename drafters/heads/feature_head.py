"""Heads that are a decoder layer over pairs of token and feature: the module, and its slots.

A *pair* is the token at t + 1 and the feature at t: the target's own hidden state where the token before it is
committed, the head's own output where it is drafted. Pair t sits in slot t of the head's cache, at position t; a
constant shift of all positions is nothing to rotary embeddings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...framework.contracts.draft import on_device


@dataclass
class HeadOutput:
    """What a pass of a head gives.

    Attributes:
        logits: ``[B, W, Vd]`` of the token after each pair (fewer positions with ``logits_to_keep``).
        features: ``[B, W, H]``, what takes the target's place in the next pair.
    """

    logits: Tensor
    features: Tensor

    @property
    def hidden_states(self) -> tuple[Tensor]:
        return (self.features,)


class Head(nn.Module):
    """What every head is that has decoder layers of its own.

    Attributes:
        config: a transformers config of its decoder layers.
        embed_tokens: ``[V, H]``, frozen; the target's own tensor where the heads bring none.
        lm_head: ``[Vd, H]``; the same.
        target_ids: ``[Vd]`` int64, the target's id of each row of ``lm_head``; ``None`` where they are the same ids.
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


class FeatureHead(Head, ABC):
    """Base of the heads that draft token by token: they run over whole sequences or, with a cache, piece by piece."""

    def fuse(self, hidden: Tensor) -> Tensor:
        """``hidden [.., L, Ht]``, the target's hidden states of the L layers asked for -> features ``[.., H]``."""
        return hidden.to(self.dtype).flatten(-2)

    @abstractmethod
    def advance(self, embeds: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any) -> Tensor:
        """The decoder layers over pairs: ``embeds [B, W, H]`` and ``features [B, W, H]`` -> ``[B, W, H]``.

        ``mask``: what the layers take, or a dict of it by layer type; ``cache``: transformers' cache or ``None``.
        """

    def recurrent(self, out: Tensor) -> Tensor:
        """The feature ``[B, W, H]`` that is fed back, from the last layer's output."""
        return out

    def scored(self, out: Tensor) -> Tensor:
        """What ``lm_head`` reads, from the last layer's output."""
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
        """Score what follows each pair.

        Args:
            input_ids: ``[B, W]`` the tokens, each one position after its feature.
            features: ``[B, W, H]`` fused features of the target, or the head's own.
            attention_mask: additive ``[B, 1, W, keys]``; ``None`` = causal over the W pairs (then without a cache).
            position_ids: ``[B, W]``; 0, 1, .. by default.
            past_key_values: a transformers cache that the layers append to.
            logits_to_keep: the last so many positions, 0 = all; ``[B]`` or ``[B, n]`` = one or n positions of each row.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        mask = self._windows(input_ids.shape[1]) if attention_mask is None else attention_mask
        out = self.advance(self.embed_tokens(input_ids), features, position_ids, mask, past_key_values)
        if isinstance(logits_to_keep, Tensor):
            rows = torch.arange(len(out), device=out.device)[:, None]
            kept = out[rows, logits_to_keep.view(len(out), -1)]
        else:
            kept = out[:, -logits_to_keep:]
        return HeadOutput(self.lm_head(self.scored(kept)), self.recurrent(out))

    def _windows(self, width: int) -> dict[str, Tensor | None] | None:
        """Masks by layer type for W pairs without a cache, if there are sliding layers: those do not follow from W."""
        kinds = getattr(self.config, "layer_types", None) or ()
        if "sliding_attention" not in kinds or getattr(self.config, "use_sliding_window", True) is False:
            return None
        near = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        near &= near.triu(1 - self.config.sliding_window)
        mask = torch.zeros(width, width, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill(~near, torch.finfo(self.dtype).min)[None, None]
        return {"full_attention": None, "sliding_attention": mask}


class FeatureLM:
    """B slots of a head, used like an :class:`~crossdraft.framework.contracts.lm.LM` but counting pairs, not tokens.

    Drafted nodes take their parent's feature by themselves, so that trees grow as with any model.

    Args:
        lm: slots of the head, from `DraftContext.slots`.
        vocab_size: V, of the target.
    """

    def __init__(self, head: FeatureHead, lm: Any, vocab_size: int):
        self.head, self.vocab_size, self.batch_size = head, vocab_size, lm.batch_size
        self._lm = lm
        self._lm.hidden_layers = (-1,)
        # Heads name the length they were trained on; rotary positions go on beyond it, and the target's own context
        # bounds every sequence.
        self._lm.context_length = None
        self.device = self._lm.device

    @property
    def lengths(self) -> list[int]:
        return self._lm.lengths

    @property
    def passes(self) -> int:
        return self._lm.passes

    def start(self, row: int, tokens: Sequence[int], features: Tensor) -> None:
        """Slot ``row`` starts over with the pairs of all ``tokens`` but the last, ``features [len(tokens) - 1, H]``."""
        self._lm.start(row, tokens, features=features)

    def commit(self, tokens: Tensor, features: Tensor, counts: Sequence[int]) -> Tensor:
        """Feed and keep the first ``counts[b]`` pairs of each row; logits ``[B, V]`` after the last one.

        ``tokens [B, W]`` and ``features [B, W, H]`` are padded; the logits of a row without pairs mean nothing.
        """
        last = on_device(list(counts), self.device).clamp(min=1) - 1
        logits, hidden = self._lm.forward(tokens, features=features, logits_to_keep=last)
        assert hidden is not None
        self._lm.commit(counts)
        #: ``[B, 1 + grown, H]``: the feature after the last pair, then those of the nodes grown since.
        self._features = hidden[torch.arange(len(last), device=self.device), last]
        return widened(logits, self.head.target_ids, self.vocab_size)[:, 0]

    def forward(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Add drafted nodes, see :meth:`LM.forward`; returns logits ``[B, W, V]``. A chain grows one node at a time."""
        if parents is None:
            features = self._features[:, -1:]
        else:
            features = self._features.gather(1, (parents + 1)[..., None].expand(-1, -1, self._features.shape[2]))
        logits, hidden = self._lm.forward(tokens, parents, features=features)
        assert hidden is not None
        self._features = torch.cat([self._features, hidden[:, :, 0]], 1)
        return widened(logits, self.head.target_ids, self.vocab_size)

    def forget(self) -> None:
        """Drop all drafted nodes."""
        self._lm.commit([0] * self.batch_size)

    def free(self, row: int) -> None:
        self._lm.free(row)


def widened(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits ``[.., Vd]`` of a reduced vocabulary, ``ids [Vd]`` -> ``[.., V]``; ``ids`` None = they are whole.

    -inf elsewhere: q is 0 there, and [p - q]+ covers the rest.
    """
    if ids is None:
        return logits
    wide = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    wide[..., ids] = logits
    return wide
