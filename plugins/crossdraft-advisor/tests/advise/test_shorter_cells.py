"""Statistics of a cell with shorter drafts."""

import pytest
from crossdraft_advisor.advise.shorter_drafts import cut

from crossdraft import UsageError
from crossdraft.framework.cost.prediction import CellStatistics


def test_shorter_draft() -> None:
    full = CellStatistics.chain(1, 4, 0.5, 100)
    assert cut(full, 2).tokens_per_step == pytest.approx(CellStatistics.chain(1, 2, 0.5, 100).tokens_per_step, rel=0.03)
    assert cut(full, 2).widths == {2: 1.0}
    assert cut(full, 4) == full
    mixed = CellStatistics(
        1, 1, 1.9, {0: 0.25, 1: 0.25, 4: 0.5}, 100, draft_seconds=8, acceptance=(0.5, 0.25, 0.1, 0.1)
    )
    one = cut(mixed, 1)
    assert one.widths == {0: 0.25, 1: 0.75}
    assert one.tokens_per_step == pytest.approx(1.9 - 0.45 + (one.acceptance[0] - 0.5))  # an end inside stays an end
    assert one.draft_seconds == 2
    with pytest.raises(UsageError, match="up to 4 tokens, not 5; run a cell with gamma 5"):
        cut(full, 5)
    with pytest.raises(UsageError, match="are trees; only chains can be truncated"):
        cut(CellStatistics(1, 1, 2.0, {12: 1.0}, 100, acceptance=(0.6, 0.4)), 1)


def test_shorter_drafts_of_an_engine() -> None:
    cell = CellStatistics(1, 1, 1.5, {4: 1.0}, 100, acceptance=(0.2, 0.1, 0.1, 0.1), idle=0.75)
    shorter = cut(cell, 2)  # as many steps without a draft, of more steps
    assert shorter.idle == pytest.approx(0.75 * shorter.tokens_per_step / 1.5)
    assert shorter.at(2).widths[2] == pytest.approx((1 - shorter.idle) ** 2)
