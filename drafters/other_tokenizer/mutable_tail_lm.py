"""Slots of a draft model whose newest tokens may still change, because text that goes on is encoded anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...framework.contracts.draft import on_device
from ...framework.contracts.lm import LM


class Follower:
    """B slots that follow sequences of their model's own tokens.

    Only tokens that will never change are committed. The others are fed as speculative nodes, before what is drafted;
    once the step is over, nodes that turned out to be tokens of the text are kept.

    Args:
        lm: slots of the draft model, in its own ids.
    """

    def __init__(self, lm: LM):
        self.lm = lm
        self._fed = 0  # nodes of every row since the last `keep`
        self._feed: list[list[int]] = []  # of each row: the tokens that were fed by `root`
        self._width, self._even = 0, True

    def start(self, row: int, ids: list[int], settled: int) -> None:
        """Slot ``row`` starts over with ``ids``, of which the first ``settled`` will never change."""
        self._fed = 0
        self.lm.start(row, ids[: min(settled, len(ids) - 1) + 1])

    def root(self, sequences: Sequence[list[int]], device: torch.device) -> Tensor:
        """Feed what is not committed of each sequence; logits ``[B, V]`` after its last token.

        ``sequences``: token ids, empty for a free slot, whose logits mean nothing.
        """
        self._feed = [ids[held:] for ids, held in zip(sequences, self.lm.lengths, strict=True)]
        counts = [len(ids) for ids in self._feed]
        self._fed = self._width = max(counts)
        self._even = all(n in (0, self._width) for n in counts)
        logits = self.lm.forward(on_device([ids + [0] * (self._width - len(ids)) for ids in self._feed], device))[0]
        if self._even:
            return logits[:, -1]
        self._last = on_device([max(n - 1, 0) for n in counts], device)
        return logits[torch.arange(len(counts), device=device), self._last]

    def forward(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens [B, 1]`` behind what was fed before; logits ``[B, 1, V]`` after them."""
        parents = None
        if not self._even:  # a row's first drafted node follows its own last token, not the padding
            before = self._last[:, None]
            parents = before if self._fed == self._width else torch.full_like(before, self._fed - 1)
        self._fed += 1
        return self.lm.forward(tokens, parents)[0]

    def commit(self, sequences: Sequence[tuple[list[int], int]], drafted: Sequence[list[int]]) -> None:
        """The step is over: commit what was fed and stands in the text, and drop the rest.

        Args:
            sequences: tokens of every row and how many of them will never change; as of now.
            drafted: of each row, the tokens of the nodes that `forward` was fed, as far as they are known.
        """
        if not self._fed:
            return
        counts, path = [], []
        for (ids, settled), held, feed, own in zip(sequences, self.lm.lengths, self._feed, drafted, strict=True):
            nodes = [*range(len(feed)), *range(self._width, self._fed)]
            # The last token is never committed: it is the root that the next step feeds.
            most = min(settled, len(ids) - 1) - held
            n = 0
            for token in [*feed, *own][: len(nodes)]:
                if n >= most or token != ids[held + n]:
                    break
                n += 1
            counts.append(n)
            path.append(nodes[:n])
        self._fed, width = 0, max(counts)
        if self._even or not width:
            self.lm.commit(counts)
            return
        padded = [nodes + [-1] * (width - len(nodes)) for nodes in path]
        self.lm.commit(counts, on_device(padded, self._last.device))
