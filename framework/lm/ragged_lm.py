"""Slots of a transformers causal LM over a ragged cache, for a whole model or some of its layers.

`RaggedLM` keeps the host's state (lengths, speculative nodes) and implements the `LM` protocol. The parts it is made
of: `ForwardPass` runs the model, `AttentionMasks` builds masks, a `KVCache` stores keys and values, `PromptPrefill`
feeds prompts. Where CUDA graphs are recorded, `BucketedPasses` pads passes to shapes that come again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from ..errors import ModelError
from ..util.tensors import on_device
from . import graph_buckets
from .architectures import TRIAL_LENGTH, refuse_unsupported
from .cuda_graphs import CudaGraphRunner, runner_for
from .forward_pass import ForwardPass
from .graph_buckets import MOST_GRAPHED, BucketedPasses
from .idle import Structure, borrow, put
from .prompt_prefill import PromptPrefill


def borrowed(passes: type[ForwardPass], model: Any, batch_size: int, max_length: int) -> ForwardPass:
    """Passes over at least ``max_length`` slots a row: idle ones with graphs, see `RaggedLM.lend`, or new ones."""
    graphs = runner_for(model)
    if not graphs.records:
        return passes.of(model, batch_size, max_length, graphs=graphs)

    def fits(item: tuple[int, ForwardPass]) -> bool:
        return item[0] == batch_size and len(item[1].masks.slots) >= max_length

    if (idle := borrow(model, passes, Structure(model), fits)) is None:
        with suppress(ModelError):  # some models have a limit
            longer = -(-max_length // graph_buckets.BUCKET) * graph_buckets.BUCKET
            refuse_unsupported(model, longer)
            max_length = longer
        return passes.of(model, batch_size, max_length, graphs=graphs)
    forward_pass: ForwardPass = idle[1]
    forward_pass.model = model
    with torch.inference_mode():
        for row in range(batch_size):
            forward_pass.cache.clear(row)
    return forward_pass


def _put_back(forward_pass: ForwardPass, batch_size: int) -> None:
    model, forward_pass.model = forward_pass.model, None  # an idle pass would keep the weights of its model otherwise
    if forward_pass.graphs.records:
        put(model, type(forward_pass), Structure(model), (batch_size, forward_pass))


class RaggedLM:
    """B slots of a causal LM: :class:`~crossdraft.framework.contracts.lm.LM` without ``fork``.

    ``start`` and ``forward`` pass further keyword inputs on to the model, for draft heads that read more than tokens.

    Args:
        forward_pass: the model, its masks and its cache.
        batch_size: number of slots.
        max_length: longest sequence of a slot, speculative nodes included, in tokens.
    """

    passes_by = ""  # what computes the passes, for reports, where a preparation had the choice

    def __init__(self, forward_pass: ForwardPass, batch_size: int, max_length: int):
        self.forward_pass = forward_pass
        self.model, self.cache = forward_pass.model, forward_pass.cache
        self.batch_size, self.max_length = batch_size, max_length
        self.vocab_size = forward_pass.dims.vocab_size
        self.device = forward_pass.dims.device
        self.lengths = [0] * batch_size
        self.passes = 0
        self.hidden_layers: tuple[float, ...] = ()
        self.graphs = forward_pass.graphs
        self._buckets = BucketedPasses(forward_pass, batch_size)
        self._prefill = PromptPrefill(forward_pass)
        self._forks: WeakSet[Any] = WeakSet()
        self._nodes = 0  # speculative nodes of every row
        self._parents: Tensor | None = None  # [B, nodes] int64, the parent of each of them; None = chains

    @classmethod
    def for_trial(cls, model: Any, batch_size: int) -> Self:
        """Slots of `TRIAL_LENGTH` tokens, without graphs."""
        forward_pass = ForwardPass.of(model, batch_size, TRIAL_LENGTH, graphs=CudaGraphRunner(None, "trial"))
        return cls(forward_pass, batch_size, TRIAL_LENGTH)

    @property
    def context_length(self) -> int | None:
        """Positions are clamped below it; set it to None for modules without a limit, before the first pass."""
        return self.forward_pass.dims.context_length

    @context_length.setter
    def context_length(self, length: int | None) -> None:
        self.forward_pass.dims.context_length = length

    # -- protocol ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def start(self, row: int, prompt: Sequence[int], **inputs: Tensor) -> Tensor | None:
        """Feed what `prefill` has not fed, in passes of this row only, so that neighbours have no influence.

        ``inputs``: ``[len(prompt) - 1, ..]`` each, of all prompt tokens but the last.
        """
        self._drop_nodes()  # an interrupted step may have left some
        self._prefill.feed(row, list(prompt[:-1]), self.lengths, self.hidden_layers, inputs)
        self.cache.commit(self.lengths)
        return self._prefill.pop_hidden(row)

    @torch.inference_mode()
    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        self._drop_nodes()
        if len(prompts) > 1:
            batch = {row: list(tokens) for row, tokens in prompts.items() if tokens}
            self._prefill.feed_batch(batch, self.lengths, self.hidden_layers)
        else:
            for row, tokens in prompts.items():
                self._prefill.feed(row, list(tokens), self.lengths, self.hidden_layers)
        for fork in self._forks:  # their nodes must not overlap the prompts
            fork.follow()

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, resume_from: Any = None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        resumable = parents is None and not self._nodes and not self.hidden_layers
        if resumable and resume_from is not None and resume_from in self._forks:
            self._nodes = tokens.shape[1]
            self.passes += 1
            return resume_from.resume(tokens), None
        logits, hidden = self._add_nodes(tokens, parents, inputs)
        assert logits is not None
        return logits, hidden

    @torch.inference_mode()
    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        if path is not None and path.shape[1] and self._nodes:
            committed = on_device(self.lengths, self.device)
            if self.graphs.records:
                self._buckets.compact(path, committed, max(self.lengths))
            else:
                self.forward_pass.compact(path, committed)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.cache.commit(self.lengths)
        self._drop_nodes()
        for fork in self._forks:
            fork.follow()

    @torch.inference_mode()
    def free(self, row: int) -> None:
        self.lengths[row] = 0
        self._prefill.forget(row)
        self.cache.clear(row)
        for fork in self._forks:
            fork.follow()

    def register_fork(self, fork: Any) -> None:
        """Let ``fork`` follow every change of the committed tokens, for as long as it is referenced elsewhere."""
        self._forks.add(fork)

    def lend(self) -> Self:
        """Let the passes be idle when these slots are freed, see `borrowed`."""
        finalize(self, _put_back, self.forward_pass, self.batch_size).atexit = False
        return self

    # -- internals --------------------------------------------------------------------------------------

    def _add_nodes(
        self, tokens: Tensor, parents: Tensor | None, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Score ``tokens [B, W]`` behind the nodes of earlier passes."""
        first, total = self._nodes, self._nodes + tokens.shape[1]
        longest = max(self.lengths)
        if longest + total > self.max_length:
            raise ModelError(
                f"a sequence of {longest} tokens and {total} draft tokens exceed max_length {self.max_length}"
            )
        tensors = {"tokens": tokens, "starts": on_device([n + first for n in self.lengths], self.device), **inputs}
        if parents is not None or self._parents is not None:
            tree = self._parents
            if tree is None:
                tree = torch.arange(-1, first - 1, device=self.device).expand(self.batch_size, -1)
            if parents is None:
                parents = torch.arange(first - 1, total - 1, device=self.device).expand_as(tokens)
            tensors |= {"parents": parents, "tree": tree}
        for row, length in enumerate(self.lengths):
            self.cache.reserve(row, length + total)
        self._nodes = total
        self.passes += 1
        if self.graphs.records and tokens.numel() <= MOST_GRAPHED:
            outputs = self._buckets.score(tensors, first, longest, self.hidden_layers)
        else:
            start = longest + first if min(self.lengths) == longest else None
            outputs = self.forward_pass.score(longest + total, start, self.hidden_layers, **tensors)
        logits, hidden, self._parents = outputs
        return logits, hidden

    def _drop_nodes(self) -> None:
        self._nodes, self._parents = 0, None
