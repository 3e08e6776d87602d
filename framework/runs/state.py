"""How far a run has come: ``state.json``, which the run keeps up to date, and what those make of it who look.

A run that was killed cannot say so. Whether one is running is therefore told by the lock of its directory: a file that
says ``running`` and a lock that nobody holds are a run that was cut off.
"""

from __future__ import annotations

import csv
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from ..errors import UsageError, first_line, printable
from ..util.input_files import read_text
from ..util.limits import CONFIG_BYTES, INDEX_BYTES
from .run_directory import LOCK, OWNER, RunDirectory

FILE = "state.json"
#: Seconds between two updates while nothing else happens.
BEAT = 10.0

State = Literal["running", "interrupted", "stopped", "finished", "unknown"]


@dataclass(frozen=True)
class RunState:
    """What is known of a run.

    Attributes:
        state: ``interrupted``: by its user, or killed; run again, it goes on. ``stopped``: it could not go on (a full
            disk, ``--fail-fast``). ``finished``: every cell was measured, or failed. ``unknown``: it ran on another
            machine, whose lock cannot be seen from here.
        cells: of the recipe; None where a run did not note it.
        finished, failed: how many of them were measured, and how many failed.
        progress: the share of the prompts that all cells have answered, from 0 to 1; None where a run did not note it.
        started, updated: ISO 8601, UTC; empty where unknown.
        pid, host: of the process that runs or ran it.
        note: what a reader should know, a sentence; for instance why it stopped.
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


class Reporter:
    """Keeps ``state.json`` of a run while this process holds its lock: ``with Reporter(directory, cells) as state``.

    An exception that leaves it is noted. A disk that takes no more costs the run's own files first, and they say so:
    here it is passed over.
    """

    def __init__(self, directory: RunDirectory, cells: int):
        self._directory, self._last = directory, 0.0
        self._now = RunState("running", cells, progress=0.0, started=_now(), pid=os.getpid(), host=socket.gethostname())
        self.update()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.update(state="interrupted")
        elif error is not None:
            self.update(state="stopped", note=first_line(error))

    def beat(self, progress: float) -> None:
        """Note how far it is, if the last note is some time ago."""
        if time.monotonic() - self._last >= BEAT:
            self.update(progress=progress)

    def update(self, **changes: Any) -> None:
        """Set fields of `RunState`, and write."""
        self._last = time.monotonic()
        self._now = replace(self._now, **{**changes, "updated": _now()})
        with suppress(OSError):
            self._directory.write_json(FILE, asdict(self._now))


def state_of(path: Path) -> RunState:
    """What is known of the run in a directory, one of an older version included.

    Raises:
        UsageError: it is no run, or what it wrote cannot be read.
    """
    if not path.is_dir() or not ((path / FILE).is_file() or (path / "recipe.json").is_file()):
        raise UsageError(f"{printable(str(path))} is no directory of a run; crossdraft runs DIR lists those in DIR")
    held = _held(path)
    if not (path / FILE).is_file():
        return _without(path, held)
    found = _read(path / FILE)
    if found.state != "running" or held:
        return found if held is not True else replace(found, state="running")
    if found.host not in ("", socket.gethostname()):
        note = f"it says that it is running on {found.host}, whose processes cannot be seen from here"
        return replace(found, state="unknown", note=note)
    if held is None and _alive(found.pid):  # no lock to go by
        return found
    return replace(found, state="interrupted", note=f"process {found.pid} ended without a word; run it again to go on")


def runs_in(directory: Path) -> list[Path]:
    """The directories of runs in a directory, and of parts of them that were measured apart; or the directory itself.

    Raises:
        UsageError: there is no such directory.
    """
    if not directory.is_dir():
        raise UsageError(
            f"there is no directory {printable(str(directory))}; crossdraft run writes to runs/, or to --out"
        )
    try:
        own = sorted(path for path in directory.iterdir() if path.is_dir())
        parts = [file.parent for path in (directory, *own) for file in sorted(path.glob(f"*/*/{FILE}"))]
        found = [directory] if _is_run(directory) else [path for path in own if _is_run(path)]
        return list(dict.fromkeys([*found, *parts]))
    except OSError as error:
        raise UsageError(f"cannot read {printable(str(directory))}: {error.strerror or error}") from None


# -- pieces -----------------------------------------------------------------------------------------------------


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (FILE, "recipe.json"))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _held(path: Path) -> bool | None:
    """Does a process hold the lock of a run? None where that cannot be seen: no right to write, no locks."""
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
    """Is there a process of that number on this machine?"""
    try:
        os.kill(pid or 0, 0) if pid and os.name == "posix" else None
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return bool(pid)


def _read(file: Path) -> RunState:
    """The file as it was written. Raises UsageError for any other."""
    try:
        return TypeAdapter(RunState).validate_json(read_text(file, CONFIG_BYTES), strict=True)
    except ValidationError:
        what = "is damaged or was written by another version"
        raise UsageError(f"{printable(str(file))} {what}; run the recipe again to have it written anew") from None


def _without(path: Path, held: bool | None) -> RunState:
    """The state of a run that kept no `FILE`, from what else it left."""
    owner = RunDirectory(path).read_json(OWNER)
    pid, host = owner.get("pid"), str(owner.get("host", ""))
    about: dict[str, Any] = {"pid": pid if isinstance(pid, int) else None, "host": host}
    if held:
        return RunState("running", started=str(owner.get("since", "")), **about)
    if not (path / "summary.csv").is_file():
        return RunState(
            "interrupted", note="it was cut off before it wrote summary.csv; run it again to go on", **about
        )
    try:
        rows = list(csv.DictReader(read_text(path / "summary.csv", INDEX_BYTES).splitlines()))
        said = read_text(path / "summary.md", INDEX_BYTES).splitlines() if (path / "summary.md").is_file() else []
    except csv.Error:
        raise UsageError(f"summary.csv of the run {printable(str(path))} is damaged; run its recipe again") from None
    failed = sum(bool(row.get("error")) for row in rows)
    stopped = next((line.removeprefix("- stopped: ") for line in said if line.startswith("- stopped: ")), "")
    interrupted = any(line.startswith("- interrupted: ") for line in said)
    written = datetime.fromtimestamp((path / "summary.csv").stat().st_mtime, UTC).isoformat(timespec="seconds")
    state: State = "interrupted" if interrupted else "stopped" if stopped else "finished"
    cells = len(rows) if state == "finished" else None
    return RunState(state, cells, len(rows) - failed, failed, updated=written, note=stopped, **about)
