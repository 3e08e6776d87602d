"""Built-in experiment trackers, one per file, enabled by ``--track``."""

from ...contracts.hookspecs import Register, hookimpl


@hookimpl
def crossdraft_register_trackers(register: Register) -> None:
    register("mlflow", f"{__name__}.mlflow_runs:Mlflow", summary="MLflow: a run with a nested run per cell")
    register("trackio", f"{__name__}.trackio_runs:Trackio", summary="Trackio: a run per cell, grouped")
