"""Fixtures: hostile input must end with an exit code and a one-line message, quickly and without a traceback."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.cli import main as cli

#: Seconds after which an input counts as a hang. They take milliseconds; the rest is for a busy machine.
LIMIT = 20


class _TooLong(KeyboardInterrupt):
    """An exception that no handler of plug-in errors catches."""


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Abort a test that hangs."""

    def stop(*_: Any) -> None:
        raise _TooLong(f"no answer within {LIMIT} s")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: Any, monkeypatch: Any, tmp_path: Path) -> Refused:
    """``refused(arguments, *words, code=2)`` runs the command and asserts a one-line error with these words.

    Returns the sentence. It runs in an empty directory.
    """

    def run(arguments: list[str], *words: str, code: int = 2) -> str:
        place = tmp_path / "here"
        place.mkdir(exist_ok=True)
        monkeypatch.chdir(place)
        capsys.readouterr()
        try:
            result = cli.main(arguments)
        except SystemExit as left:  # argparse's own errors
            result = left.code
        out, err = capsys.readouterr()
        output = [line for line in err.splitlines() if line.startswith("crossdraft") and " error: " in f"{line} "]
        assert result == code, f"exit code {result}: {err[-800:]}"
        assert len(output) == 1, err[-2000:]
        assert "Traceback" not in out + err
        missing = [word for word in words if word not in err]
        assert not missing, f"{missing} not in: {err[-1500:]}"
        assert len(err) < 4000, "a sentence is to be read"
        assert all(c.isprintable() or c in "\n\t" for c in err), "escape codes reach the terminal"
        return err

    return run


@pytest.fixture
def target(tmp_path: Path) -> str:
    """A model directory that is valid until it is loaded."""
    directory = tmp_path / "target"
    directory.mkdir()
    return str(directory)
