"""Any transformers causal language model behind the :class:`~crossdraft.framework.contracts.lm.LM` protocol."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from .architectures import TRIAL_LENGTH, needs_trial, refuse_unsupported, trial
from .layer_subset import LayerFork
from .ragged_lm import RaggedLM


class TransformersLM(RaggedLM):
    """B slots of a transformers causal LM; see :class:`~crossdraft.framework.contracts.lm.LM` for the protocol.

    Args:
        model: a loaded ``*ForCausalLM``; put in eval mode, and on a CPU in float32 its linear layers get a faster
            product for few rows (see ``cpu.py``).
        batch_size: number of slots.
        max_length: longest sequence a slot will hold, speculative nodes included, in tokens.

    Raises:
        ModelError: a model that would be run wrongly, see `refuse_unsupported` and `trial`.
    """

    def __init__(self, model: Any, batch_size: int, max_length: int):
        refuse_unsupported(model, max_length)
        self._prepare(model, batch_size, max_length)
        if needs_trial(model):
            apart = object.__new__(TransformersLM)
            apart._prepare(model, 2, TRIAL_LENGTH)
            trial(apart)

    def fork(
        self,
        layers: Sequence[int],
        *,
        no_attention: Collection[int] = (),
        no_mlp: Collection[int] = (),
        embeddings: Tensor | None = None,
    ) -> LayerFork:
        fork = LayerFork(self, layers, no_attention, no_mlp, embeddings=embeddings)
        self._forks.add(fork)
        return fork
