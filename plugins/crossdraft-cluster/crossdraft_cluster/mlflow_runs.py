"""``--track mlflow``: a run in the experiment named after the recipe, with a nested run per cell.

Configured by MLflow's environment variables: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``, ...
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossdraft import UsageError, first_line, hookimpl, need

from .numbers import numbers, options, title

#: Files of a run that are logged as artifacts.
_FILES = ("recipe.json", "environment.json", "summary.csv", "summary.md")
#: MLflow's limits: parameters or metrics per request, characters per parameter.
_BATCH_SIZE, _MAX_VALUE_LENGTH = 100, 500


class Mlflow:
    """Tracker for MLflow, called by the hooks of a run.

    Raises:
        UsageError: MLflow is not installed or not reachable.
    """

    def __init__(self) -> None:
        need("the tracker mlflow", "mlflow", "mlflow", of="plugins/crossdraft-cluster")
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]  # an extra

        try:
            self._client: Any = MlflowClient()
            self._client.search_experiments(max_results=1)
        except Exception as error:  # stores have many error classes
            raise UsageError(f"MLflow is not reachable: {first_line(error)}; check MLFLOW_TRACKING_URI") from None
        self._experiment = self._run = ""

    @hookimpl
    def crossdraft_run_started(self, run: Mapping[str, Any]) -> None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run["name"]
        experiment = self._client.get_experiment_by_name(name)
        self._experiment = experiment.experiment_id if experiment else self._client.create_experiment(name)
        tags = {"crossdraft.directory": run["directory"], "crossdraft.shard": run["shard"]}
        run_name = " ".join([Path(run["directory"]).name, run["shard"]]).strip()
        self._run = self._client.create_run(self._experiment, run_name=run_name, tags=tags).info.run_id

    @hookimpl
    def crossdraft_cell_finished(self, cell: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]  # an extra
        from mlflow.utils.time import get_current_time_millis  # pyright: ignore[reportMissingImports]  # an extra

        tags = {"mlflow.parentRunId": self._run, "crossdraft.cell": cell["id"]}
        run_id = self._client.create_run(self._experiment, run_name=title(cell["config"]), tags=tags).info.run_id
        now = get_current_time_millis()
        parameters = [Param(key, text[:_MAX_VALUE_LENGTH]) for key, text in options(cell["config"]).items()]
        metrics = [Metric(key, float(value), now, 0) for key, value in numbers(cell["metrics"]).items()]
        for i in range(0, max(len(parameters), len(metrics)), _BATCH_SIZE):
            self._client.log_batch(run_id, metrics=metrics[i : i + _BATCH_SIZE], params=parameters[i : i + _BATCH_SIZE])
        self._client.set_terminated(run_id)

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
