"""Built-in launchers, one per file; see `crossdraft.framework.contracts.launcher`."""

from ...contracts.hookspecs import Register, hookimpl


@hookimpl
def crossdraft_register_launchers(register: Register) -> None:
    register("local", f"{__name__}.local:Local", summary="local processes, one per device of this machine")
    register("ray", f"{__name__}.ray_cluster:Ray", summary="tasks of a Ray cluster")
    register("slurm", f"{__name__}.slurm:Slurm", summary="jobs of a Slurm cluster, through submitit")
