"""Launchers: starters of the processes of ``crossdraft run --launcher NAME``, one per group.

A group is measured by one process with exclusive use of its device, since results are ratios of times. A launcher
reports how many processes can run without sharing a device; more are rejected unless the run is ``--untimed``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from crossdraft import UsageError
from crossdraft.commands import Options


class LauncherConfig(Options):
    """Base of every launcher's ``Config``, ``--launcher-option KEY=VALUE``: a misspelt key is an error."""


@dataclass(frozen=True)
class Work:
    """Task of one process: ``python -m crossdraft ARGUMENTS`` in a directory.

    Attributes:
        title: title of the group, for display.
        arguments: arguments of the command.
        directory: working directory, with the same path on every machine of the launcher.
        log: absolute path of the file to which standard output and standard error are appended.
        environment: additional environment variables.
    """

    title: str
    arguments: tuple[str, ...]
    directory: Path
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, environment: Mapping[str, str] | None = None, own_session: bool = False) -> subprocess.Popen[bytes]:
        """Start the process on this machine; with ``own_session``, terminal signals do not reach it.

        ``python -m`` imports from the working directory, in which foreign files may lie, only if this process does.
        """
        safe = {} if {"", str(self.directory)} & set(sys.path) else {"PYTHONSAFEPATH": "1"}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "crossdraft", *self.arguments],
                cwd=self.directory,
                env={**os.environ, **safe, **self.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=own_session,
            )

    def run(self) -> str:
        """Run the process as a task of a cluster; it is terminated with the task. Returns the exit status.

        Raises:
            UsageError: the directory of the run does not exist on this machine.
        """
        if not (self.directory.is_dir() and self.log.parent.is_dir()):
            raise UsageError(
                f"directory {self.log.parent} does not exist on this machine; use a shared file system for --out"
            )
        process = self.start()
        try:
            return exit_status(process.wait())
        except BaseException:
            process.terminate()
            process.wait()
            raise


def exit_status(code: int) -> str:
    """Describe how a process ended: "ended with exit code 0", "was killed by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class Worker(ABC):
    """A process that was started."""

    @abstractmethod
    def poll(self) -> str | None:
        """None while it runs, then a description of its end: "ended with exit code 0", "was killed by SIGKILL"."""

    @abstractmethod
    def stop(self, force: bool = False) -> None:
        """Request an orderly end (SIGTERM) or, with ``force``, kill it. Does nothing if it has ended."""


class Launcher(ABC):
    """Starts processes. Registered through ``crossdraft_register_launchers``.

    Args:
        config: options of the launcher.
        device: device of the recipe: ``"auto"``, ``"cpu"``, ``"cuda:1"``, ...; ``"spread"`` also for a device map.
        timed: False for ``--untimed`` runs.

    Raises:
        UsageError: a missing library or cluster, or options under which two groups would share a device.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]] = LauncherConfig

    def __init__(self, config: Any, device: str, timed: bool):
        self.config, self.device, self.timed = config, device, timed

    @abstractmethod
    def devices(self) -> int | None:
        """Maximum number of processes without a shared device; None if a queue ensures that."""

    @abstractmethod
    def start(self, work: Work) -> Worker:
        """Start a process, or put it into a queue."""

    def close(self) -> None:
        """Called after all workers have ended."""
