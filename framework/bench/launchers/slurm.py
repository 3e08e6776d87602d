"""``--launcher slurm``: jobs of a Slurm cluster, handed over by submitit. All its machines see the directory of the run
under the same path, as submitit wants it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ...contracts.launcher import Launcher, LauncherConfig, Work, Worker
from ...errors import UsageError, first_line
from ...util.extras import need
from . import processes


class SlurmConfig(LauncherConfig):
    minutes: int = Field(default=24 * 60, ge=1, description="most that a group may take")
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus: int = Field(default=0, ge=0, description="of a job")
    cpus: int | None = Field(default=None, ge=1, description="of a job")
    memory_gb: int | None = Field(default=None, ge=1, description="of a job")
    exclusive: bool | None = Field(
        default=None, description="a job has its machine to itself; by default where gpus is 0"
    )
    cluster: Literal["slurm", "local"] = Field(
        default="slurm", description="local: processes of this machine, to try it"
    )


class Slurm(Launcher):
    """A job has a GPU or a machine to itself. submitit keeps what it hands over in ``submitit/`` beside the shards."""

    name = "slurm"
    Config = SlurmConfig

    def __init__(self, config: SlurmConfig, device: str, timed: bool):
        super().__init__(config, device, timed)
        need("the launcher slurm", "slurm", "submitit")
        import submitit  # pyright: ignore[reportMissingImports]  # an extra

        self._submitit = submitit
        self._exclusive = config.exclusive if config.exclusive is not None else timed and not config.gpus
        if timed and not self._exclusive and not config.gpus:
            raise UsageError(
                "jobs without a GPU that are not exclusive would share a machine, and slow each other down; leave "
                "exclusive=false out, or add --untimed if only tokens and block efficiency matter"
            )

    def devices(self) -> int | None:
        return 1 if self.config.cluster == "local" else None  # Slurm starts a job when what it asks for is free

    def start(self, work: Work) -> Worker:
        config = self.config
        try:
            executor = self._submitit.AutoExecutor(folder=work.log.parent / "submitit", cluster=config.cluster)
            slurm = {key: getattr(config, key) for key in ("partition", "account", "qos", "constraint")}
            asked: dict[str, Any] = {f"slurm_{key}": value for key, value in slurm.items() if value is not None}
            asked |= {"slurm_exclusive": True} if self._exclusive else {}
            asked |= {"cpus_per_task": config.cpus} if config.cpus is not None else {}
            asked |= {"mem_gb": config.memory_gb} if config.memory_gb is not None else {}
            executor.update_parameters(
                timeout_min=config.minutes, gpus_per_node=config.gpus, name="crossdraft", **asked
            )
            return _Job(executor.submit(processes.run, work))
        except (RuntimeError, OSError, self._submitit.core.utils.FailedJobError) as error:
            raise UsageError(f"Slurm does not take the job: {first_line(error)}") from None


class _Job(Worker):
    def __init__(self, job: Any):
        self._job = job

    def poll(self) -> str | None:
        return f"ended as {self._job.state}" if self._job.done() else None

    def stop(self, force: bool = False) -> None:
        self._job.cancel(check=False)
