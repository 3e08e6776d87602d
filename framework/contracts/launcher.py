"""Launchers: starters of the processes of ``crossdraft run --launcher NAME``, one per group.

A group is measured by one process with exclusive use of its device, since results are ratios of times. A launcher
reports how many processes can run without sharing a device; more are rejected unless the run is ``--untimed``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .options import Options


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
