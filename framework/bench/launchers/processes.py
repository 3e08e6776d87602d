"""Starting the process of a group, on whatever machine this runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from ...contracts.launcher import Work
from ...errors import UsageError


def start(
    work: Work, environment: Mapping[str, str] | None = None, own_session: bool = False
) -> subprocess.Popen[bytes]:
    """Start it; in a session of its own, where the signals of a terminal do not reach it."""
    with work.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "crossdraft", *work.arguments],
            cwd=work.directory,
            env={**os.environ, **work.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
        )


def run(work: Work) -> str:
    """Start it and wait, as the task of a cluster does; it ends when the task is ended. Returns how it ended."""
    if not (work.directory.is_dir() and work.log.parent.is_dir()):
        raise UsageError(
            f"this machine has no {work.log.parent}; a launcher needs a file system that all machines share"
        )
    process = start(work)
    try:
        return how(process.wait())
    except BaseException:
        process.terminate()
        process.wait()
        raise


def how(code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
