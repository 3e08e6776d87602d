"""Prices of drafting without a measurement."""

import math

import pytest
from crossdraft_advisor.cost.prices import KINDS, price_of
from crossdraft_advisor.cost.step_cost import StepCost

from crossdraft.framework.errors import UsageError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["vllm", "llama.cpp", None])
def test_every_kind_has_a_price_on_every_engine(kind: str, engine: str | None) -> None:
    ratio = StepCost(prior=price_of(kind, engine, None, 1)).ratio(3)
    assert ratio.low is not None
    assert ratio.high is not None
    assert 0.3 < ratio.low < 1.3 < ratio.value < ratio.high


def test_drafting_is_cheaper_on_servers() -> None:
    served, unknown, local = (price_of("sequential", e, None, 1).centre[1] for e in ("sglang", None, "llama.cpp"))
    assert served < unknown < local


def test_unknown_engine_and_large_batches_are_less_certain() -> None:
    def scale(engine: str | None, batch_size: float) -> float:
        return math.hypot(*price_of("sequential", engine, None, batch_size).scale)

    assert scale(None, 1) > scale("vllm", 1)
    assert scale("vllm", 256) > scale("vllm", 1)


def test_unknown_kinds_and_batch_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="'tree' drafters have no price"):
        price_of("tree", None, None, 1)
    with pytest.raises(UsageError, match="batch size"):
        price_of("block", None, None, 0)
