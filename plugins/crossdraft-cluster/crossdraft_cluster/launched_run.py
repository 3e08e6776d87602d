"""Run of a recipe by a launcher: one process per group.

Each process is ``crossdraft run RECIPE --shard k/n``, with n the number of groups. It has its own directory, resumes an
interrupted shard and reuses stored results. Its finished cells are moved into the directory of the run, which then is
the same as that of a single process. If a process fails, only its group is lost.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from crossdraft import CrossdraftError, UsageError, printable
from crossdraft.commands import fault
from crossdraft.framework import plugins
from crossdraft.framework.models.placement import SPREAD
from crossdraft.framework.runs.interrupts import user_interrupted
from crossdraft.framework.runs.shards import FILE, Shard, merge_environments
from crossdraft.framework.runs.state import Reporter
from crossdraft.runs import CellResult, RunDirectory, Summary

from .launcher import Launcher, Work, Worker

#: Seconds between two polls of the workers.
POLL_INTERVAL = 0.2


def _make_launcher(name: str, options: Mapping[str, Any], device: str, timed: bool) -> Launcher:
    launcher_class = plugins.get("launchers", name)
    try:
        with plugins.guarded("launchers", name, "its Config", (CrossdraftError, ValidationError)):
            config = launcher_class.Config(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the options"
        option_names = ", ".join(sorted(launcher_class.Config.model_fields)) or "none"
        raise UsageError(
            f"--launcher-option {printable(key)} of {name}: {fault(first)}; options of {name}: {option_names}"
        ) from None
    with plugins.guarded("launchers", name):
        return launcher_class(config, device, timed)


def _max_processes(launcher: Launcher, workers: int | None, timed: bool) -> int:
    """Maximum number of concurrent processes. Raises UsageError if it exceeds the number of devices."""
    devices = launcher.devices()
    if devices is None:
        return workers or 10_000  # the launcher's queue limits them
    if timed and workers is not None and workers > devices:
        raise UsageError(
            f"--workers {workers}: they would share {devices} device{'s' * (devices > 1)} and slow each other down; "
            f"use --workers {devices}, or --untimed if only tokens and block efficiency matter"
        )
    return workers or devices


def _command(config: Any, shard: Shard) -> tuple[str, ...]:
    """Arguments of ``crossdraft`` for the process that measures a shard of a run with this `RunConfig`."""
    command = [*config.command, "--validate", config.validate]
    for name in sorted(config.trust_remote_code):
        command += ["--trust-remote-code", name]
    for program in sorted(config.allow_programs):
        command += ["--allow-program", program]
    if config.step_limit is not None:
        command += ["--step-limit", str(config.step_limit)]
    switches = ("fresh", "retry_failed", "fail_fast", "untimed", "debug")
    command += [f"--{switch.replace('_', '-')}" for switch in switches if getattr(config, switch)]
    return (*command, "--out", str(config.out), "--shard", str(shard))


class Launch:
    """A run whose groups are measured in processes, each in its own, see `bench.run.LocalRun`.

    Raises:
        UsageError: an option is invalid, or the processes would share a device.
    """

    state: Reporter

    def __init__(self, plan: Any, outcome: Summary, limit: Any):
        config, recipe = plan.config, plan.config.recipe
        self.plan, self.outcome, self.limit = plan, outcome, limit
        self.directory = plan.directory
        self.groups, self.log = plan.groups, config.message
        device = recipe.device if isinstance(recipe.device, str) else SPREAD  # an explicit device map
        self.launcher = _make_launcher(config.launcher, config.launcher_options, device, not config.untimed)
        try:
            self.max_processes = _max_processes(self.launcher, config.workers, not config.untimed)
        except BaseException:
            self.close()
            raise
        self.results: dict[int, list[CellResult]] = {}
        self.lost: dict[int, str] = {}
        self.first_failure = False
        self.environments: list[dict[str, Any]] = []

    def close(self) -> None:
        self.launcher.close()

    @property
    def processes(self) -> str:
        return f"one process each ({self.plan.config.launcher}, {self.max_processes} at once)"

    def measure(self) -> None:
        """Measure the groups and collect the results in the directory of the run."""
        waiting, running = deque(range(len(self.groups))), dict[int, Worker]()
        try:
            while waiting or running:
                while waiting and len(running) < self.max_processes:
                    k = waiting.popleft()
                    running[k] = self.launcher.start(self._work(k))
                ended = self._ended(running)
                for k, status in ended.items():
                    self._collect(k, status)
                if self.first_failure:
                    self.outcome.stopped = "a cell failed; the run was stopped (--fail-fast)"
                    break
                if not ended and running:
                    time.sleep(POLL_INTERVAL)
        except KeyboardInterrupt:  # finished results are kept and shown
            if not user_interrupted():
                raise
            self.outcome.interrupted = True
        finally:
            self._end(running)
        self._write(cut_short=self.outcome.interrupted or bool(self.outcome.stopped))
        failed, outcome = len(self.outcome.failed), self.outcome
        counts = {"finished": len(outcome.results) - failed, "failed": failed}
        progress = len(self.results) / len(self.groups)
        self.state.update(**counts, progress=progress, state=outcome.state, note=outcome.stopped)

    def _ended(self, running: dict[int, Worker]) -> dict[int, str]:
        """Remove the processes that have ended; return their exit statuses."""
        ended = {k: status for k, worker in running.items() if (status := worker.poll()) is not None}
        for k in ended:
            del running[k]
        return ended

    def _shard(self, k: int) -> Shard:
        return Shard(k + 1, len(self.groups))

    def _title(self, k: int) -> str:
        return self.groups[k].title

    def _work(self, k: int) -> Work:
        directory = self._shard(k).directory(self.directory.path)
        RunDirectory(directory).write_json(FILE, {})  # replaces that of an earlier process
        log = directory.parent / f"{directory.name}.log"
        log.write_text("", encoding="utf-8")
        arguments = _command(self.plan.config, self._shard(k))
        self.log(f"{self._title(k)}: starting")
        return Work(self._title(k), arguments, Path.cwd(), log.absolute())

    def _collect(self, k: int, status: str) -> None:
        """Collect the results of a process that has ended."""
        group, source = self.groups[k].cells, RunDirectory(self._shard(k).directory(self.directory.path))
        head = source.read_json(FILE)
        finished = group[0].group in head.get("finished", ())
        if not finished and self.plan.config.fail_fast and (failed := head.get("failed")):
            self.results[k] = [
                CellResult(result, error=failed[result.hash]) for result in group if result.hash in failed
            ]
            self.first_failure = True
            self.log(f"{self._title(k)}: a cell failed")
            return
        if not finished:
            self.lost[k] = self._reason(k, status)
            self.log(f"{self._title(k)}: not measured, {self.lost[k]}")
            return
        failed = head["failed"]
        loaded = [source.load(config) for config in group]
        results = [
            result or CellResult(config, error=failed.get(config.hash))
            for result, config in zip(loaded, group, strict=True)
        ]
        if any(result.metrics is None and result.error is None for result in results):
            self.lost[k] = f"its process {status}, but its records are not readable; rerun to measure it"
            return
        stored = self.directory.load(group[0])
        new = stored is None or (stored.measured, stored.prompts) != (results[0].measured, results[0].prompts)
        if all(loaded):
            self.directory.adopt(source, group)
        self.environments.append(source.read_json("environment.json"))
        self.outcome.notes += [note for note in head["notes"] if note not in self.outcome.notes]
        self.results[k] = [replace(result, reused=not new) for result in results]
        if not any(result.planned for result in results):  # keep the pieces for resuming
            shutil.rmtree(source.path, ignore_errors=True)
        self.log(f"{self._title(k)}: {'measured' if new else 'reused'}")
        for result in results:
            if result.error is not None:
                self.log(f"failed: {result.config.drafter.title} × {result.config.verifier.title}: {result.error}")
            elif new:
                plugins.notify("crossdraft_cell_finished", run=self.plan.about, cell=result.summary())

    def _reason(self, k: int, status: str) -> str:
        """Reason why a process has not finished its group: its last error message, if any."""
        log = self._shard(k).directory(self.directory.path).with_suffix(".log")
        try:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        errors = [line.partition("error: ")[2] for line in lines if line.startswith("crossdraft: error: ")]
        return errors[-1] if errors else f"its process {status} before its group was finished (see {log})"

    def _end(self, running: dict[int, Worker]) -> None:
        """Stop the running processes; finished pieces stay on disk, finished groups are collected."""
        self.log = lambda line: None
        try:
            for worker in running.values():
                worker.stop()
            while running:
                for k, status in self._ended(running).items():
                    if self._shard(k).directory(self.directory.path).is_dir():
                        self._collect(k, status)
                time.sleep(POLL_INTERVAL / 4)
        except BaseException:
            for worker in running.values():
                worker.stop(force=True)
            raise

    def _write(self, cut_short: bool) -> None:
        self.outcome.results = [result for k in sorted(self.results) for result in self.results[k]]
        if self.lost and not cut_short:
            reasons = "; ".join(f"{self._title(k)}: {reason}" for k, reason in list(self.lost.items())[:3])
            more = f"; and {len(self.lost) - 3} more" if len(self.lost) > 3 else ""
            number = f"{len(self.lost)} of {len(self.groups)} groups were not measured"
            self.outcome.stopped = f"{number}; rerun to measure them: {reasons}{more}"
        reused = any(result.reused for result in self.outcome.results)
        environments = [self.directory.read_json("environment.json")] if reused else []
        if environment := merge_environments([*self.environments, *environments]):
            self.directory.write_json("environment.json", environment)
