"""Launchers: who starts the processes of ``crossdraft run --launcher NAME``, each of which measures one group.

A group is measured by one process on a device that nothing else uses: its numbers are ratios of times. A launcher
knows how many processes there may be before two of them share a device; more are refused, unless the user has said
that times do not matter (``--untimed``).
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
        title: of the group, for people.
        arguments: of the command.
        directory: to work in; it has this path on every machine that a launcher may choose.
        log: the file that standard output and standard error are appended to, absolute.
        environment: variables beside those that the process has anyway.
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
        """None while it runs; then how it ended, for people: "ended with exit code 0", "was killed by SIGKILL"."""

    @abstractmethod
    def stop(self, force: bool = False) -> None:
        """Ask it to keep what it has and end (SIGTERM), or, with ``force``, end it at once. It may have ended."""


class Launcher(ABC):
    """Starts processes. Registered through ``crossdraft_register_launchers``.

    Args:
        config: its options.
        device: what the recipe says: ``"auto"``, ``"cpu"``, ``"cuda:1"``, ...; ``"spread"`` also for a device map.
        timed: False if the user has said that times do not matter.

    Raises:
        UsageError: a library or a cluster that is not there, options under which two groups would share a device.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]] = LauncherConfig

    def __init__(self, config: Any, device: str, timed: bool):
        self.config, self.device, self.timed = config, device, timed

    @abstractmethod
    def devices(self) -> int | None:
        """Maximum number of processes without a shared device; None if something else ensures that (a queue)."""

    @abstractmethod
    def start(self, work: Work) -> Worker:
        """Start a process, or put it into a queue."""

    def close(self) -> None:
        """All workers have ended."""
