"""The trackers that ship with crossdraft, a file each: they are told of a run where ``--track`` names them."""

from ...contracts.hookspecs import Register, hookimpl


@hookimpl
def crossdraft_register_trackers(register: Register) -> None:
    register("mlflow", f"{__name__}.mlflow_runs:Mlflow", summary="MLflow: a run, and one inside it for each cell")
    register("trackio", f"{__name__}.trackio_runs:Trackio", summary="Trackio: a run for each cell, grouped")
