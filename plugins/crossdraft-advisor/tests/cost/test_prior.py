"""Prices of drafting without a measurement."""

import math

import pytest
from crossdraft_advisor.cost.step_cost import StepCost, published_prior

from crossdraft.framework.errors import UsageError


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp", ""])
def test_every_engine_has_a_price(engine: str) -> None:
    ratio = StepCost(prior=published_prior(engine, 1)).ratio(3)
    assert ratio.low is not None
    assert ratio.high is not None
    assert 0.3 < ratio.low < 1.3 < ratio.value < ratio.high


def test_drafting_is_cheaper_on_servers() -> None:
    served, unknown, local = (published_prior(e, 1).centre[1] for e in ("sglang", "", "llama.cpp"))
    assert served < unknown < local


def test_unknown_engine_and_large_batches_are_less_certain() -> None:
    def scale(engine: str, batch_size: float) -> float:
        return math.hypot(*published_prior(engine, batch_size).scale)

    assert scale("", 1) > scale("vllm", 1)
    assert scale("vllm", 256) > scale("vllm", 1)


def test_impossible_batch_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="batch size"):
        published_prior("", 0)
