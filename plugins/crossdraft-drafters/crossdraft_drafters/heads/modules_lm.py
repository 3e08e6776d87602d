"""Slots of several modules of multi-token prediction, each of which drafts the token of its position.

Row t of module k reads the token t + 1 + k and the state of module k - 1 at row t; module 0 reads the target's. So the
last k rows of module k hold drafted tokens: they are fed in each step, not committed, and fed again when their tokens
are known. Token k of a draft longer than the number of modules M is drafted by module k mod M, from the state of the
module before it, in a further row behind its own; its position is that of the token, as vLLM counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from crossdraft import DraftContext, on_device
from crossdraft.heads import expand_vocab


class ModulesLM:
    """B slots of M modules, used like `FeatureLM` for chains.

    Args:
        modules: the heads.
        lms: their slots, with room for ``2 * room`` more tokens.
        room: maximum number of rows that wait for a module and are fed in one pass.
    """

    def __init__(self, modules: Sequence[Any], lms: Sequence[Any], context: DraftContext, room: int):
        self.modules, self._lms, self._room = modules, lms, room
        self.vocab_size, self.batch_size, self.device = context.vocab_size, context.batch_size, context.device
        for lm in lms:
            lm.hidden_layers, lm.context_length = (-1,), None
        head = modules[0]
        self._no_states = torch.empty(0, head.embed_tokens.embedding_dim, dtype=head.dtype, device=self.device)
        #: Of each row: tokens fed to module 0; and by module, states of the module before it that it has not committed.
        self._tokens = [self._no_states[:, 0].long()] * self.batch_size
        self._waiting = [[self._no_states] * self.batch_size for _ in modules]
        self._clear()

    def _clear(self) -> None:
        """Forget the draft."""
        self._drafted: list[Tensor] = []  # [B, 1] each
        #: By module: nodes to commit and the last node, of each row; number of nodes.
        self._known = [[0] * self.batch_size for _ in self._lms]
        self._last = [[-1] * self.batch_size for _ in self._lms]
        self._nodes = [0] * len(self._lms)
        self._tails = [self._no_states] * self.batch_size  # the last module's states of rows with drafted tokens

    @property
    def lengths(self) -> list[int]:
        return self._lms[0].lengths

    @property
    def passes(self) -> int:
        return sum(lm.passes for lm in self._lms)

    def start(self, row: int, tokens: Sequence[int], features: Tensor) -> None:
        """See `FeatureLM.start`."""
        self._tokens[row] = on_device([list(tokens[:-1])], self.device)[0].long()
        states = features
        for k, lm in enumerate(self._lms):
            count = max(min(len(states), len(tokens) - k), 0)
            self._waiting[k][row] = states[count:]
            hidden = lm.start(row, [*tokens[k : k + count], 0] if count else [], features=states[:count])
            states = self._no_states if hidden is None else hidden[:, 0]

    def commit(self, tokens: Tensor, features: Tensor, counts: Sequence[int]) -> Tensor:
        """See `FeatureLM.commit`."""
        self._clear()
        last = on_device(list(counts), self.device).clamp(min=1) - 1
        logits, hidden = self._lms[0].forward(tokens, features=features, logits_to_keep=last)
        self._lms[0].commit(counts)
        for row, count in enumerate(counts):
            self._tokens[row] = torch.cat([self._tokens[row], tokens[row, :count]])
            self._wait(1, row, hidden[row, :count, 0])
        self._state = hidden[torch.arange(len(last), device=self.device), last, 0]
        return expand_vocab(logits, self.modules[0].target_ids, self.vocab_size)[:, 0]

    def forward(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Feed the next drafted token of each row, ``tokens [B, 1]``; return logits ``[B, 1, V]``."""
        self._drafted.append(tokens)
        depth, count = len(self._drafted), len(self._lms)
        k = depth % count
        logits = self._feed(k) if depth < count else self._feed_again(k, tokens, depth // count * (count - 1))
        return expand_vocab(logits, self.modules[k].target_ids, self.vocab_size)

    def forget(self) -> None:
        """Drop all rows with drafted tokens."""
        for lm, known, nodes in zip(self._lms, self._known, self._nodes, strict=True):
            if nodes:
                lm.commit(known)
        self._clear()

    def free(self, row: int) -> None:
        for lm, waiting in zip(self._lms, self._waiting, strict=True):
            lm.free(row)
            waiting[row] = self._no_states
        self._tokens[row] = self._tokens[row][:0]

    def _wait(self, k: int, row: int, states: Tensor) -> None:
        if k < len(self._lms):
            self._waiting[k][row] = torch.cat([self._waiting[k][row], states])

    def _feed(self, k: int) -> Tensor:
        """Feed module ``k`` all rows that wait for it and those with drafted tokens; return the last one's logits."""
        lm, waiting, tails = self._lms[k], self._waiting[k], list(self._tails)
        while max(map(len, waiting)) > self._room:  # after steps with short drafts
            counts = [max(min(len(states) - self._room, self._room), 0) for states in waiting]
            self._pass(k, [states[:n] for states, n in zip(waiting, counts, strict=True)], counts)
            lm.commit(counts)
        rows = [torch.cat([states, tail]) for states, tail in zip(waiting, tails, strict=True)]
        known = [max(len(text) - k - n, 0) for text, n in zip(self._tokens, lm.lengths, strict=True)]
        self._known[k] = [min(n, len(states)) for n, states in zip(known, rows, strict=True)]
        self._last[k] = [len(states) - 1 for states in rows]
        self._nodes[k] = max(1, *map(len, rows))
        return self._pass(k, rows, self._known[k])

    def _pass(self, k: int, rows: Sequence[Tensor], known: Sequence[int]) -> Tensor:
        """Feed the states ``rows`` to module ``k``, of which the first ``known`` are to be committed."""
        drafted = torch.cat(self._drafted, 1)
        texts = [torch.cat([text, more])[k:] for text, more in zip(self._tokens, drafted, strict=True)]
        tokens = [text[n : n + len(states)] for text, n, states in zip(texts, self._lms[k].lengths, rows, strict=True)]
        if not max(map(len, rows)):  # no row has a pair
            tokens, rows = [text.new_zeros(1) for text in texts], [self._state[:1]] * self.batch_size
        last = on_device([max(len(states) - 1, 0) for states in rows], self.device)
        logits, hidden = self._lms[k].forward(
            pad_sequence(tokens, batch_first=True),
            features=pad_sequence(list(rows), batch_first=True),
            logits_to_keep=last,
        )
        for row, (states, count) in enumerate(zip(rows, known, strict=True)):
            self._wait(k + 1, row, hidden[row, :count, 0])
            self._waiting[k][row] = self._waiting[k][row][count:]
            self._tails[row] = hidden[row, count : len(states), 0]
        self._state = hidden[torch.arange(len(last), device=self.device), last, 0]
        return logits

    def _feed_again(self, k: int, tokens: Tensor, offset: int) -> Tensor:
        """Feed module ``k`` one row behind its own, at the position ``offset`` behind its index."""
        logits, hidden = self._lms[k].forward(
            tokens,
            on_device(self._last[k], self.device)[:, None],
            features=self._state[:, None],
            offset=torch.full_like(tokens, offset),
        )
        self._last[k] = [self._nodes[k]] * self.batch_size
        self._nodes[k] += 1
        self._state = hidden[:, 0, 0]
        return logits
