"""A run whose groups are measured by processes of their own, which a launcher starts.

A process is ``crossdraft run RECIPE --shard k/n`` with n the number of groups: it keeps a directory of its own, goes on
where an earlier one was cut short, and decides itself what can be reused. What it has finished is moved into the
directory of the run, which then looks as if one process had measured everything. A process that dies costs its group.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .. import plugins
from ..contracts.launcher import Launcher, Work, Worker
from ..contracts.options import fault
from ..errors import CrossdraftError, UsageError, printable
from ..models.distributed import SPLIT
from ..models.placement import SPREAD
from ..recipe.recipe import CellConfig, Recipe
from ..runs.interrupts import asked
from ..runs.labels import group_title
from ..runs.records import CellResult, Outcome
from ..runs.run_directory import RunDirectory
from ..runs.shards import FILE, Shard, joined
from .matrix import plan
from .run import about, directory_of, notes_of, say

#: Seconds between two looks at the workers.
PATIENCE = 0.2


def launch(
    recipe: Recipe,
    out: Path | str,
    launcher: str,
    command: Sequence[str],
    *,
    options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    untimed: bool = False,
    fail_fast: bool = False,
    say: Callable[[str], None] | None = say,
) -> Outcome:
    """Measure every group of a recipe in a process of its own, and gather what they leave in ``out/<recipe>-<hash>/``.

    Args:
        launcher: the name of a registered one.
        command: what runs this recipe in one process, after ``crossdraft``: ``["run", "recipe.yaml", "--set", ...]``;
            where the records go and which part it is are added.
        options: of the launcher.
        workers: most processes at once; by default as many as the launcher has devices.
        untimed: processes may share a device; nothing that a clock says is kept.
        fail_fast: start nothing more, and end what runs, when a cell has failed.
        say: where progress is told.

    Raises:
        UsageError: the recipe, its prompts or an option is wrong, or the processes would share a device.
        CrossdraftError: no group was measured; with what the processes said.
    """
    if recipe.device == SPLIT:
        raise UsageError(
            f"--launcher and device {SPLIT}: a launcher starts one process for a group, and a split target needs "
            "several; run torchrun ... -m crossdraft run with --shard instead"
        )
    expanded, prompts = plan(recipe), recipe.selected_prompts.load()
    directory = RunDirectory(directory_of(recipe, expanded, out))
    device = recipe.device if isinstance(recipe.device, str) else SPREAD  # a map of one's own
    found = _made(launcher, options or {}, device, not untimed)
    try:
        most = _most(found, workers, not untimed)
        outcome = Outcome(recipe, directory.path, skipped=expanded.skipped, notes=notes_of(expanded.cells, prompts))
        session = _Launch(outcome, directory, found, [*command, "--out", str(out)], expanded.groups(), say or _silent)
        session.fail_fast = fail_fast
        session.tell(f"{recipe.name}: {len(expanded.groups())} groups, a process each ({launcher}, {most} at once)")
        for skipped in expanded.skipped:
            session.tell(f"skipped: {skipped}")
        try:
            with directory.locked():
                directory.write_json("recipe.json", recipe.model_dump(mode="json"))
                plugins.notify("crossdraft_run_started", run=session.about)
                session.run(most)
        except OSError as error:
            if not outcome.results:
                raise UsageError(f"cannot write to {directory.path}: {error.strerror or error}") from None
            outcome.stopped = f"cannot write to {directory.path}: {error.strerror or error}"
    finally:
        found.close()
    if not outcome.results and not outcome.interrupted:
        raise CrossdraftError(outcome.stopped)
    return outcome


def _silent(line: str) -> None:
    pass


def _made(name: str, options: Mapping[str, Any], device: str, timed: bool) -> Launcher:
    kind = plugins.get("launchers", name)
    try:
        with plugins.guarded("launchers", name, "its Config", (CrossdraftError, ValidationError)):
            config = kind.Config(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the options"
        known = ", ".join(sorted(kind.Config.model_fields)) or "none"
        raise UsageError(f"--launcher-option {printable(key)} of {name}: {fault(first)}; it has: {known}") from None
    with plugins.guarded("launchers", name):
        return kind(config, device, timed)


def _most(launcher: Launcher, workers: int | None, timed: bool) -> int:
    """How many processes at once. Raises UsageError for more than there are devices."""
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: at least one process has to measure")
    devices = launcher.devices()
    if devices is None:
        return workers or 10_000  # the launcher's queue sees to it
    if timed and workers is not None and workers > devices:
        raise UsageError(
            f"{workers} workers would share {devices} device{'s' * (devices > 1)}, and each would slow the others "
            f"down; give --workers {devices}, or --untimed if only tokens and block efficiency matter"
        )
    return workers or devices


class _Launch:
    """The processes of a run, and what has become of its groups."""

    fail_fast: bool

    def __init__(
        self,
        outcome: Outcome,
        directory: RunDirectory,
        launcher: Launcher,
        command: Sequence[str],
        groups: Sequence[Sequence[CellConfig]],
        tell: Callable[[str], None],
    ):
        self.outcome, self.directory, self.launcher, self.groups = outcome, directory, launcher, groups
        self.command, self.tell = command, tell
        self.cells = [cell for group in groups for cell in group]
        self.about = about(outcome.recipe, directory.path, len(self.cells))
        self.results: dict[int, list[CellResult]] = {}
        self.lost: dict[int, str] = {}
        self.first_failure = False
        self.environments: list[dict[str, Any]] = []

    def run(self, most: int) -> None:
        waiting, running = deque(range(len(self.groups))), dict[int, Worker]()
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    k = waiting.popleft()
                    running[k] = self.launcher.start(self._work(k))
                ended = {k: how for k, worker in running.items() if (how := worker.poll()) is not None}
                for k, how in ended.items():
                    del running[k]
                    self._gather(k, how)
                if self.first_failure:
                    self.outcome.stopped = "a cell failed, and nothing was run after it (--fail-fast)"
                    break
                if not ended and running:
                    time.sleep(PATIENCE)
        except KeyboardInterrupt:  # what is finished is kept and shown; the exit code tells
            if not asked():
                raise
            self.outcome.interrupted = True
        finally:
            self._end(running)
        self._write(cut_short=self.outcome.interrupted or bool(self.outcome.stopped))

    def _shard(self, k: int) -> Shard:
        return Shard(k + 1, len(self.groups))

    def _title(self, k: int) -> str:
        return f"group {k + 1} of {len(self.groups)} ({group_title(self.groups[k][0], self.cells)})"

    def _work(self, k: int) -> Work:
        directory = self._shard(k).directory(self.directory.path)
        RunDirectory(directory).write_json(FILE, {})  # of an earlier process: this one has not finished anything
        log = directory.parent / f"{directory.name}.log"
        log.write_text("", encoding="utf-8")
        arguments = (*self.command, "--shard", str(self._shard(k)))
        self.tell(f"{self._title(k)}: starting")
        return Work(self._title(k), arguments, Path.cwd(), log.absolute())

    def _gather(self, k: int, how: str) -> None:
        """Take over what a process has finished, which has ended."""
        group, source = self.groups[k], RunDirectory(self._shard(k).directory(self.directory.path))
        head = source.read_json(FILE)
        finished = group[0].group in head.get("finished", ())
        if not finished and self.fail_fast and (failed := head.get("failed")):
            self.results[k] = [CellResult(one, error=failed[one.hash]) for one in group if one.hash in failed]
            self.first_failure = True
            self.tell(f"{self._title(k)}: a cell failed")
            return
        if not finished:
            self.lost[k] = self._reason(k, how)
            self.tell(f"{self._title(k)}: not measured, {self.lost[k]}")
            return
        failed = head["failed"]
        found = [source.load(config) for config in group]
        results = [
            one or CellResult(config, error=failed.get(config.hash)) for one, config in zip(found, group, strict=True)
        ]
        if any(one.metrics is None and one.error is None for one in results):
            self.lost[k] = f"its process {how}, but its records cannot be read"
            return
        known = self.directory.load(group[0])
        new = known is None or (known.measured, known.prompts) != (results[0].measured, results[0].prompts)
        if all(found):
            self.directory.adopt(source, group)
        self.environments.append(source.read_json("environment.json"))
        self.outcome.notes += [note for note in head["notes"] if note not in self.outcome.notes]
        self.results[k] = [replace(one, reused=not new) for one in results]
        if not any(one.planned for one in results):  # pieces to go on from
            shutil.rmtree(source.path, ignore_errors=True)
        self.tell(f"{self._title(k)}: {'measured' if new else 'reused'}")
        for result in results:
            if result.error is not None:
                self.tell(f"failed: {result.config.drafter.title} × {result.config.verifier.title}: {result.error}")
            elif new:
                plugins.notify("crossdraft_cell_finished", run=self.about, cell=result.summary())

    def _reason(self, k: int, how: str) -> str:
        """Why a process has not finished: what it said last, if it said so."""
        log = self._shard(k).directory(self.directory.path).with_suffix(".log")
        try:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        said = [line.partition("error: ")[2] for line in lines if line.startswith("crossdraft: error: ")]
        return said[-1] if said else f"its process {how} before it had finished (see {log})"

    def _end(self, running: dict[int, Worker]) -> None:
        """End the processes that still run; they keep their finished pieces, and a group that was just finished."""
        try:
            for worker in running.values():
                worker.stop()
            while running:
                for k, how in {k: how for k, worker in running.items() if (how := worker.poll()) is not None}.items():
                    del running[k]
                    if self._shard(k).directory(self.directory.path).is_dir():
                        self._gather_quietly(k, how)
                time.sleep(PATIENCE / 4)
        except BaseException:
            for worker in running.values():
                worker.stop(force=True)
            raise

    def _gather_quietly(self, k: int, how: str) -> None:
        tell, self.tell = self.tell, _silent
        try:
            self._gather(k, how)
        finally:
            self.tell = tell

    def _write(self, cut_short: bool) -> None:
        self.outcome.results = [result for k in sorted(self.results) for result in self.results[k]]
        if self.lost and not cut_short:
            each = "; ".join(f"{self._title(k)}: {why}" for k, why in list(self.lost.items())[:3])
            more = f"; and {len(self.lost) - 3} more" if len(self.lost) > 3 else ""
            number = f"{len(self.lost)} of {len(self.groups)} groups were not measured"
            self.outcome.stopped = f"{number}, run again to measure them: {each}{more}"
        reused = any(result.reused for result in self.outcome.results)
        before = [self.directory.read_json("environment.json")] if reused else []
        if environment := joined([*self.environments, *before]):
            self.directory.write_json("environment.json", environment)
