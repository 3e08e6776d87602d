"""The protocol of a causal language model with one token tree per slot.

The target, draft models and the exact toy models of the certificate implement it; the decoder and the drafters
use nothing else of a model.

A slot holds *committed* tokens, with cached keys and values, and *speculative* nodes added since the last commit. The
last token of a sequence is not in the cache: it is the root that the next ``forward`` feeds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class LM(Protocol):
    """A causal LM with ``batch_size`` slots."""

    batch_size: int
    vocab_size: int
    device: torch.device
    #: Per slot, number of committed tokens in the cache, without speculative nodes.
    lengths: list[int]
    #: Forward passes so far, without prefill.
    passes: int
    #: Layers whose hidden states ``start`` and ``forward`` return, see `DraftTraits.hidden_layers`; may be set at
    #: any time.
    hidden_layers: tuple[float, ...]

    @property
    def context_length(self) -> int | None:
        """Maximum sequence length in tokens, or ``None`` if unbounded."""
        ...

    def start(self, row: int, prompt: Sequence[int]) -> Tensor | None:
        """Start a sequence in slot ``row``: feed all of ``prompt`` but its last token, and drop speculative nodes.

        Tokens that `prefill` fed are reused. Returns the hidden states ``[len(prompt) - 1, L, H]`` of
        ``hidden_layers``, or None if it is empty.
        """
        ...

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, resume_from: Fork | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Add speculative nodes and score them in one forward pass.

        Args:
            tokens: ``[B, W]`` int64.
            parents: ``[B, W]`` int64, index of each node's parent among the speculative nodes since the last
                ``commit`` (-1 = the last committed token); ``None`` = a chain that continues from the last
                speculative node. A tree may be built in multiple calls.
            resume_from: a fork of this model that was fed the first of these nodes, in this order, since the last
                ``commit``: its output of the shared first layers is reused. Passed only if its ``fed`` is not None.

        Returns:
            ``logits [B, W, V]`` of the token after each node, and their hidden states ``[B, W, L, H]`` or None.
        """
        ...

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        """Commit ``counts[b]`` speculative nodes of each row and drop the others.

        ``path [B, D]`` holds their indices, from the root down; ``None`` = the first ones in the order fed.
        """
        ...

    def free(self, row: int) -> None:
        """Clear slot ``row``, including NaN in its keys and values, so that later sequences do not attend over it."""
        ...

    def fork(
        self,
        layers: Sequence[int],
        *,
        no_attention: Collection[int] = (),
        no_mlp: Collection[int] = (),
        embeddings: Tensor | None = None,
    ) -> Fork:
        """A model over the same slots that runs only these ``layers``, in this order, then the model's head.

        For self-speculative drafters. A fork shares the model's weights and its keys and values of committed tokens,
        which it only reads; its own nodes are dropped when the model commits. ``start`` and ``commit`` of a fork
        compute nothing.

        Args:
            no_attention, no_mlp: layers that run without their attention, or without their feed-forward network; a
                skipped sublayer adds nothing to the residual stream.
            embeddings: ``[n, H]``, of n extra input tokens with the ids V, V + 1, ..; they are not part of the
                output. ``fed`` of such a fork is None.

        Raises:
            ModelError: an unknown layer, a model that does not support partial layers or input embeddings, or
                embeddings of another size.
        """
        ...


class Fork(LM, Protocol):
    """A subset of a model's layers over its slots, see `LM.fork`."""

    @property
    def fed(self) -> Tensor | None:
        """``[B, n]`` int64, the tokens fed since the model's last commit, for `Draft.resume_from`.

        ``None`` = no tokens, or the model cannot resume: the fork's first layers are not the model's first layers, it
        was fed a tree, or the model's logits change when it runs in two parts.
        """
        ...


@runtime_checkable
class Prefills(Protocol):
    """Optional method of an `LM`."""

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Feed the first tokens of prompts before their slots `start`, all rows in one pass.

        Args:
            prompts: by free row, the tokens to be in its cache, without the prompt's last token. More than one row:
                each starts from an empty cache; a single row continues after the tokens fed since it was freed.
        """
        ...


def prefill(lm: LM, prompts: Mapping[int, Sequence[int]]) -> bool:
    """Call `Prefills.prefill` if ``lm`` has it, and return True; otherwise return False: `LM.start` feeds prompts."""
    if not isinstance(lm, Prefills):
        return False
    lm.prefill(prompts)
    return True
