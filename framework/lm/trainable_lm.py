"""A copy of a draft model whose weights its drafter may change while it drafts, see `Learner`."""

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
from .vocab_adapter import fitted


def learner_of(loaded: LoadedModel, batch_size: int, max_length: int, vocab_size: int) -> Learner:
    """``batch_size`` slots of a copy of a loaded model, whose embedding and head stay the model's own tensors.

    Args:
        vocab_size: V, to which logits are brought, see `fitted`.

    Raises:
        ModelError: a model of another backend, which has no gradients.
    """
    if loaded.backend != TRANSFORMERS:
        raise ModelError(
            f"'{loaded.name}' is run by {loaded.backend}, which knows no gradients, so it cannot learn while it "
            "drafts; take a transformers model"
        )
    # What is made in inference mode can never be part of a gradient.
    with torch.inference_mode(False):
        outer = [loaded.model.get_input_embeddings().weight, loaded.model.get_output_embeddings().weight]
        module: Any = copy.deepcopy(loaded.model, {id(tensor): tensor for tensor in outer})
        kept = {id(tensor) for tensor in outer}
        weights = [w for w in module.parameters() if id(w) not in kept and w.is_floating_point()]
        for weight in weights:
            weight.requires_grad_(True)
        lm = fitted(TransformersLM(module, batch_size, max_length), vocab_size, None, 0)
    chooses = "logits_to_keep" in inspect.signature(module.forward).parameters
    own = module.get_output_embeddings().weight.shape[0]

    def logits(tokens: Sequence[int], at: Sequence[int]) -> Tensor:
        ids = torch.tensor([[min(token, own - 1) for token in tokens]], device=module.device)
        index = torch.tensor(list(at), device=module.device)
        if chooses:
            said = module(input_ids=ids, use_cache=False, logits_to_keep=index).logits[0]
        else:
            said = module(input_ids=ids, use_cache=False).logits[0, index]
        return (
            functional.pad(said, (0, vocab_size - own), value=-math.inf) if own < vocab_size else said[:, :vocab_size]
        )

    return Learner(lm, weights, logits)
