"""``--launcher slurm``: jobs of a Slurm cluster, by submitit. All machines must share the directory of the run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from crossdraft import UsageError, first_line, need, own_directory

from .launcher import Launcher, LauncherConfig, Work, Worker


class SlurmConfig(LauncherConfig):
    minutes: int = Field(default=24 * 60, ge=1, description="time limit of a group")
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus: int = Field(default=0, ge=0, description="GPUs per job")
    cpus: int | None = Field(default=None, ge=1, description="CPUs per job")
    memory_gb: int | None = Field(default=None, ge=1, description="memory per job")
    exclusive: bool | None = Field(default=None, description="exclusive use of a machine; by default if gpus is 0")
    cluster: Literal["slurm", "local"] = Field(
        default="slurm", description="local: processes of this machine, for tests"
    )


class Slurm(Launcher):
    """Slurm jobs with exclusive use of a GPU or a machine. submitit writes to ``submitit/`` beside the shards."""

    name = "slurm"
    Config = SlurmConfig

    def __init__(self, config: SlurmConfig, device: str, timed: bool):
        super().__init__(config, device, timed)
        need("the launcher slurm", "slurm", "submitit", of="plugins/crossdraft-cluster")
        import submitit  # pyright: ignore[reportMissingImports]  # an extra

        self._submitit = submitit
        self._exclusive = config.exclusive if config.exclusive is not None else timed and not config.gpus
        if timed and not self._exclusive and not config.gpus:
            raise UsageError(
                "exclusive=false: jobs without a GPU would share a machine and slow each other down; remove it, or add "
                "--untimed if only tokens and block efficiency matter"
            )

    def devices(self) -> int | None:
        return 1 if self.config.cluster == "local" else None  # Slurm queues jobs until their resources are free

    def start(self, work: Work) -> Worker:
        config = self.config
        try:
            folder = own_directory(work.log.parent / "submitit", "--out")  # of pickles, which jobs execute
            executor = self._submitit.AutoExecutor(folder=folder, cluster=config.cluster)
            options = {key: getattr(config, key) for key in ("partition", "account", "qos", "constraint")}
            parameters: dict[str, Any] = {f"slurm_{key}": value for key, value in options.items() if value is not None}
            parameters |= {"slurm_exclusive": True} if self._exclusive else {}
            parameters |= {"cpus_per_task": config.cpus} if config.cpus is not None else {}
            parameters |= {"mem_gb": config.memory_gb} if config.memory_gb is not None else {}
            executor.update_parameters(
                timeout_min=config.minutes, gpus_per_node=config.gpus, name="crossdraft", **parameters
            )
            return _Job(executor.submit(Work.run, work))
        except (RuntimeError, OSError, self._submitit.core.utils.FailedJobError) as error:
            raise UsageError(f"Slurm rejected the job: {first_line(error)}") from None


class _Job(Worker):
    def __init__(self, job: Any):
        self._job = job

    def poll(self) -> str | None:
        return f"ended as {self._job.state}" if self._job.done() else None

    def stop(self, force: bool = False) -> None:
        self._job.cancel(check=False)
