"""Run of a recipe, group by group (see `bench.group`); results on disk are reused if nothing has changed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

from .. import plugins
from ..errors import CrossdraftError, UsageError
from ..models.environment import describe
from ..recipe.prompts import Prompt
from ..recipe.recipe import CellConfig, Recipe, digest
from ..runs.interrupts import user_interrupted
from ..runs.labels import group_title, verifier_title
from ..runs.readme import FILE as README
from ..runs.readme import readme
from ..runs.records import CellResult, Outcome
from ..runs.run_directory import RunDirectory
from ..runs.shards import FILE, FOLDER, Shard
from ..runs.state import Reporter
from .budget import Budget
from .cell_runner import Models
from .conversations import blocks_of
from .group import Group, GroupEvents, Unwritable
from .matrix import Expansion, expand
from .preflight import preflight
from .progress import Meter, counted
from .provenance import changes, distinct, provenance
from .step_limit import StepLimit


class FirstFailure(CrossdraftError):
    """A failed cell that ends the run (``fail_fast``)."""


def log_to_stderr(line: str) -> None:
    with suppress(OSError):  # a closed pipe or a full disk does not end the run
        print(line, file=sys.stderr, flush=True)


def run(
    recipe: Recipe,
    out: Path | str = "runs",
    *,
    fresh: bool = False,
    retry_failed: bool = False,
    fail_fast: bool = False,
    step_limit: float | None = None,
    validate: str = "sampled",
    trust_remote_code: Iterable[str] = (),
    shard: Shard | None = None,
    untimed: bool = False,
    log: Callable[[str], None] | None = log_to_stderr,
    progress: bool = False,
    debug: bool = False,
    certify: Callable[[Sequence[CellConfig], StepLimit], None] | None = None,
    on_partial: Callable[[Outcome], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run every cell of a recipe and write the records to ``out/<recipe>-<hash>/``.

    A group is reused if all its cells are on disk, in this directory or that of another run of a recipe of the same
    name, and were measured together with the same code, models and prompts. An interrupted group is resumed.

    Args:
        fresh: measure everything, ignoring results on disk.
        retry_failed: measure groups with failed cells again instead of reporting the failures again.
        fail_fast: end the run at the first failed cell.
        step_limit: seconds after which a step is aborted and its cell fails; None = no limit.
        validate: how often drafts and verdicts are checked in full, see `Decoder`.
        trust_remote_code: names of models that may run Python code from their own directories.
        shard: measure only this part of the groups, in its own directory, see `runs.shards`.
        untimed: discard times, for a device shared with other processes.
        log: receives progress messages, one line each; None for no messages.
        progress: show a bar on stderr if it is a terminal.
        debug: log the tracebacks of failed cells.
        certify: called with the cells to measure and the step limit before models are loaded; raises to reject them.
        on_partial: called with intermediate results during a run with a time budget.
        clock: returns seconds, for the time budget and estimates.

    Raises:
        UsageError: the recipe, its prompts or something it names is invalid; raised before anything is measured. Cells
            that fail while they are measured do not raise, see `Outcome.failed`.
    """
    log = log or (lambda _: None)
    expanded, prompts = expand(recipe), recipe.selected_prompts.load()
    directory = RunDirectory(directory_of(recipe, expanded, out, shard))
    session = _Session(recipe, expanded, prompts, directory, Models(trust_remote_code), StepLimit(step_limit), shard)
    session.log, session.validate, session.fail_fast, session.debug = log, validate, fail_fast, debug
    session.out, session.timed, session.certify = Path(out), not untimed, certify
    session.on_partial, session.clock = on_partial, clock
    counts = [counted(sum(map(len, session.groups)), "cell"), counted(len(session.groups), "group")]
    part = f" (shard {shard} of {counted(len(expanded.groups()), 'group')})" if shard else ""
    log(f"{recipe.name}: {counts[0]} in {counts[1]}{part}, {counted(len(prompts), 'prompt')} each")
    for skipped in expanded.skipped:
        log(f"skipped: {skipped}")
    try:
        count = sum(map(len, session.groups))
        with directory.locked(), Reporter(directory, count) as state:
            directory.write_json("recipe.json", recipe.model_dump(mode="json"))
            directory.write_text(README, readme(directory.path.name, recipe, count, len(prompts)))
            log(f"writing tables, charts and steps to {directory.path}; README.md there describes the files")
            session.write_shard()
            session.run(fresh, retry_failed, progress, state)
            session.write_shard()
    except OSError as error:
        if not session.outcome.results:
            raise UsageError(f"cannot write to {directory.path}: {error.strerror or error}") from None
        session.outcome.stopped = f"cannot write to {directory.path}: {error.strerror or error}"
    return session.outcome


def directory_of(recipe: Recipe, expanded: Expansion, out: Path | str, shard: Shard | None = None) -> Path:
    """Directory of a run or of a shard."""
    path = Path(out) / f"{recipe.name}-{expanded.hash}"
    return shard.directory(path) if shard else path


class _Session:
    """State shared by the groups of a run: prompts, loaded models, environment."""

    log: Callable[[str], None]
    validate: str
    fail_fast: bool
    debug: bool
    out: Path
    timed: bool
    certify: Callable[[Sequence[CellConfig], StepLimit], None] | None
    on_partial: Callable[[Outcome], None] | None
    clock: Callable[[], float]

    def __init__(
        self,
        recipe: Recipe,
        expanded: Expansion,
        prompts: Sequence[Prompt],
        directory: RunDirectory,
        models: Models,
        limit: StepLimit,
        shard: Shard | None,
    ):
        self.recipe, self.plan, self.prompts, self.directory = recipe, expanded, prompts, directory
        self.models, self.limit, self.environment = models, limit, describe()
        self.digest = digest([asdict(prompt) for prompt in prompts])
        #: Complete results on disk, without those of interrupted groups.
        self.completed: list[CellResult] = []
        all_groups = expanded.groups()
        self.shard, self.groups = shard, shard.part(all_groups) if shard else all_groups
        self.blocks = blocks_of(prompts, {cell.batch_size for cell in expanded.cells}, Random(recipe.seed))
        self.finished: list[str] = []  # keys of groups
        cells = [cell for group in self.groups for cell in group]
        self.outcome = Outcome(recipe, directory.path, skipped=expanded.skipped, notes=notes_of(cells, prompts))
        self.about = about(recipe, directory.path, len(cells), shard)

    def run(self, fresh: bool, retry_failed: bool, progress: bool, state: Reporter) -> None:
        plugins.notify("crossdraft_run_started", run=self.about)
        groups, cells = self.groups, self.plan.cells
        stored = {}
        for group in groups:
            stored[group[0].group] = (None, "") if fresh else self._stored(group, retry_failed)
        new = [cell for group in groups if stored[group[0].group][0] is None for cell in group]
        if self.certify is not None:
            self.certify(new, self.limit)
        for note in preflight(self.recipe, new, self.prompts, self.models):
            self.outcome.notes.append(note)
            self.log(f"note: {note}")
        budget, meter = self._meter(len(new), progress, state)
        with meter:
            try:
                open_groups: list[Group] = []
                for number, group in enumerate(groups, 1):
                    title = f"group {number} of {len(groups)} ({group_title(group[0], cells)})"
                    results, reason = stored[group[0].group]
                    action = f"{'running' if results is None else 'reusing'} {counted(len(group), 'cell')}"
                    meter.log(f"{title}: {action}{f', {reason}' if reason else ''}")
                    if results is not None:
                        self.outcome.results += results
                        self.completed += results
                    elif budget is not None:
                        open_groups.append(self._group(group, fresh, meter))
                        continue
                    else:
                        self._measure(group, fresh, meter)
                    self._settle(group, meter, state)
                if budget is not None and open_groups:
                    self._measure_within(budget, open_groups, meter)
                    for group in open_groups:
                        self._settle(group.configs, meter, state)
            except KeyboardInterrupt:  # finished results are kept and shown
                if not user_interrupted():
                    raise
                self.outcome.interrupted = True
            except (Unwritable, FirstFailure) as error:
                self.outcome.stopped = str(error)
            order = {cell.hash: i for i, cell in enumerate(cell for group in groups for cell in group)}
            self.outcome.results.sort(key=lambda result: order[result.config.hash])
            cuts = sorted({result.cut for result in self.outcome.results} - {""})
            self.outcome.notes += cuts
            note = self.outcome.stopped or "; ".join(cuts)
            state.update(**self._counts(), progress=meter.share, state=self.outcome.state, note=note)
        self._write_environment()

    def _meter(self, cells: int, progress: bool, state: Reporter) -> tuple[Budget | None, Meter]:
        """Create the time budget, if the recipe has one, and the meter for ``cells`` cells."""
        recipe, prompts, turns = self.recipe, len(self.prompts), sum(len(prompt.turns) for prompt in self.prompts)
        args = (cells * prompts, self.log, progress, state.update_progress, self.clock, cells * turns)
        if recipe.time is None:
            return None, Meter(*args)
        budget = Budget(recipe.time, self.prompts, self.blocks, recipe.max_new_tokens, self.clock)
        callbacks = {
            "max_remaining": lambda pace: budget.max_remaining(pace, cells),
            "budget_warning": lambda pace: budget.warning(pace, cells),
        }
        return budget, Meter(*args, **callbacks)

    def _settle(self, group: Sequence[CellConfig], meter: Meter, state: Reporter) -> None:
        """Update meter and state after a group."""
        self.finished.append(group[0].group)
        meter.group_finished(sum(r.prompts if r.planned else len(self.prompts) for r in self.completed if not r.reused))
        state.update(**self._counts(), progress=meter.share)

    def _counts(self) -> dict[str, int]:
        failed = sum(result.error is not None for result in self.completed)
        return {"finished": len(self.completed) - failed, "failed": failed}

    def _group(self, configs: Sequence[CellConfig], fresh: bool, meter: Meter) -> Group:
        """Create a group to be measured."""

        def failed(result: CellResult) -> None:
            self._failed(result, meter)

        events = GroupEvents(
            meter.warm_up_started,
            meter.cell_started,
            meter.step_finished,
            meter.prompts_finished,
            meter.prompts_skipped,
            meter.piece_finished,
            failed,
            meter.log,
        )
        if fresh:
            self.directory.drop_group(configs[0].group)
        sources = [self._provenance(config) for config in configs]
        return Group(configs, sources, self.directory, self.models, self.limit, events, self.validate, self.timed)

    def _measure(self, configs: Sequence[CellConfig], fresh: bool, meter: Meter) -> None:
        """Measure a group and save its cells; if it is cut short, show its partial results."""
        group = self._group(configs, fresh, meter)
        try:
            group.open(self.prompts, self.blocks)
            group.advance(len(self.blocks))
        finally:
            group.settle()
            self._show(group)
        if group.complete:
            for result in group.results:
                self._save(result)
        self.directory.drop_group(configs[0].group)

    def _show(self, group: Group, blocks: int = 0) -> None:
        """Add the results of a group to the outcome: of ``blocks`` blocks, or of all finished pieces."""
        if not group.complete and group.finished:
            title = group_title(group.configs[0], self.plan.cells)
            position = (
                f"block {blocks} of {len(self.blocks)}" if blocks else f"piece {group.finished} of {group.pieces}"
            )
            self.outcome.notes.append(f"{title}: cut short after {position}")
        results = [r for r in group.results if r.metrics is not None or r.error is not None]
        self.outcome.results += results
        if not group.complete:
            with suppress(OSError):  # the run may have ended because the disk is full
                self.directory.save_partial(results)

    def _measure_within(self, budget: Budget, groups: Sequence[Group], meter: Meter) -> None:
        """Measure the blocks that fit a time budget and save the cells; if cut short, show the partial results."""

        def on_block() -> None:
            if not budget.table_due(sys.stderr.isatty()):
                return
            self._keep(budget, groups)
            if self.on_partial is not None:
                results = [result for group in groups for result in group.results]
                with meter.hidden_bar():
                    self.on_partial(replace(self.outcome, results=self.outcome.results + results))

        try:
            budget.measure(groups, lambda: meter.pace, on_block)
        except BaseException:
            for group in groups:
                group.settle(budget.done or None)
                self._show(group, budget.done)
            raise
        self._keep(budget, groups)
        for group in groups:
            self.outcome.results += group.results
            self.completed += group.results
            for result in group.results:
                self._notify_finished(result)
            if budget.done == len(self.blocks):
                self.directory.drop_group(group.configs[0].group)

    def _keep(self, budget: Budget, groups: Sequence[Group]) -> None:
        """Write the cells of the blocks finished by all groups."""
        complete = budget.done == len(self.blocks)
        for group in groups:
            group.settle(budget.done)
            for result in group.results:
                cut = result.error is None and not complete
                result.planned, result.budget = (len(self.prompts), budget.text) if cut else (None, "")
                self._write(result)

    def _save(self, result: CellResult) -> None:
        self._write(result)
        self.completed.append(result)
        self._notify_finished(result)

    def _write(self, result: CellResult) -> None:
        try:
            self.directory.save(result)
        except OSError as error:
            reason = f"cannot write to {self.directory.path}: {error.strerror or error}"
            raise Unwritable(reason) from None

    def _notify_finished(self, result: CellResult) -> None:
        if result.metrics is not None:
            plugins.notify("crossdraft_cell_finished", run=self.about, cell=result.summary())

    def _failed(self, result: CellResult, meter: Meter) -> None:
        """Report a failed cell."""
        config = result.config
        pair = f"{config.drafter.title} × {verifier_title(config)}"
        meter.log(f"failed: {pair}: {result.error}")
        if self.debug:
            meter.log(result.traceback.rstrip())
        if self.fail_fast:
            raise FirstFailure(f"{pair} failed; the run was stopped (--fail-fast)")

    def _provenance(self, config: CellConfig) -> dict[str, Any]:
        return provenance(config, self.environment, self.digest, self.timed)

    def write_shard(self) -> None:
        """Write the shard's file: all cells of the run, and finished groups and failed cells of the shard."""
        if self.shard is not None:
            head = {"shard": str(self.shard), "cells": [cell.hash for cell in self.plan.cells]}
            failed = {result.config.hash: result.error for result in self.outcome.failed}
            head |= {"finished": self.finished, "failed": failed, "notes": self.outcome.notes}
            self.directory.write_json(FILE, head)

    # -- results on disk -----------------------------------------------------------------------------------

    def _stored(self, group: Sequence[CellConfig], retry_failed: bool) -> tuple[list[CellResult] | None, str]:
        """Return the stored results of a group, or None, with the reason why it is reused or measured again."""
        results, reason = self._stored_in(self.directory, group)
        cut = next((result.cut for result in results or () if result.planned is not None), "")
        if cut:  # its pieces are in this directory
            if retry_failed and any(result.error for result in results or ()):
                self.directory.drop_group(group[0].group)
            return None, f"resuming: {cut.partition(';')[0]}"
        if results is None:
            pattern = f"{self.recipe.name}-????????????"
            candidates = [*sorted(self.out.glob(pattern)), *sorted(self.out.glob(f"{pattern}/{FOLDER}/*-of-*"))]
            for candidate in (RunDirectory(path) for path in candidates if path != self.directory.path):
                cells, _ = self._stored_in(candidate, group)
                if cells is not None and not any(result.planned for result in cells):
                    self.directory.adopt(candidate, group)
                    results, reason = cells, f"measured in {candidate.path.relative_to(self.out)}"
                    break
        if results is None:
            return None, reason
        failed = sum(result.error is not None for result in results)
        if failed and retry_failed:
            return None, f"{counted(failed, 'cell')} failed before"
        if failed:
            reason = f"{counted(failed, 'cell')} failed before; use --retry-failed to measure again"
        return results, reason

    def _stored_in(self, directory: RunDirectory, group: Sequence[CellConfig]) -> tuple[list[CellResult] | None, str]:
        loaded = [directory.load(config) for config in group]
        results = [result for result in loaded if result is not None]
        if not results:
            return None, ""
        if len(results) < len(group) or len({result.measured for result in results}) > 1:
            return None, "some cells are new"
        changed: dict[str, list[str]] = {}
        for result in results:
            for change in changes(result.provenance, self._provenance(result.config)):
                changed.setdefault(change, []).append(result.config.drafter.title)
        if changed:
            text = "; ".join(list(changed)[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            return None, f"measured again because of changes: {text}"
        return results, ""

    def _write_environment(self) -> None:
        """Write ``environment.json`` unless all results were reused."""
        if all(result.reused for result in self.outcome.results):
            return
        models: dict[str, Any] = {}
        for result in self.outcome.results:
            models |= result.provenance.get("models", {})
        prompts = {"source": self.recipe.prompts.source, "count": len(self.prompts)}
        about = self.environment | {"models": models, "prompts": prompts}
        about["conditions"] = distinct(result.provenance for result in self.outcome.results)
        self.directory.write_json("environment.json", about)


def about(recipe: Recipe, directory: Path, cells: int, shard: Shard | None = None) -> dict[str, Any]:
    """Description of a run in plug-in notifications."""
    return {"name": recipe.name, "directory": str(directory), "cells": cells, "shard": str(shard) if shard else ""}


def notes_of(cells: Sequence[CellConfig], prompts: Sequence[Prompt]) -> list[str]:
    batch_sizes = sorted({cell.batch_size for cell in cells if cell.batch_size > len(prompts)})
    prompt_count = counted(len(prompts), "prompt")
    return [
        f"batch size {b} with only {prompt_count}: some slots stay empty; tok/s are those of a smaller batch"
        for b in batch_sizes
    ]
