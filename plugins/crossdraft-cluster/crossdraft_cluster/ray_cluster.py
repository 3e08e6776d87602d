"""``--launcher ray``: tasks of a Ray cluster. All machines must share the directory of the run."""

from __future__ import annotations

import signal
import threading
from typing import Any

from pydantic import Field

from crossdraft import UsageError, first_line, need

from .launcher import Launcher, LauncherConfig, Work, Worker


class RayConfig(LauncherConfig):
    address: str | None = Field(
        default=None, description="address of the cluster; by default RAY_ADDRESS, or a local one"
    )
    gpus: int | None = Field(default=None, ge=0, description="GPUs per task; by default 1 if the cluster has GPUs")
    cpus: int | None = Field(
        default=None, ge=1, description="CPUs per task; by default 1 with a GPU, else all of a machine"
    )


class Ray(Launcher):
    """Ray tasks, each with exclusive use of a GPU, or of all CPUs of a machine without GPUs."""

    name = "ray"
    Config = RayConfig

    def __init__(self, config: RayConfig, device: str, timed: bool):
        super().__init__(config, device, timed)
        need("the launcher ray", "ray", "ray", of="plugins/crossdraft-cluster")
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        self._ray, self._mine = ray, not ray.is_initialized()
        if self._mine:
            self._connect()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        max_cpus = max((int(node.get("CPU", 0)) for node in nodes), default=0)
        self._gpus = config.gpus
        if self._gpus is None:
            self._gpus = int(device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes))
        self._cpus = config.cpus or (max_cpus if timed and not self._gpus else 1)
        if timed and not self._gpus and self._cpus < max_cpus:
            self.close()
            raise UsageError(
                f"cpus={self._cpus}: tasks would share a machine with {max_cpus} CPUs and slow each other down; "
                "remove cpus, or add --untimed if only tokens and block efficiency matter"
            )

    def _connect(self) -> None:
        """Connect to Ray, and restore the SIGTERM handler that it replaces."""
        main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
            self._ray.init(address=self.config.address, **(options if self.config.address is None else {}))
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(f"cannot connect to a Ray cluster at {self.config.address}: {first_line(error)}") from None
        finally:
            if main:
                signal.signal(signal.SIGTERM, handler)

    def devices(self) -> None:
        return None  # Ray queues tasks until their resources are free

    def start(self, work: Work) -> Worker:
        task = self._ray.remote(Work.run)
        options = {"num_cpus": self._cpus, "num_gpus": self._gpus, "max_retries": 0, "name": work.title}
        return _Task(self._ray, task.options(**options).remote(work))

    def close(self) -> None:
        if self._mine:
            self._ray.shutdown()


class _Task(Worker):
    def __init__(self, ray: Any, reference: Any):
        self._ray, self._reference = ray, reference

    def poll(self) -> str | None:
        ready, _ = self._ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            return self._ray.get(self._reference)
        except Exception as error:  # Ray has many error classes, which also wrap those of tasks
            return f"was lost ({first_line(error)})"

    def stop(self, force: bool = False) -> None:
        self._ray.cancel(self._reference, force=force)
