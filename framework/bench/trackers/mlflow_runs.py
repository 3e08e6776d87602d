"""``--track mlflow``: a run in the experiment of the recipe's name, and one inside it for each cell.

Where it goes says MLflow's own environment: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``, ...
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...contracts.hookspecs import hookimpl
from ...errors import UsageError, first_line
from ...util.extras import need
from .numbers import numbers, options, title

#: In the directory of a run, what is kept with it.
_FILES = ("recipe.json", "environment.json", "summary.csv", "summary.md")
#: As many parameters, of as many characters, go into one request.
_MOST, _LONGEST = 100, 500


class Mlflow:
    """Told of a run by the hooks.

    Raises:
        UsageError: MLflow is not installed, or cannot be reached.
    """

    def __init__(self) -> None:
        need("the tracker mlflow", "mlflow", "mlflow")
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]  # an extra

        try:
            self._client: Any = MlflowClient()
            self._client.search_experiments(max_results=1)
        except Exception as error:  # a store's own, of many classes
            raise UsageError(f"MLflow cannot be used: {first_line(error)} (MLFLOW_TRACKING_URI says where)") from None
        self._experiment = self._run = ""

    @hookimpl
    def crossdraft_run_started(self, run: Mapping[str, Any]) -> None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run["name"]
        found = self._client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found else self._client.create_experiment(name)
        tags = {"crossdraft.directory": run["directory"], "crossdraft.shard": run["shard"]}
        shown = " ".join([Path(run["directory"]).name, run["shard"]]).strip()
        self._run = self._client.create_run(self._experiment, run_name=shown, tags=tags).info.run_id

    @hookimpl
    def crossdraft_cell_finished(self, cell: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]  # an extra
        from mlflow.utils.time import get_current_time_millis  # pyright: ignore[reportMissingImports]  # an extra

        tags = {"mlflow.parentRunId": self._run, "crossdraft.cell": cell["id"]}
        made = self._client.create_run(self._experiment, run_name=title(cell["config"]), tags=tags).info.run_id
        now = get_current_time_millis()
        parameters = [Param(key, text[:_LONGEST]) for key, text in options(cell["config"]).items()]
        metrics = [Metric(key, float(value), now, 0) for key, value in numbers(cell["metrics"]).items()]
        for i in range(0, max(len(parameters), len(metrics)), _MOST):
            self._client.log_batch(made, metrics=metrics[i : i + _MOST], params=parameters[i : i + _MOST])
        self._client.set_terminated(made)

    @hookimpl
    def crossdraft_run_finished(self, run: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
        if not self._run:
            return
        try:
            for name in _FILES:
                if (file := Path(run["directory"]) / name).is_file():
                    self._client.log_artifact(self._run, str(file))
        finally:
            status = "KILLED" if outcome["interrupted"] else "FAILED" if outcome["exit_code"] else "FINISHED"
            self._client.set_terminated(self._run, status)
