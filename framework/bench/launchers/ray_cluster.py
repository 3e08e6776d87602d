"""``--launcher ray``: tasks of a Ray cluster. All its machines see the directory of the run under the same path."""

from __future__ import annotations

import signal
import threading
from typing import Any

from pydantic import Field

from ...contracts.launcher import Launcher, LauncherConfig, Work, Worker
from ...errors import UsageError, first_line
from ...util.extras import need
from . import processes


class RayConfig(LauncherConfig):
    address: str | None = Field(
        default=None, description="of the cluster; by default RAY_ADDRESS, or one of this machine"
    )
    gpus: int | None = Field(default=None, ge=0, description="of a task; by default 1, where the cluster has any")
    cpus: int | None = Field(
        default=None, ge=1, description="of a task; by default all of a machine, or 1 beside a GPU"
    )


class Ray(Launcher):
    """A task has a GPU, or where there is none, all processors of a machine, to itself."""

    name = "ray"
    Config = RayConfig

    def __init__(self, config: RayConfig, device: str, timed: bool):
        super().__init__(config, device, timed)
        need("the launcher ray", "ray", "ray")
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        self._ray, self._mine = ray, not ray.is_initialized()
        if self._mine:
            self._connect()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        whole = max((int(node.get("CPU", 0)) for node in nodes), default=0)
        self._gpus = config.gpus
        if self._gpus is None:
            self._gpus = int(device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes))
        self._cpus = config.cpus or (whole if timed and not self._gpus else 1)
        if timed and not self._gpus and self._cpus < whole:
            self.close()
            raise UsageError(
                f"tasks with {self._cpus} of a machine's {whole} processors would share it, and slow each other down; "
                "leave cpus out, or add --untimed if only tokens and block efficiency matter"
            )

    def _connect(self) -> None:
        """Ray takes SIGTERM for itself, which ends a run as Ctrl-C does."""
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM)
        try:
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
            self._ray.init(address=self.config.address, **(quiet if self.config.address is None else {}))
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(f"there is no Ray cluster at {self.config.address}: {first_line(error)}") from None
        finally:
            if main:
                signal.signal(signal.SIGTERM, before)

    def devices(self) -> None:
        return None  # Ray starts a task when what it asks for is free

    def start(self, work: Work) -> Worker:
        task = self._ray.remote(processes.run)
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
        except Exception as error:  # Ray's own, of many classes; those of a task are wrapped in them
            return f"was lost ({first_line(error)})"

    def stop(self, force: bool = False) -> None:
        self._ray.cancel(self._reference, force=force)
