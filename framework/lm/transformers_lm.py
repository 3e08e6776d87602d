"""Any transformers causal language model behind the :class:`~crossdraft.framework.contracts.lm.LM` protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import plugins
from ..contracts.lm import LM, Fork
from ..errors import ModelError
from ..models.placement import is_spread
from .architectures import needs_trial, refuse_unsupported, text_config, trial
from .forward_pass import ForwardPass, each_preparation
from .kv_cache import KVCache
from .ragged_lm import RaggedLM, borrowed


class TransformersLM(RaggedLM):
    """B slots of a transformers causal LM; see :class:`~crossdraft.framework.contracts.lm.LM` for the protocol.

    Args:
        model: a loaded ``*ForCausalLM``; put in eval mode and prepared, see `ModelPreparation`.
        batch_size: number of slots.
        max_length: longest sequence a slot will hold, speculative nodes included, in tokens.
        cache: a `KVCache` for ``batch_size`` rows of ``max_length`` slots; a new one by default.

    Raises:
        ModelError: the model would be run wrongly, see `refuse_unsupported` and `trial`.
    """

    def __init__(self, model: Any, batch_size: int, max_length: int, cache: KVCache | None = None):
        check_model(model, max_length, needs_trial(model))
        if cache is None:
            super().__init__(borrowed(ForwardPass, model, batch_size, max_length), batch_size, max_length)
            self.lend()
        else:
            super().__init__(ForwardPass.of(model, batch_size, max_length, cache), batch_size, max_length)

    def fork(self, layers: Sequence[int], **parts: Any) -> Fork:
        if not getattr(self.cache, "forkable", True):
            raise ModelError(
                f"{type(self.model).__name__} has recurrent layers, whose states a fork with some of the layers would "
                "overwrite; use a drafter with a model of its own"
            )
        if "shared" in (getattr(text_config(self.model), "indexer_types", None) or ()):
            raise ModelError(
                f"{type(self.model).__name__} has layers that reuse the keys which an earlier layer selected, so some "
                "of its layers cannot be run alone; use a drafter with a model of its own"
            )
        if is_spread(self.model):
            raise ModelError(
                f"{type(self.model).__name__} is spread over several devices by hooks that run all of it, so some of "
                "its layers cannot be run alone; load it on one device"
            )
        fork = plugins.of_companion("running of some layers")(self, layers, **parts)
        self.register_fork(fork)
        return fork


def model_slots(model: Any, batch_size: int, max_length: int) -> LM:
    """Slots of a whole model: those of the first preparation that returns some, or a `TransformersLM`."""
    reasons = []
    for slots in each_preparation("slots", model, batch_size, max_length):
        if slots is not None and not isinstance(slots, str):
            return slots
        reasons += [slots] if slots else []
    lm = TransformersLM(model, batch_size, max_length)
    lm.passes_by = "; ".join(reasons)
    return lm


def check_model(model: Any, max_length: int, untried: bool, both_ropes: bool = False) -> None:
    """Raise ModelError for an unsupported model; run the `trial` of an ``untried`` one."""
    refuse_unsupported(model, max_length, both_ropes)
    if untried:
        trial(RaggedLM.for_trial(model, 2))
