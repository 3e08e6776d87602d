"""Columns of cells that plug-ins add (``crossdraft_register_columns``)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..errors import ContractError, quoted
from ..metrics.columns import quantity_of
from ..util.estimate import Estimate

if TYPE_CHECKING:
    from .records import CellResult

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def plugin_columns(results: Iterable[CellResult]) -> dict[str, dict[str, Any]]:
    """Values by column and by cell hash, of finished cells; without None, empty and failing columns.

    A column that fails is left out with a warning.
    """
    finished = [result for result in results if result.metrics is not None]
    columns = {}
    for name in plugins.entries("columns"):
        try:
            column = plugins.get("columns", name)
            if not _NAME.fullmatch(name) or quantity_of(name) is not None:
                raise plugins.unusable("columns", name, "its name is not a new name of letters, digits and underscores")
            with plugins.guarded("columns", name, "it"):
                values = {result.config.hash: column(result) for result in finished}
            for value in values.values():
                if not isinstance(value, int | float | str | Estimate | None):
                    raise plugins.unusable(
                        "columns", name, f"it returned {quoted(value)}; return a number, a text, an Estimate or None"
                    )
        except ContractError as error:
            logger.warning("crossdraft: left out a column: %s", error)
            continue
        if values := {key: value for key, value in values.items() if value is not None}:
            columns[name] = values
    return columns
