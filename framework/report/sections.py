"""Sections of reports that plug-ins add (``crossdraft_register_sections``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import plugins
from ..errors import ContractError, quoted

if TYPE_CHECKING:
    from ..cost.load_run import FinishedRun

logger = logging.getLogger(__name__)


def sections_of(runs: Sequence[FinishedRun], form: str) -> list[str]:
    """The Markdown of each section; one that fails is left out with a warning."""
    texts = []
    for name in plugins.entries("sections"):
        try:
            section = plugins.get("sections", name)
            with plugins.guarded("sections", name, "it"):
                text = section(runs, form)
            if not isinstance(text, str | None):
                raise plugins.unusable("sections", name, f"it returned {quoted(text)}; return Markdown or None")
        except ContractError as error:
            logger.warning("crossdraft: left out a section: %s", error)
            continue
        if text:
            texts.append(text)
    return texts
