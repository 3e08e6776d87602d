"""Sections of reports that plug-ins add (``crossdraft_register_sections``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..errors import quoted

if TYPE_CHECKING:
    from ..cost.load_run import FinishedRun


def sections_of(runs: Sequence[FinishedRun], form: str) -> list[str]:
    """The Markdown of each section that does not fail."""

    def text_of(name: str, section: Any) -> str | None:
        text = section(runs, form)
        if not isinstance(text, str | None):
            raise plugins.unusable("sections", name, f"it returned {quoted(text)}; return Markdown or None")
        return text

    return [text for _, text in plugins.results("sections", text_of) if text]
