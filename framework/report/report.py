"""Formats of ``crossdraft report``, and what plug-ins add to reports.

A *section* is a function ``section(runs, form)`` that returns Markdown for the end of a report in the format ``form``
("markdown", "html"), or None. A *column* is a function ``column(cell)`` of a finished cell that returns a number, a
text, an estimate or None; it is added to the tables and to ``summary.csv`` under its registered name, and its summary
is its description.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..errors import UsageError


class Report(ABC):
    """A format of ``crossdraft report``, registered through ``crossdraft_register_reports``."""

    #: The registered name: the value of ``--format``.
    name: ClassVar[str]
    #: Options of ``crossdraft report`` that the format reads, besides those of all formats; the others are refused.
    options: ClassVar[tuple[str, ...]] = ()
    #: True for a format of several files: ``--out`` is then their directory.
    files: ClassVar[bool] = False
    #: Text in every file of the format; a file with it is replaced without ``--force``.
    mark: ClassVar[bytes] = b""

    def watch(self, directories: Sequence[Path], port: int) -> None:
        """Serve the report of runs on this machine while they are running, until Ctrl-C (``--watch``)."""
        raise UsageError(f"--watch is not an option of --format {self.name}; remove one of them")

    @abstractmethod
    def render(self, runs: Sequence[Any], options: Any) -> str | Iterator[tuple[Path, bytes]]:
        """Return the text, or for a format of several `files` iterate over them.

        Args:
            runs: finished runs, with the cells of ``--where`` only. A run has ``name`` and ``summary``, with
                ``recipe``, ``directory`` and ``results``; a result has ``config``, ``metrics`` and ``records``.
            options: the options of the command by name.

        Returns:
            a text for standard output or the file of ``--out``; or path and content of each file, with paths relative
            to the directory of ``--out``.

        Raises:
            UsageError: the runs lack what the format needs; raised after the last file, it loses none.
        """
