"""``--out`` and similar options: foreign files are not overwritten, and are rejected before the work."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from companions import has_command, has_format, needs_page
from html_runs import SMALL, finished_run, on_disk

from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError
from crossdraft.framework.util.output_files import check_output, replacing, writing_output

pytestmark = pytest.mark.with_companions


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return on_disk(finished_run(tmp_path / "small-abc", SMALL, tokens=12))


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    path = tmp_path / "f.jsonl"
    rows = [{"prompt": [1, 2, 3, 1, 2, 3], "tokens": [1, 2, 3, 4, 1, 2, 3], "temperature": 0}] * 3
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def writers(run: Path, responses: Path) -> dict[str, list[str]]:
    """Commands that write one file, given as the last argument."""
    return {
        "replay": [
            "replay",
            str(responses),
            "--temperature",
            "0",
            "--drafter",
            "prompt-lookup",
            "--gamma",
            "1",
            "--out",
        ],
        "report": ["report", str(run), "--out"],
        "page": ["report", str(run), "--format", "html", "--out"],
        "table": ["report", str(run), "--rows", "drafter", "--out"],
    }


WRITERS = ("report", "table", *["page"] * has_format("html"), *["replay"] * has_command("replay"))


def left_over(directory: Path) -> list[str]:
    return [str(path) for path in directory.rglob("*") if path.name.endswith(".part")]


@pytest.mark.parametrize("writer", WRITERS)
def test_foreign_files_are_kept(writer: str, run: Path, responses: Path, refused: Any, tmp_path: Path) -> None:
    command = writers(run, responses)[writer]
    own, fifo, listening, folder = (tmp_path / name for name in ("mine", "fifo", "socket", "folder"))
    own.write_text("a year's work", encoding="utf-8")
    os.mkfifo(fifo)
    folder.mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(listening))
    refused([*command, str(own)], "mine: the file exists", "--force")
    assert own.read_text(encoding="utf-8") == "a year's work"
    for path in (fifo, listening, Path("/dev/null")):
        before = path.lstat()
        for force in ([], ["--force"]):
            refused([*command, str(path), *force], f"{path}: it is a device, a pipe or a socket")
        assert stat.S_IFMT(path.lstat().st_mode) == stat.S_IFMT(before.st_mode)
        assert path.lstat().st_ino == before.st_ino
    refused([*command, str(folder), "--force"], "folder: it is a directory")
    refused([*command, str(tmp_path / "no" / "where")], "does not exist; create it")
    server.close()
    assert not left_over(tmp_path)
    assert cli.main([*command, str(own), "--force"]) == 0
    assert own.read_bytes() != b"a year's work" and not left_over(tmp_path)


@pytest.mark.parametrize("writer", WRITERS)
def test_inputs_are_not_overwritten(writer: str, run: Path, responses: Path, refused: Any, tmp_path: Path) -> None:
    command = writers(run, responses)[writer]
    source = responses if writer == "replay" else next(run.glob("cells/*/responses.jsonl"))
    before, alias, link = source.read_bytes(), tmp_path / "alias", tmp_path / "link"
    os.link(source, alias)
    link.symlink_to(source)
    for path in (source, alias, link):
        for force in ([], ["--force"]):
            refused([*command, str(path), *force], f"{path}: this command reads that file")
    assert source.read_bytes() == before and alias.read_bytes() == before and link.is_symlink()


@pytest.mark.parametrize("writer", WRITERS)
def test_same_command_again(writer: str, run: Path, responses: Path, refused: Any, tmp_path: Path) -> None:
    """A command replaces its own output if the format can contain a mark; tables cannot."""
    command, out = [*writers(run, responses)[writer], str(tmp_path / "out")], tmp_path / "out"
    assert cli.main(command) == 0
    out.chmod(0o640)
    if writer == "table":
        refused(command, "the file exists")
        command.append("--force")
    assert cli.main(command) == 0
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~umask


@needs_page
def test_file_in_place_of_chart(run: Path, refused: Any, tmp_path: Path) -> None:
    command = ["report", str(run), "--kind", "acceptance", "--format", "pdf", "--out", str(tmp_path / "figures")]
    assert cli.main(command) == 0 and cli.main(command) == 0  # the formats bear the mark
    chart = tmp_path / "figures" / "small-acceptance.pdf"
    chart.write_bytes(b"mine")
    refused(command, "small-acceptance.pdf: the file exists")
    assert chart.read_bytes() == b"mine"
    os.mkfifo(tmp_path / "fifo")
    refused(["report", str(run), "--format", "png", "--out", str(tmp_path / "fifo")], "is not a directory")


def test_refused_before_work(run: Path, refused: Any, tmp_path: Path) -> None:
    """An unreadable run is rejected."""
    (run / "recipe.json").write_text("{", encoding="utf-8")
    (tmp_path / "mine").write_text("", encoding="utf-8")
    for form in ("markdown", "csv", *["png"] * has_format("png")):
        refused(["report", str(run), "--format", form, "--out", str(tmp_path / "mine")], f"--out {tmp_path / 'mine'}")


# -- the writer -------------------------------------------------------------------------------------------------


def test_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("v", encoding="utf-8")
    (tmp_path / "out").symlink_to(tmp_path / "victim")
    with pytest.raises(UsageError, match="the file exists"):
        check_output(tmp_path / "out", "--out")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="the file exists"):
        check_output(tmp_path / "gone", "--out")
    with replacing(tmp_path / "out") as file:
        (aside,) = [path for path in tmp_path.iterdir() if path.name.endswith(".part")]
        file.write(b"new")
    assert (tmp_path / "victim").read_text(encoding="utf-8") == "v"
    assert not (tmp_path / "out").is_symlink() and (tmp_path / "out").read_bytes() == b"new"
    with replacing(tmp_path / "out") as file:
        (other,) = [path for path in tmp_path.iterdir() if path.name.endswith(".part")]
    assert aside.name != other.name and str(os.getpid()) not in other.name.split(".")


def test_name_of_255_bytes(tmp_path: Path) -> None:
    out = tmp_path / ("ä" * 127)
    with writing_output(out, "--out") as file:
        file.write(b"1")
    assert out.read_bytes() == b"1"


def test_failed_outputs_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for error in (KeyboardInterrupt, ValueError, SystemExit):
        with pytest.raises(error), replacing(out) as file:
            file.write(b"half")
            raise error
        assert not list(tmp_path.iterdir())
