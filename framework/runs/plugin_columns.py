"""Columns of cells that plug-ins add (``crossdraft_register_columns``)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..errors import quoted
from ..metrics.columns import quantity_of
from ..util.estimate import Estimate

if TYPE_CHECKING:
    from .records import CellResult

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def plugin_columns(results: Iterable[CellResult]) -> dict[str, dict[str, Any]]:
    """Values by column and by cell hash, of finished cells; without None, empty and failing columns."""
    finished = [result for result in results if result.metrics is not None]

    def values_of(name: str, column: Any) -> dict[str, Any]:
        if not _NAME.fullmatch(name) or quantity_of(name) is not None:
            raise plugins.unusable("columns", name, "its name is not a new name of letters, digits and underscores")
        values = {result.config.hash: column(result) for result in finished}
        for value in values.values():
            if not isinstance(value, int | float | str | Estimate | None):
                raise plugins.unusable(
                    "columns", name, f"it returned {quoted(value)}; return a number, a text, an Estimate or None"
                )
        return {key: value for key, value in values.items() if value is not None}

    return {name: values for name, values in plugins.results("columns", values_of) if values}
