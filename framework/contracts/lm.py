"""The protocol of a causal language model that grows and prunes token trees, one per slot.

The target, the small-LM drafter and the exact toy models of the certificate all stand behind it; the decode
loop and the drafters know nothing else about a model.

A slot holds *committed* tokens, whose keys and values are kept, and *speculative* nodes grown since. The last
token of a sequence is never in the model yet: it is the root that the next ``forward`` feeds.
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
    #: Per slot, committed tokens held (keys and values), not counting speculative nodes.
    lengths: list[int]
    #: Forward passes made so far, prefill not counted.
    passes: int
    #: Layers whose hidden states ``start`` and ``forward`` return, see `DraftTraits.hidden_layers`; may be set at
    #: any time.
    hidden_layers: tuple[float, ...]

    @property
    def context_length(self) -> int | None:
        """Longest sequence the model can attend over, or ``None`` if unbounded."""
        ...

    def start(self, row: int, prompt: Sequence[int]) -> Tensor | None:
        """Slot ``row`` starts over with all of ``prompt`` but its last token; nodes that were not kept are dropped.

        What `prefill` fed of them is there already. Returns the hidden states ``[len(prompt) - 1, L, H]`` of the layers
        asked for, if any were.
        """
        ...

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, resume_from: Fork | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Add speculative nodes and score them in one forward pass.

        Args:
            tokens: ``[B, W]`` int64.
            parents: ``[B, W]`` int64, index of each node's parent among the speculative nodes grown since
                the last ``keep`` (-1 = the last committed token); ``None`` = a chain that continues from the
                last speculative node. One tree may be grown in several calls.
            begun: a fork of this model that was fed the first of these nodes, in this order, since the last ``keep``:
                what it computed in the model's own first layers is taken up, and not computed again. Handed over only
                if its ``fed`` is not None.

        Returns:
            ``logits [B, W, V]`` of the token after each node, and their hidden states ``[B, W, L, H]`` or None.
        """
        ...

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        """Commit ``counts[b]`` speculative nodes of each row and drop the others.

        ``path [B, D]`` names them, root side first; ``None`` = the first ones in the order grown.
        """
        ...

    def free(self, row: int) -> None:
        """Forget slot ``row``, NaN in its keys and values too: what comes next must not attend over it."""
        ...

    def fork(
        self,
        layers: Sequence[int],
        *,
        no_attention: Collection[int] = (),
        no_mlp: Collection[int] = (),
        embeddings: Tensor | None = None,
    ) -> Fork:
        """The same slots of a model that runs only these ``layers``, in this order, and then the model's own head.

        For drafters that are part of their target: weights are shared, and so are keys and values. A fork attends over
        what the model itself computed for committed tokens in those layers; it never changes them, and forgets its own
        nodes when the model keeps its. ``start`` and ``keep`` of a fork compute nothing.

        Args:
            no_attention, no_mlp: of those layers, the ones that run without their attention, or without their
                feed-forward network: what is left out adds nothing to the residual stream.
            embeddings: ``[n, H]``, of n tokens that the fork knows beside the model's own, with the ids V, V + 1, ..:
                ``forward`` takes them, and nothing is ever said of them. Such a fork is never `fed`.

        Raises:
            ModelError: a layer that there is not, a model that cannot run some of its layers, or parts of them, or that
                takes no embeddings, or embeddings of another size.
        """
        ...


class Fork(LM, Protocol):
    """Some layers of a model over the slots of the whole one, see `LM.fork`."""

    @property
    def fed(self) -> Tensor | None:
        """``[B, n]`` int64, the tokens that it was fed since the model last kept, for `Draft.begun`.

        ``None`` = none, or nothing that the model could take up: the fork's first layers are not the model's own, it
        grew a tree, or the model says something else when it is run in two parts.
        """
        ...


@runtime_checkable
class Prefills(Protocol):
    """Optional method of an `LM`."""

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Feed the first tokens of prompts whose slots `start` soon: those of several slots in one pass.

        Args:
            prompts: by row, which is free until it begins, what it is to hold, never the prompt's last token. Several
                rows start anew; one alone goes on behind what it was fed since it was retired.
        """
        ...


def prefill(lm: LM, prompts: Mapping[int, Sequence[int]]) -> bool:
    """`Prefills.prefill`, if ``lm`` has it; otherwise `LM.start` will feed all of each prompt, and this says False."""
    if not isinstance(lm, Prefills):
        return False
    lm.prefill(prompts)
    return True
