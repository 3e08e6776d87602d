"""A trainable copy of a draft model, whose weights the drafter updates while it drafts, see `Learner`."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..contracts.drafter import Learner
from ..contracts.models import TRANSFORMERS, LoadedModel
from ..errors import ModelError
from .transformers_lm import TransformersLM
from .vocab_adapter import adapt_vocab

#: A module, and its trainable weights, each with its first values.
Copy = tuple[Any, list[tuple[Tensor, Tensor]]]


def trainable_copy(loaded: LoadedModel) -> Copy:
    """A copy of a loaded model that shares the model's embedding and head, which are not trained.

    Raises:
        ModelError: the model's backend has no gradients.
    """
    if loaded.backend != TRANSFORMERS:
        raise ModelError(
            f"'{loaded.name}' runs on backend {loaded.backend}, which computes no gradients, so it cannot be trained "
            "while it drafts; use a transformers model"
        )
    # Inference tensors cannot take part in autograd.
    with torch.inference_mode(False):
        outer = [loaded.model.get_input_embeddings().weight, loaded.model.get_output_embeddings().weight]
        module: Any = copy.deepcopy(loaded.model, {id(tensor): tensor for tensor in outer})
        shared, pairs = set(map(id, outer)), zip(module.parameters(), loaded.model.parameters(), strict=True)
        return module, [(w.requires_grad_(), old) for w, old in pairs if id(w) not in shared and w.is_floating_point()]


def learner_of(trainable: Copy, batch_size: int, max_length: int, vocab_size: int) -> Learner:
    """``batch_size`` slots of a copy with its first weights; ``vocab_size``: V, the number of logits."""
    module, weights = trainable
    with torch.inference_mode(False):
        for weight, first in weights:
            weight.data.copy_(first)
        lm = adapt_vocab(TransformersLM(module, batch_size, max_length), vocab_size, None, 0)
    selects = "logits_to_keep" in inspect.signature(module.forward).parameters
    own = module.get_output_embeddings().weight.shape[0]

    def logits(tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        ids = torch.tensor([[min(token, own - 1) for token in tokens]], device=module.device)
        index = torch.tensor(list(positions), device=module.device)
        if selects:
            out = module(input_ids=ids, use_cache=False, logits_to_keep=index).logits[0]
        else:
            out = module(input_ids=ids, use_cache=False).logits[0, index]
        return functional.pad(out, (0, vocab_size - own), value=-math.inf) if own < vocab_size else out[:, :vocab_size]

    return Learner(lm, [weight for weight, _ in weights], logits)
