"""``--track trackio``: a Trackio run per cell, in the project named after the recipe, grouped by run.

Trackio stores them on this machine (``TRACKIO_DIR``); view them with ``trackio show``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossdraft import hookimpl, need

from .numbers import numbers, options, title


class Trackio:
    """Tracker for Trackio, called by the hooks of a run. Raises UsageError if Trackio is not installed."""

    def __init__(self) -> None:
        need("the tracker trackio", "trackio", "trackio", of="plugins/crossdraft-cluster")
        import trackio  # pyright: ignore[reportMissingImports]  # an extra

        self._trackio: Any = trackio

    @hookimpl
    def crossdraft_cell_finished(self, run: Mapping[str, Any], cell: Mapping[str, Any]) -> None:
        config = {"cell": cell["id"], "directory": run["directory"], "shard": run["shard"], **options(cell["config"])}
        name = f"{title(cell['config'])} ({cell['id']})"
        disabled = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}  # the run must not be disturbed
        self._trackio.init(project=run["name"], name=name, group=Path(run["directory"]).name, config=config, **disabled)
        try:
            self._trackio.log(numbers(cell["metrics"]))
        finally:
            self._trackio.finish()
