"""Draft models whose logits are masked by the constraints of their sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..contracts.constraint import Matcher, RowConstraints, permitted_next, walk
from ..contracts.lm import LM, prefill
from ..util.tensors import parent_lists, start_host_copy
from .constraints import mask_logits, no_bits, pack


class ConstrainedLM:
    """A draft model that is masked in rows whose constraint has ``mask_drafts``.

    The matchers follow the tokens fed to the draft model, which may be behind those of the decoder. A pass waits for
    the device once, for its own tokens; the device computes it meanwhile.
    """

    def __init__(self, lm: LM, constraints: RowConstraints):
        self._lm, self._constraints = lm, constraints
        self._matchers: dict[int, _AfterRoot] = {}
        self._tokens: list[list[int]] = [[] for _ in range(lm.batch_size)]
        self._parents: list[list[int]] = [[] for _ in range(lm.batch_size)]
        #: Counts and path of the last `commit`, which the next pass or `start` reads.
        self._committed: tuple[Sequence[int], Callable[[], Any] | None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def start(self, row: int, prompt: Sequence[int]) -> Tensor | None:
        hidden = self._lm.start(row, prompt)
        self._advance()
        self._clear_nodes()  # of an interrupted step
        grammar = self._constraints.grammar(row)
        self._matchers.pop(row, None)
        if grammar is not None and grammar.mask_drafts:
            self._matchers[row] = _AfterRoot(grammar.matcher())
        return hidden

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        prefill(self._lm, prompts)

    def forward(self, tokens: Tensor, parents: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        copy = None
        if self._matchers:
            copy = start_host_copy(tokens[None] if parents is None else torch.stack([tokens, parents]))
        logits, hidden = self._lm.forward(tokens, parents)
        if copy is None:
            return logits, hidden
        new, *links = copy()
        self._advance()
        first, width = len(self._tokens[0]), tokens.shape[1]
        added = links[0] if links else parent_lists(None, len(new), first, width)
        bits = no_bits(len(new), width, logits.shape[-1])
        for row, nodes in enumerate(self._tokens):
            nodes += new[row]
            self._parents[row] += added[row]
        for row, matcher in self._matchers.items():
            eos, nodes = self._constraints.eos(row), self._tokens[row]
            for node in walk(matcher, eos, nodes, self._parents[row], [True] * len(nodes)):
                if node >= first and (following := permitted_next(matcher, eos)).any():
                    bits[row, node - first] = pack(~following)
        return mask_logits(logits, bits), hidden

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        self._lm.commit(counts, path)
        self._advance()
        self._committed = list(counts), None if path is None or not self._matchers else start_host_copy(path)

    def free(self, row: int) -> None:
        self._lm.free(row)
        self._matchers.pop(row, None)

    def _advance(self) -> None:
        """Advance the matchers over the committed nodes, and drop all nodes."""
        if self._committed is None:
            return
        (counts, copy), self._committed = self._committed, None
        paths = None if copy is None else copy()
        for row, matcher in list(self._matchers.items()):
            nodes = range(counts[row]) if paths is None else paths[row][: counts[row]]
            if not all(matcher.advance(self._tokens[row][node]) for node in nodes):
                del self._matchers[row]  # the sequence has ended
        self._clear_nodes()

    def _clear_nodes(self) -> None:
        for nodes in (*self._tokens, *self._parents):
            nodes.clear()


class _AfterRoot:
    """A matcher whose first token is the last one of the prompt, which the grammar does not read."""

    def __init__(self, matcher: Matcher):
        self._matcher, self._count = matcher, 0

    @property
    def accepting(self) -> bool:
        return self._matcher.accepting

    @property
    def failure(self) -> str | None:
        return self._matcher.failure

    def advance(self, token: int) -> bool:
        if self._count and not self._matcher.advance(token):
            return False
        self._count += 1
        return True

    def rollback(self, count: int) -> None:
        rest = self._count - count
        self._matcher.rollback(max(self._count - 1, 0) - max(rest - 1, 0))
        self._count = rest

    def permitted(self) -> np.ndarray:
        return self._matcher.permitted()

    def implied(self, limit: int) -> list[int]:
        return self._matcher.implied(limit)


def masked(lm: LM, constraints: RowConstraints | None, mask_drafts: bool) -> LM:
    """``lm``, masked if a run has constraints with ``mask_drafts``."""
    return cast(LM, ConstrainedLM(lm, constraints)) if mask_drafts and constraints is not None else lm
