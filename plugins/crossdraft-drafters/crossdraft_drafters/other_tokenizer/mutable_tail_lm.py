"""Slots of a draft model whose last tokens may change, because the end of the text is retokenized as it grows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crossdraft import LM, on_device


class MutableTailLM:
    """B slots that follow sequences in the draft model's own tokens.

    Only final tokens are committed. The others are fed as speculative nodes before the drafted ones; after the step,
    nodes that became tokens of the text are committed.

    Args:
        lm: slots of the draft model, in its own ids.
    """

    def __init__(self, lm: LM):
        self.lm = lm
        self._fed = 0  # nodes fed to every row since the last `commit`
        self._feed: list[list[int]] = []  # tokens of each row fed by `root`
        self._width, self._even = 0, True

    def start(self, row: int, ids: list[int], settled: int) -> None:
        """Start slot ``row`` with ``ids``, of which the first ``settled`` are final."""
        self._fed = 0
        self.lm.start(row, ids[: min(settled, len(ids) - 1) + 1])

    def root(self, sequences: Sequence[list[int]], device: torch.device) -> Tensor:
        """Feed the tokens of each sequence that are not committed; return logits ``[B, V]`` after the last one.

        ``sequences``: token ids, empty for a free slot, whose logits are meaningless.
        """
        self._feed = [ids[length:] for ids, length in zip(sequences, self.lm.lengths, strict=True)]
        counts = [len(ids) for ids in self._feed]
        self._fed = self._width = max(counts)
        self._even = all(n in (0, self._width) for n in counts)
        logits = self.lm.forward(on_device([ids + [0] * (self._width - len(ids)) for ids in self._feed], device))[0]
        if self._even:
            return logits[:, -1]
        self._last = on_device([max(n - 1, 0) for n in counts], device)
        return logits[torch.arange(len(counts), device=device), self._last]

    def forward(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens [B, 1]`` after the previous ones; return logits ``[B, 1, V]``."""
        parents = None
        if not self._even:  # a row's first drafted node follows its own last token, not the padding
            last = self._last[:, None]
            parents = last if self._fed == self._width else torch.full_like(last, self._fed - 1)
        self._fed += 1
        return self.lm.forward(tokens, parents)[0]

    def commit(self, sequences: Sequence[tuple[list[int], int]], drafted: Sequence[list[int]]) -> None:
        """Commit the fed nodes that are tokens of the text, and drop the others.

        Args:
            sequences: current tokens of every row, and the number of final ones.
            drafted: tokens of the nodes fed by `forward`, per row; may be shorter.
        """
        if not self._fed:
            return
        counts, path = [], []
        for (ids, settled), length, feed, own in zip(sequences, self.lm.lengths, self._feed, drafted, strict=True):
            nodes = [*range(len(feed)), *range(self._width, self._fed)]
            # The last token is not committed: it is the root of the next step.
            limit = min(settled, len(ids) - 1) - length
            n = 0
            for token in [*feed, *own][: len(nodes)]:
                if n >= limit or token != ids[length + n]:
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
