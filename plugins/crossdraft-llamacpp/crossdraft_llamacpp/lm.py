"""`crossdraft.LM` for GGUF models: token trees in llama.cpp's KV cache.

A cell of the cache holds one token and the set of its *sequences*; a token attends to the cells of its own sequences. A
tree is a set of sequences, one per leaf, that share the cells of common prefixes: a branch copies nothing, it adds a
sequence to the cells. A node continues its parent's sequence if no other node has, else it opens a new one. `commit`
keeps the sequence of the last accepted node, cut after it, and removes all other sequences of the slot.
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

from .library import GGUFModel, library, logged_errors

#: Maximum number of tokens per call of llama.cpp.
CHUNK = 256
_ROOT = -1


@dataclass
class _Node:
    """A speculative token: its position in the sequence, its parent node, and its sequence."""

    token: int
    position: int
    parent: int
    sequence: int
    #: All sequences of its cell when it is fed.
    shared: list[int]


@dataclass
class _Slot:
    """A slot: the sequence of its committed tokens, and the speculative nodes.

    Attributes:
        tips: last node of each sequence of the slot; `_ROOT` = no node yet.
    """

    main: int
    tokens: list[int] = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)
    tips: dict[int, int] = field(default_factory=dict)
    occupied: bool = False


class LlamaLM:
    """``batch_size`` slots of a GGUF model; see `crossdraft.LM` for the protocol.

    All slots share one cache of ``batch_size * max_length`` cells in llama.cpp's default precision (float16). It uses
    as many threads as PyTorch. Free slots are not computed.

    Raises:
        ModelError: llama.cpp cannot create the context.
    """

    def __init__(self, model: GGUFModel, batch_size: int, max_length: int):
        api = library()
        self.model, self.batch_size, self.max_length = model, batch_size, max_length
        self.vocab_size, self.context_length = model.vocab_size, model.context_length or None
        self.device = torch.device("cpu")
        self.passes = 0
        maximum = api.llama_max_parallel_sequences()
        if batch_size > maximum:
            raise ModelError(f"llama.cpp holds at most {maximum} sequences, not {batch_size}; use a smaller batch size")
        options = api.llama_context_default_params()
        # llama.cpp aborts the process if the context has fewer tokens than sequences.
        options.n_ctx = max(batch_size * max_length, maximum)
        options.n_batch = options.n_ubatch = max(CHUNK, maximum)
        options.n_seq_max = maximum
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        options.kv_unified = True  # sequences share cells
        options.swa_full = True  # tokens outside a sliding window are needed again after a rollback
        logged_errors()
        self._context = api.llama_init_from_model(model.handle, options)
        if not self._context:
            raise ModelError(
                f"llama.cpp cannot hold {batch_size} sequences of {max_length} tokens of {model.path}: "
                f"{logged_errors()}"
            )
        weakref.finalize(self, api.llama_free, self._context)
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(CHUNK, 0, maximum)
        weakref.finalize(self, api.llama_batch_free, self._batch)
        self._free = list(range(maximum - 1, -1, -1))  # unused sequences, the next one last
        self._slots: list[_Slot] = []
        for _ in range(batch_size):
            main = self._free.pop()
            self._slots.append(_Slot(main, tips={main: _ROOT}))
        self._last_logits: Tensor | None = None  # the logits of the last pass

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
                "llama.cpp does not return hidden states of layers, which this drafter reads; use another drafter, or "
                "the model as a transformers directory"
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
        parent_rows = [None] * self.batch_size if parents is None else parents.tolist()
        fed: list[tuple[_Node, int]] = []
        for row, (slot, ids) in enumerate(zip(self._slots, tokens.tolist(), strict=True)):
            if slot.occupied:
                self._add(slot, ids, parent_rows[row])
                fed += [(node, row * width + i) for i, node in enumerate(slot.nodes[len(slot.nodes) - width :])]
        logits = torch.zeros(self.batch_size * width, self.vocab_size)
        for start in range(0, len(fed), CHUNK):
            piece = fed[start : start + CHUNK]
            self._decode([node for node, _ in piece], scored=True)
            logits[[index for _, index in piece]] = self._logits(len(piece))
        self.passes += 1
        self._last_logits = logits.view(self.batch_size, width, -1)
        return self._last_logits, None

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        paths = None if path is None else path.tolist()
        for row, (slot, count) in enumerate(zip(self._slots, counts, strict=True)):
            if count:
                nodes = list(range(count)) if paths is None else paths[row][:count]
                last = slot.nodes[nodes[-1]]
                slot.tokens += [slot.nodes[i].token for i in nodes]
                slot.main = last.sequence
            self._drop(slot)

    def free(self, row: int) -> None:
        slot = self._slots[row]
        self._empty(slot)
        slot.occupied = False
        if self._last_logits is not None and bool(self._last_logits[row].isnan().any()):
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
            raise ModelError(
                "llama.cpp is fed tokens, but this drafter feeds its own embeddings to its target; use another drafter"
            )
        raise ModelError(
            "llama.cpp runs all layers of a model, but this drafter runs some of its target's; use another drafter"
        )

    # -- internals --------------------------------------------------------------------------------------

    def _add(self, slot: _Slot, tokens: list[int], parents: list[int] | None) -> None:
        """Assign positions and sequences to new nodes; cells of their ancestors are shared."""
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
                raise ModelError(f"node {index} of a tree has parent {parent}, which does not precede it")
            last, sequence = (committed - 1, slot.main) if parent < 0 else _position(slot.nodes[parent])
            if slot.tips[sequence] != parent:  # continued by another node: a branch
                sequence = self._branch(slot, parent, first)
            slot.nodes.append(_Node(token, last + 1, parent, sequence, [sequence]))
            slot.tips[sequence] = index

    def _branch(self, slot: _Slot, parent: int, first: int) -> int:
        """Open a new sequence with everything up to node ``parent``; nodes from ``first`` on are not yet fed."""
        if not self._free:
            raise ModelError(
                f"llama.cpp holds at most {library().llama_max_parallel_sequences()} sequences, and the trees of "
                f"{self.batch_size} slots have more branches; use a smaller batch size or narrower trees"
            )
        sequence = self._free.pop()
        slot.tips[sequence] = parent
        while parent >= first:
            slot.nodes[parent].shared.append(sequence)
            parent = slot.nodes[parent].parent
        last, source = (len(slot.tokens) - 1, slot.main) if parent < 0 else _position(slot.nodes[parent])
        if last >= 0:
            library().llama_memory_seq_cp(self._memory, source, sequence, 0, last + 1)
        return sequence

    def _drop(self, slot: _Slot) -> None:
        """Remove all tokens that are not committed; committed tokens are those of ``slot.main``."""
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
        """Feed ``tokens`` after the committed ones."""
        for start in range(0, len(tokens), CHUNK):
            piece, n = tokens[start : start + CHUNK], len(slot.tokens)
            self._decode([_Node(t, n + i, _ROOT, slot.main, [slot.main]) for i, t in enumerate(piece)], scored=False)
            slot.tokens += piece

    def _wipe(self) -> None:
        """Clear the cache after NaN: masked cells have attention weight 0, and 0 x NaN is NaN.

        llama.cpp clears all cells or none, so the other slots are recomputed.
        """
        library().llama_memory_clear(self._memory, True)
        self._last_logits = None
        for slot in self._slots:
            tokens, slot.tokens = slot.tokens, []
            self._drop(slot)
            self._commit(slot, tokens)

    def _decode(self, nodes: list[_Node], *, scored: bool) -> None:
        """Run llama.cpp once for at most `CHUNK` nodes, parents before children."""
        batch = self._batch
        batch.n_tokens = len(nodes)
        for i, node in enumerate(nodes):
            batch.token[i], batch.pos[i], batch.logits[i] = node.token, node.position, scored
            batch.n_seq_id[i] = len(node.shared)
            for j, sequence in enumerate(node.shared):
                batch.seq_id[i][j] = sequence
        logged_errors()
        if code := library().llama_decode(self._context, batch):
            raise ModelError(f"llama.cpp could not compute {len(nodes)} tokens (code {code}): {logged_errors()}")

    def _logits(self, rows: int) -> Tensor:
        """Logits ``[rows, V]`` of the last call, in llama.cpp's memory, valid until the next call."""
        pointer = library().llama_get_logits(self._context)
        return torch.from_numpy(np.ctypeslib.as_array(pointer, (rows, self.vocab_size)))


def _position(node: _Node) -> tuple[int, int]:
    return node.position, node.sequence
