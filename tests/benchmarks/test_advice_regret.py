"""Advice from one draft length, in the recorded runs (docs/advise.md)."""

import re
import tarfile
from pathlib import Path
from typing import Any

import advice_regret
import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize(("name", "cases"), [("runs", 9), ("multi-draft", 15)])
def test_advice_loses_little(name: str, cases: int, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """At most 5 % in nine of ten cases, and at most 10 % in any."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    run = next(path for path in (tmp_path / "runs").iterdir() if (path / "recipe.json").exists())
    monkeypatch.setattr("sys.argv", ["advice_regret.py", str(run)])
    advice_regret.main()
    match = re.search(r"loss at most 5 % in (\d+) of (\d+), at most ([\d.]+) %", capsys.readouterr().out)
    assert match is not None and int(match[2]) == cases
    assert int(match[1]) >= 0.9 * cases and float(match[3]) <= 10
