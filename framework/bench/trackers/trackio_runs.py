"""``--track trackio``: a Trackio run for each cell, in the project of the recipe's name, grouped by the run.

Trackio keeps them on this machine (``TRACKIO_DIR``); ``trackio show`` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...contracts.hookspecs import hookimpl
from ...util.extras import need
from .numbers import numbers, options, title


class Trackio:
    """Told of a run by the hooks. Raises UsageError where Trackio is not installed."""

    def __init__(self) -> None:
        need("the tracker trackio", "trackio", "trackio")
        import trackio  # pyright: ignore[reportMissingImports]  # an extra

        self._trackio: Any = trackio

    @hookimpl
    def crossdraft_cell_finished(self, run: Mapping[str, Any], cell: Mapping[str, Any]) -> None:
        config = {"cell": cell["id"], "directory": run["directory"], "shard": run["shard"], **options(cell["config"])}
        name = f"{title(cell['config'])} ({cell['id']})"
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}  # the machine is busy with the run
        self._trackio.init(project=run["name"], name=name, group=Path(run["directory"]).name, config=config, **quiet)
        try:
            self._trackio.log(numbers(cell["metrics"]))
        finally:
            self._trackio.finish()
