"""Enumeration of the drafts of a drafter: a verifier that rejects all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..contracts.draft import Draft, Verdict
from ..contracts.rng import StepRng
from ..contracts.verifier import Verifier, VerifierTraits
from .certify import Enumeration


class DraftRecorder(Verifier):
    """Verifier that rejects everything and passes each batch of drafts to ``record``, for use in `certify`.

    ``record`` receives the draft, the target's distributions ``[B, N + 1, V]``, and the probability ``[B]`` of each
    row.
    """

    name = "draft-recorder"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset(), lossless=False)

    def __init__(self, record: Callable[[Draft, Tensor, np.ndarray], None]):
        super().__init__()
        self._record = record

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        assert isinstance(rng, Enumeration)
        self._record(draft, p, rng.weight)
        no_path = torch.full_like(draft.tokens, -1)
        return Verdict(torch.zeros_like(draft.count), p[:, 0].argmax(-1), None if draft.is_chain else no_path)
