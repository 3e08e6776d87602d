"""Cost curves: interpolation, extrapolation, storage and lookup."""

from pathlib import Path
from typing import Any

import pytest
from cost_curves import HERE, curve, seconds

from crossdraft.framework.cost.curve import CostCurve, find_curve, save_curve, stored_curves
from crossdraft.framework.errors import UsageError


def test_measured_points_are_reproduced() -> None:
    measured = curve()
    for point in measured.points:
        assert measured.seconds(*point[:3]) == point.median


@pytest.mark.parametrize("at", [(1, 3, 100), (5, 1, 300), (4, 2, 150), (6, 4, 250)])
def test_between_points_it_is_linear(at: tuple[float, float, float]) -> None:
    assert curve().seconds(*at) == pytest.approx(seconds(*at))


@pytest.mark.parametrize("at", [(16, 5, 300), (8, 17, 300), (8, 5, 1000), (32, 33, 2000)])
def test_last_piece_extrapolates(at: tuple[float, float, float]) -> None:
    assert curve().seconds(*at) == pytest.approx(seconds(*at))


def test_below_first_point_its_value_counts() -> None:
    assert curve().seconds(1, 1, 10) == seconds(1, 1, 100)


def test_kink_is_kept_and_falling_end_does_not_go_on() -> None:
    steps = {1: 10.0, 2: 30.0, 5: 27.0}
    measured = curve(cost=lambda b, w, c: steps[w])
    assert measured.seconds(1, 1.5, 100) == 20
    assert measured.seconds(1, 3, 100) == 29
    assert measured.seconds(1, 50, 100) == 27


def test_one_value_on_axis_cannot_be_left() -> None:
    measured = curve(batch_sizes=(1,), contexts=(100,))
    assert measured.seconds(1, 2, 900) == seconds(1, 2, 100)  # one context stands for all
    with pytest.raises(UsageError, match=r"a single batch size, 1, and does not extend to 4.*--batch-size 1,4"):
        measured.seconds(4, 2, 100)


def test_holes_are_refused() -> None:
    with pytest.raises(ValueError, match="each combination"):
        CostCurve("m", "abc", "float32", HERE, curve().points[:-1])
    with pytest.raises(ValueError, match="each combination"):
        CostCurve("m", "abc", "float32", HERE, ())


def test_covers() -> None:
    measured = curve()
    assert measured.covers([1, 8], [5], [100, 300])
    assert not measured.covers([1, 4], [5], [100])
    assert not measured.covers([1], [5], [128])


def test_kept_curve_is_found_again(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path))
    assert stored_curves() == []
    first, other = curve(), curve(sha256="def")
    save_curve(first)
    save_curve(other)
    newer = curve(cost=lambda b, w, c: 1.0, measured="later")
    save_curve(newer)  # the same weights on the same device: the later one stays
    result = stored_curves()
    assert sorted(c.measured for c in result) == ["", "later"]
    assert find_curve(result, "abc", "float32", HERE) == newer
    assert find_curve(result, "abc", "float32", {"device": "cpu (toy)"}) == newer
    assert find_curve(result, "abc", "bfloat16", HERE) is None
    assert find_curve(result, "abc", "float32", HERE | {"threads": 4}) is None
    (tmp_path / "costs" / "broken.json").write_text('{"points": 1}', encoding="utf-8")
    assert len(stored_curves()) == 2
    assert "unreadable cost curve" in caplog.text
