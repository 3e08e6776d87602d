"""Sampling distributions: valid ones sum to 1, invalid ones raise."""

import math

import pytest
import torch

from crossdraft.framework.contracts.sampling import Sampling


@pytest.mark.parametrize("min_p", [0, 0.3])
@pytest.mark.parametrize("top_p", [1, 0.5])
@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0, 0.5, 1])
def test_nan_and_infinity_are_not_distributions(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Wherever they stand, and however many: no warper filters them out, and the row beside them is fine."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    good = torch.tensor([0.3, -1.2, 2.0, 0.1, -0.7, 1.1, 0.4, -2.0])
    spoilt = []
    for value in (math.nan, math.inf, -math.inf):
        for count in (1, 4, 8):
            for first in (0, 3, 7):
                spoilt.append(torch.where((torch.arange(8) - first) % 8 < count, value, good))
    p, finite = sampling.checked_probs(torch.stack([good, *spoilt]))
    impossible_only = [bool((row == -math.inf).any()) and not bool((row == -math.inf).all()) for row in spoilt]
    assert finite.tolist() == [True, *impossible_only]
    assert torch.allclose(p[finite].sum(1), torch.ones(int(finite.sum())))
