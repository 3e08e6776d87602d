"""Launchers of processes and experiment trackers for crossdraft."""

from crossdraft import hookimpl


@hookimpl
def crossdraft_register_launchers(register):
    register("local", f"{__name__}.local:Local", summary="local processes, one per device of this machine")
    register("ray", f"{__name__}.ray_cluster:Ray", summary="tasks of a Ray cluster")
    register("slurm", f"{__name__}.slurm:Slurm", summary="jobs of a Slurm cluster, through submitit")


@hookimpl
def crossdraft_register_trackers(register):
    register("mlflow", f"{__name__}.mlflow_runs:Mlflow", summary="MLflow: a run with a nested run per cell")
    register("trackio", f"{__name__}.trackio_runs:Trackio", summary="Trackio: a run per cell, grouped")
