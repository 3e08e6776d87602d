"""Control characters of foreign text do not reach the terminal."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from crossdraft.framework.cli import main as cli
from crossdraft.framework.cli.standard_streams import cleaned
from crossdraft.framework.recipe import builtin_recipes

FOREIGN = "\x1b[31mred\x1b]0;title\x07 \x9b2J \rover\b\x7f \u202eback\u2066"
CLEAN = r"\x1b[31mred\x1b]0;title\x07 \x9b2J \rover\x08\x7f \u202eback\u2066"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_control_characters_are_escaped(name: str, capsys: Any) -> None:
    with cleaned():
        stream = getattr(sys, name)
        print(FOREIGN, file=stream)
        stream.writelines(["\tä\r\n", FOREIGN])
        if name == "stderr":
            logging.lastResort.emit(logging.makeLogRecord({"msg": FOREIGN}))  # type: ignore[union-attr]
    text = getattr(capsys.readouterr(), name.removeprefix("std"))
    assert text.startswith(f"{CLEAN}\n\tä\r\n{CLEAN}") and text.count(CLEAN) == (3 if name == "stderr" else 2)
    assert not set(text) & set("\x1b\x07\x9b\b\x7f\u202e\u2066")


def test_progress_bars_move_the_cursor(capsys: Any) -> None:
    with cleaned(), tqdm(total=2, desc=FOREIGN, position=1, file=sys.stderr) as bar:
        bar.update(1)
    text = capsys.readouterr().err
    assert "\x1b[A" in text and f"\r{CLEAN}" in text and "\x1b[31m" not in text


def test_file_printed_by_a_command(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(builtin_recipes, "FOLDER", tmp_path)
    file = tmp_path / "odd.yaml"
    file.write_text(f"# {FOREIGN}\ntarget: x\n", encoding="utf-8", newline="")
    assert cli.main(["list", "recipes", "odd"]) == 0
    assert CLEAN in capsys.readouterr().out
