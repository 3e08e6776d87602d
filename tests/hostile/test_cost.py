"""Cost curves that were damaged on disk."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from cost_curves import curve

from crossdraft.framework.cost.curve import curves_dir, save_curve, stored_curves

#: What became of a kept curve.
DAMAGE: dict[str, Any] = {
    "median null": lambda d: d["points"][0].__setitem__(3, None),
    "median a text": lambda d: d["points"][0].__setitem__(3, "fast"),
    "median NaN": lambda d: d["points"][0].__setitem__(3, float("nan")),
    "median infinite": lambda d: d["points"][0].__setitem__(3, float("inf")),
    "median zero": lambda d: d["points"][0].__setitem__(3, 0.0),
    "median negative": lambda d: d["points"][0].__setitem__(3, -1.0),
    "median true": lambda d: d["points"][0].__setitem__(3, True),
    "a quartile a text": lambda d: d["points"][0].__setitem__(4, "low"),
    "width a text": lambda d: d["points"][0].__setitem__(1, "1"),
    "width zero": lambda d: d["points"][0].__setitem__(1, 0),
    "a point too short": lambda d: d["points"].__setitem__(0, [1, 2]),
    "a point that is no list": lambda d: d["points"].__setitem__(0, 3),
    "a point missing": lambda d: d["points"].pop(),
    "no points": lambda d: d.__setitem__("points", []),
    "points null": lambda d: d.__setitem__("points", None),
    "points a mapping": lambda d: d.__setitem__("points", {}),
    "no sha256": lambda d: d.pop("sha256"),
    "sha256 null": lambda d: d.__setitem__("sha256", None),
    "device null": lambda d: d.__setitem__("device", None),
    "device a list": lambda d: d.__setitem__("device", []),
    "dtype a number": lambda d: d.__setitem__("dtype", 3),
    "an unknown key": lambda d: d.__setitem__("more", 1),
    "repeats a text": lambda d: d.__setitem__("repeats", "5"),
    "cut": '{"points": [[1, 2',
    "a list": "[]",
    "null": "null",
    "empty": "",
    "nested": "[" * 100_000,
    "binary": b"\xff\xfe\0",
    "digits": '{"points": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("subject", DAMAGE)
def test_damaged_curve_is_left_out(subject: str, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """A damaged curve in the cache: runs continue without a prediction."""
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path))
    whole, path = curve(sha256="other"), save_curve(curve())
    save_curve(whole)
    damage = DAMAGE[subject]
    if callable(damage):
        data = json.loads(path.read_text(encoding="utf-8"))
        damage(data)
        damage = json.dumps(data)
    path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    with caplog.at_level(logging.WARNING):
        assert [c.sha256 for c in stored_curves()] == [whole.sha256]
    assert path.name in caplog.text and "skipped the unreadable" in caplog.text


def test_directory_among_curves(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path))
    (curves_dir() / "x.json").mkdir(parents=True)
    assert stored_curves() == [] and "unreadable cost curve" in caplog.text
