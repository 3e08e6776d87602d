"""Processes of groups, started on the local machine."""

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
    """Start the process; with ``own_session``, terminal signals do not reach it.

    ``python -m`` imports from the working directory, in which foreign files may lie, only if this process does.
    """
    safe = {} if {"", str(work.directory)} & set(sys.path) else {"PYTHONSAFEPATH": "1"}
    with work.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "crossdraft", *work.arguments],
            cwd=work.directory,
            env={**os.environ, **safe, **work.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
        )


def run(work: Work) -> str:
    """Run the process as a task of a cluster; it is terminated with the task. Returns the exit status."""
    if not (work.directory.is_dir() and work.log.parent.is_dir()):
        raise UsageError(
            f"directory {work.log.parent} does not exist on this machine; use a shared file system for --out"
        )
    process = start(work)
    try:
        return exit_status(process.wait())
    except BaseException:
        process.terminate()
        process.wait()
        raise


def exit_status(code: int) -> str:
    """Describe how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
