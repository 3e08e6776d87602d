"""Memory, disks and numbers that do not suffice: an error before the work, never an internal one."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.errors import UsageError
from crossdraft.framework.util import output_files
from crossdraft.framework.util.input_files import read_bytes
from crossdraft.framework.util.limits import Limit


@pytest.fixture
def recipe(tmp_path: Path, target: str) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"target: {target}\ndrafters: [prompt-lookup]\nverifiers: [token]\n", encoding="utf-8")
    return str(file)


def test_directory_whose_name_cannot_be_stored(recipe: str, refused: Any) -> None:
    refused(["run", recipe, "--out", "runs\udcff"], "--out runs\\udcff: its full name is not UTF-8")


def test_file_that_cannot_be_written(recipe: str, refused: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """As under ``ulimit -f 0``, where files can be created and not written."""

    def temporary(path: Path) -> Any:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(output_files, "temporary", temporary)
    refused(["run", recipe], "--out runs: the directory runs cannot be written to: File too large")
    with pytest.raises(UsageError, match="cannot be written to: File too large"):
        output_files.check_output(tmp_path / "table.csv", "--out")


def test_no_temporary_directory() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    code = f"{limit}; from crossdraft.framework.cli.main import main; raise SystemExit(main(['list', 'verifiers']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no temporary directory can be written to; set TMPDIR" in done.stderr


def test_reading_takes_the_memory_of_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert read_bytes(file, Limit(2**60, "a petabyte")) == b"abc"  # not `read(2**60)`
    for path, maximum in (("/proc/self/status", 2**20), ("/proc/self/status", 10)):
        if Path(path).exists():  # it reports a size of 0
            with pytest.raises(UsageError, match="maximum is 10") if maximum == 10 else monkeypatch.context():
                assert b"Name:" in read_bytes(Path(path), Limit(maximum, "small"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory"),
        (RecursionError("deep"), "nested too deeply"),
        (ValueError("Exceeds the limit (4300 digits) for integer string conversion"), "too many digits"),
    ],
)
def test_limit_of_the_process(error: Exception, words: str, monkeypatch: Any, refused: Any) -> None:
    def run(command: Any) -> int:
        raise error

    monkeypatch.setattr("crossdraft.framework.cli.compare.Compare.run", run)
    assert "report it" not in refused(["compare", "a", "b"], words, code=1)
