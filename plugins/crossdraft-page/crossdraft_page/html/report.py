"""The HTML page as a format of ``crossdraft report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from crossdraft import Report

from .document import MARK, html_page

if TYPE_CHECKING:
    from crossdraft.runs import FinishedRun


class HtmlReport(Report):
    """The page of `html_page`."""

    name: ClassVar[str] = "html"
    mark: ClassVar[bytes] = MARK

    def watch(self, directories: Sequence[Path], port: int) -> None:
        from .watch import watch

        watch(directories, port)

    def render(self, runs: Sequence[FinishedRun], options: Any) -> str:
        return html_page(runs)
