"""Slots of a GGUF model behind the `crossdraft.LM` protocol: token trees in llama.cpp's cache of keys and values.

A cell of the cache holds one token, and says which *sequences* it belongs to; a token attends over the cells of a
sequence of its own. So a tree is a set of sequences, one for each leaf, that share the cells of what they have in
common: nothing is copied where a tree branches, cells only get one more sequence. A node takes over its parent's
sequence if nobody has continued that one yet, otherwise it opens another. What is kept is a sequence, too: the one of
the last accepted node, which is cut behind it and holds the slot from then on; all other sequences of the slot are
removed.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossdraft import Fork, ModelError

from .library import GGUFModel, complaint, library

#: Most tokens that llama.cpp is fed in one call.
CHUNK = 256
_ROOT = -1


@dataclass
class _Node:
    """A speculative token: its place in the sequence, its parent among the nodes, and the sequence it was grown in."""

    token: int
    position: int
    parent: int
    sequence: int
    #: All sequences that its cell belongs to when it is fed.
    shared: list[int]


@dataclass
class _Slot:
    """A slot: the sequence that holds its committed tokens, and the nodes grown since.

    Attributes:
        tips: the last node of each sequence that belongs to the slot; `_ROOT` = no node yet.
    """

    main: int
    tokens: list[int] = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)
    tips: dict[int, int] = field(default_factory=dict)
    occupied: bool = False


class LlamaLM:
    """``batch_size`` slots of a GGUF model; see `crossdraft.LM` for the protocol.

    All slots lie in one cache of ``batch_size * max_length`` cells, whose keys and values have llama.cpp's default
    precision (float16). It computes on as many threads as PyTorch does. Free slots are not computed.

    Raises:
        ModelError: a context that llama.cpp cannot make.
    """

    def __init__(self, model: GGUFModel, batch_size: int, max_length: int):
        api = library()
        self.model, self.batch_size, self.max_length = model, batch_size, max_length
        self.vocab_size, self.context_length = model.vocab_size, model.context_length or None
        self.device = torch.device("cpu")
        self.passes = 0
        most = api.llama_max_parallel_sequences()
        if batch_size > most:
            raise ModelError(f"llama.cpp holds at most {most} sequences, not {batch_size}; take a smaller batch size")
        options = api.llama_context_default_params()
        # A context of fewer tokens than sequences would end the process.
        options.n_ctx = max(batch_size * max_length, most)
        options.n_batch = options.n_ubatch = max(CHUNK, most)
        options.n_seq_max = most
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        options.kv_unified = True  # sequences share cells
        options.swa_full = True  # what lies behind a sliding window comes back when tokens are taken back
        complaint()
        self._context = api.llama_init_from_model(model.handle, options)
        if not self._context:
            raise ModelError(
                f"llama.cpp cannot hold {batch_size} sequences of {max_length} tokens of {model.path}: {complaint()}"
            )
        weakref.finalize(self, api.llama_free, self._context)
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(CHUNK, 0, most)
        weakref.finalize(self, api.llama_batch_free, self._batch)
        self._free = list(range(most - 1, -1, -1))  # sequences that nobody uses, the next one last
        self._slots: list[_Slot] = []
        for _ in range(batch_size):
            main = self._free.pop()
            self._slots.append(_Slot(main, tips={main: _ROOT}))
        self._said: Tensor | None = None  # the logits of the last pass

    # -- protocol ---------------------------------------------------------------------------------------

    @property
    def lengths(self) -> list[int]:
        return [len(slot.tokens) for slot in self._slots]

    @property
    def hidden_layers(self) -> tuple[float, ...]:
        return ()

    @hidden_layers.setter
    def hidden_layers(self, layers: tuple[float, ...]) -> None:
        if layers:
            raise ModelError(
                "llama.cpp hands out no hidden states of its layers, which this drafter reads; take a drafter that "
                "needs none, or the model as a directory of transformers"
            )

    def start(self, row: int, prompt: Sequence[int]) -> Tensor | None:
        for slot in self._slots:  # an interrupted step may have left nodes
            self._drop(slot)
        slot = self._slots[row]
        self._empty(slot)
        slot.occupied = True
        self._commit(slot, [int(token) for token in prompt[:-1]])
        return None

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, resume_from: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        width = tokens.shape[1]
        above = [None] * self.batch_size if parents is None else parents.tolist()
        fed: list[tuple[_Node, int]] = []
        for row, (slot, ids) in enumerate(zip(self._slots, tokens.tolist(), strict=True)):
            if slot.occupied:
                self._add(slot, ids, above[row])
                fed += [(node, row * width + i) for i, node in enumerate(slot.nodes[len(slot.nodes) - width :])]
        logits = torch.zeros(self.batch_size * width, self.vocab_size)
        for start in range(0, len(fed), CHUNK):
            piece = fed[start : start + CHUNK]
            self._decode([node for node, _ in piece], scored=True)
            logits[[place for _, place in piece]] = self._logits(len(piece))
        self.passes += 1
        self._said = logits.view(self.batch_size, width, -1)
        return self._said, None

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        ways = None if path is None else path.tolist()
        for row, (slot, count) in enumerate(zip(self._slots, counts, strict=True)):
            if count:
                way = list(range(count)) if ways is None else ways[row][:count]
                last = slot.nodes[way[-1]]
                slot.tokens += [slot.nodes[i].token for i in way]
                slot.main = last.sequence
            self._drop(slot)

    def free(self, row: int) -> None:
        slot = self._slots[row]
        self._empty(slot)
        slot.occupied = False
        if self._said is not None and bool(self._said[row].isnan().any()):
            self._wipe()

    def fork(
        self,
        layers: Sequence[int],
        *,
        no_attention: Collection[int] = (),
        no_mlp: Collection[int] = (),
        embeddings: Tensor | None = None,
    ) -> Fork:
        if embeddings is not None:
            raise ModelError("llama.cpp is fed tokens, and this drafter feeds embeddings of its own to its target")
        raise ModelError("llama.cpp runs all layers of a model or none, and this drafter runs some of its target's")

    # -- internals --------------------------------------------------------------------------------------

    def _add(self, slot: _Slot, tokens: list[int], parents: list[int] | None) -> None:
        """Give new nodes their places and sequences; what they continue in the cache is shared with these."""
        first, committed = len(slot.nodes), len(slot.tokens)
        if committed + first + len(tokens) > self.max_length:
            raise ModelError(
                f"a sequence of {committed} tokens and {first + len(tokens)} drafted ones exceed max_length "
                f"{self.max_length}"
            )
        for i, token in enumerate(tokens):
            index = first + i
            parent = index - 1 if parents is None else parents[i]
            if not _ROOT <= parent < index:
                raise ModelError(f"node {index} of a tree has parent {parent}, which does not stand before it")
            at, sequence = (committed - 1, slot.main) if parent < 0 else _place(slot.nodes[parent])
            if slot.tips[sequence] != parent:  # somebody else continued it: a branch
                sequence = self._branch(slot, parent, first)
            slot.nodes.append(_Node(token, at + 1, parent, sequence, [sequence]))
            slot.tips[sequence] = index

    def _branch(self, slot: _Slot, parent: int, first: int) -> int:
        """A new sequence that holds everything up to node ``parent``; nodes from ``first`` on are yet to be fed."""
        if not self._free:
            raise ModelError(
                f"llama.cpp holds at most {library().llama_max_parallel_sequences()} sequences, and the trees of "
                f"{self.batch_size} slots have more branches; take a smaller batch size or narrower trees"
            )
        sequence = self._free.pop()
        slot.tips[sequence] = parent
        while parent >= first:
            slot.nodes[parent].shared.append(sequence)
            parent = slot.nodes[parent].parent
        at, source = (len(slot.tokens) - 1, slot.main) if parent < 0 else _place(slot.nodes[parent])
        if at >= 0:
            library().llama_memory_seq_cp(self._memory, source, sequence, 0, at + 1)
        return sequence

    def _drop(self, slot: _Slot) -> None:
        """Forget what is not committed; committed tokens are those of ``slot.main``."""
        if not slot.nodes and len(slot.tips) == 1:
            return
        api = library()
        for sequence in slot.tips:
            if sequence != slot.main:
                api.llama_memory_seq_rm(self._memory, sequence, -1, -1)
                self._free.append(sequence)
        api.llama_memory_seq_rm(self._memory, slot.main, len(slot.tokens), -1)
        slot.nodes, slot.tips = [], {slot.main: _ROOT}

    def _empty(self, slot: _Slot) -> None:
        slot.tokens = []
        self._drop(slot)
        library().llama_memory_seq_rm(self._memory, slot.main, -1, -1)

    def _commit(self, slot: _Slot, tokens: list[int]) -> None:
        """Feed ``tokens`` behind the committed ones."""
        for start in range(0, len(tokens), CHUNK):
            piece, at = tokens[start : start + CHUNK], len(slot.tokens)
            self._decode([_Node(t, at + i, _ROOT, slot.main, [slot.main]) for i, t in enumerate(piece)], scored=False)
            slot.tokens += piece

    def _wipe(self) -> None:
        """Zeros in all of the cache: a cell that nobody sees enters attention with weight 0, and 0 x NaN is NaN.

        llama.cpp clears all cells or none, so what the other slots hold is computed again.
        """
        library().llama_memory_clear(self._memory, True)
        self._said = None
        for slot in self._slots:
            held, slot.tokens = slot.tokens, []
            self._drop(slot)
            self._commit(slot, held)

    def _decode(self, nodes: list[_Node], *, scored: bool) -> None:
        """One call of llama.cpp for at most `CHUNK` nodes, parents before children."""
        batch = self._batch
        batch.n_tokens = len(nodes)
        for i, node in enumerate(nodes):
            batch.token[i], batch.pos[i], batch.logits[i] = node.token, node.position, scored
            batch.n_seq_id[i] = len(node.shared)
            for j, sequence in enumerate(node.shared):
                batch.seq_id[i][j] = sequence
        complaint()
        if code := library().llama_decode(self._context, batch):
            raise ModelError(f"llama.cpp could not compute {len(nodes)} tokens (code {code}): {complaint()}")

    def _logits(self, rows: int) -> Tensor:
        """``[rows, V]`` of the last call; its memory is llama.cpp's, and good until the next one."""
        found = library().llama_get_logits(self._context)
        return torch.from_numpy(np.ctypeslib.as_array(found, (rows, self.vocab_size)))


def _place(node: _Node) -> tuple[int, int]:
    return node.position, node.sequence
