"""State of a run: ``state.json``, written by the run, and its interpretation by readers.

A killed run cannot update its state. A state of ``running`` without a held lock therefore means that the run was
killed.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from ..errors import UsageError, first_line, printable
from ..util.input_files import read_text
from ..util.limits import CONFIG_BYTES
from .run_directory import LOCK, RunDirectory

FILE = "state.json"
#: Seconds between two updates of the progress.
UPDATE_INTERVAL = 10.0

State = Literal["running", "interrupted", "stopped", "finished", "unknown"]


@dataclass(frozen=True)
class RunState:
    """State of a run.

    Attributes:
        state: ``interrupted``: by its user, or killed; it can be resumed. ``stopped``: it could not continue (full
            disk, ``--fail-fast``). ``finished``: every cell was measured or failed. ``unknown``: it ran on another
            machine, whose lock is not visible.
        cells: number of cells of the recipe; None if unknown.
        finished, failed: number of measured and of failed cells.
        progress: finished share, from 0 to 1; None if unknown.
        started, updated: ISO 8601, UTC; empty if unknown.
        pid, host: process that runs or ran it.
        note: a note for readers, for instance the reason why it stopped.
    """

    state: State
    cells: int | None = None
    finished: int = 0
    failed: int = 0
    progress: float | None = None
    started: str = ""
    updated: str = ""
    pid: int | None = None
    host: str = ""
    note: str = ""


class Reporter(AbstractContextManager["Reporter"]):
    """Writer of ``state.json`` while this process holds the lock: ``with Reporter(directory, cells) as state``.

    Exceptions that leave the block are recorded. Write errors are ignored, because the other files of the run report
    them.
    """

    def __init__(self, directory: RunDirectory, cells: int):
        self._directory, self._last = directory, 0.0
        self._state = RunState("running", cells, progress=0.0, pid=os.getpid(), host=socket.gethostname())
        self.update()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.update(state="interrupted")
        elif error is not None:
            self.update(state="stopped", note=first_line(error))

    def update_progress(self, progress: float) -> None:
        """Update the progress, at most every `UPDATE_INTERVAL` seconds."""
        if time.monotonic() - self._last >= UPDATE_INTERVAL:
            self.update(progress=progress)

    def update(self, **changes: Any) -> None:
        """Set fields of `RunState` and write the file."""
        self._last, now = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        self._state = replace(self._state, started=self._state.started or now, updated=now, **changes)
        with suppress(OSError):
            self._directory.write_json(FILE, asdict(self._state))


def state_of(path: Path) -> RunState:
    """Return the state of the run in a directory.

    Raises:
        UsageError: the directory is not a run, or its files are not readable.
    """
    if not _is_run(path):
        raise UsageError(
            f"{printable(str(path))} is not the directory of a run; crossdraft runs DIR lists the runs in DIR"
        )
    locked = _is_locked(path)
    if not (path / FILE).is_file():
        return RunState("running" if locked else "finished" if (path / "summary.csv").is_file() else "interrupted")
    state = _read(path / FILE)
    if state.state != "running" or locked:
        return state if locked is not True else replace(state, state="running")
    if state.host not in ("", socket.gethostname()):
        note = f"running on {state.host} according to its state.json; processes of that host are not visible here"
        return replace(state, state="unknown", note=note)
    if locked is None and _alive(state.pid):  # locks are not available
        return state
    return replace(state, state="interrupted", note=f"process {state.pid} exited unexpectedly; rerun to resume")


def runs_in(directory: Path) -> list[Path]:
    """Return the directories of the runs in a directory and of their shards, or the directory itself if it is a run.

    Raises:
        UsageError: the directory does not exist or is not readable.
    """
    if not directory.is_dir():
        raise UsageError(
            f"directory {printable(str(directory))} does not exist; crossdraft run writes to runs/, or to --out"
        )
    try:
        folders = sorted(path for path in directory.iterdir() if path.is_dir())
        parts = [file.parent for path in (directory, *folders) for file in sorted(path.glob(f"*/*/{FILE}"))]
        runs = [directory] if _is_run(directory) else [path for path in folders if _is_run(path)]
        return list(dict.fromkeys([*runs, *parts]))
    except OSError as error:
        raise UsageError(f"cannot read {printable(str(directory))}: {error.strerror or error}") from None


def latest(directory: Path) -> Path:
    """Return the run in ``runs`` that was started last for a path ``runs/latest``, and other paths as they are.

    Raises:
        UsageError: there is no run in ``runs``.
    """
    if directory.name != "latest" or directory.exists():
        return directory
    runs = [path for path in runs_in(directory.parent) if (path / "recipe.json").is_file()]
    if not runs:
        raise UsageError(f"{printable(str(directory))}: there are no runs in {printable(str(directory.parent))}")
    return max(runs, key=lambda path: (path / "recipe.json").stat().st_mtime_ns)


# -- helpers ----------------------------------------------------------------------------------------------------


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (FILE, "recipe.json"))


def _is_locked(path: Path) -> bool | None:
    """Return True if a process holds the lock of a run; None if unknown (no write permission, no locks)."""
    if not (path / LOCK).is_file():
        return False
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except (OSError, NotImplementedError):
        return None
    lock.release()
    return False


def _alive(pid: int | None) -> bool:
    """Return True if a process with this id runs on this machine."""
    try:
        os.kill(pid or 0, 0) if pid and os.name == "posix" else None
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return bool(pid)


@cache
def _schema() -> TypeAdapter[RunState]:
    return TypeAdapter(RunState)


def _read(file: Path) -> RunState:
    """Read ``state.json``. Raises UsageError if it is damaged."""
    try:
        return _schema().validate_json(read_text(file, CONFIG_BYTES), strict=True)
    except ValidationError:
        problem = "is damaged or was written by another version"
        raise UsageError(f"{printable(str(file))} {problem}; run the recipe again to rewrite it") from None
