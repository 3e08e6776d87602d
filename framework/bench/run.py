"""Running a recipe: group by group, see `bench.group`; what was measured before and has not changed is reused."""

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
from ..runs.interrupts import asked
from ..runs.labels import group_title, verifier_title
from ..runs.readme import FILE as README
from ..runs.readme import readme
from ..runs.records import CellResult, Outcome
from ..runs.run_directory import RunDirectory
from ..runs.shards import FILE, FOLDER, Shard
from ..runs.state import Reporter
from .budget import Budget
from .cell_runner import Models
from .group import Group, Progress, Unwritable, blocks_of
from .matrix import Plan, plan
from .preflight import preflight
from .progress import Meter, counted
from .provenance import changes, distinct, provenance
from .step_limit import StepLimit


class FirstFailure(CrossdraftError):
    """A cell failed, and the run was to end with the first that does."""


def say(line: str) -> None:
    with suppress(OSError):  # a reader that has left, or a full disk, does not end the run
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
    say: Callable[[str], None] | None = say,
    progress: bool = False,
    debug: bool = False,
    certify: Callable[[Sequence[CellConfig], StepLimit], None] | None = None,
    so_far: Callable[[Outcome], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run every cell of a recipe, and write its records to ``out/<recipe>-<hash>/``.

    A group whose cells are all on disk, measured together from the same code, models and prompts, is not run again; it
    may also lie in the directory of another run of a recipe of this name. A group that was interrupted goes on.

    Args:
        fresh: measure everything, whatever is on disk.
        retry_failed: measure groups again in which a cell failed; without it the failure is reported again.
        fail_fast: end the run with the first cell that fails.
        step_limit: seconds after which a step is given up, and its cell has failed; None = never.
        validate: how often drafts and verdicts are checked in full, see `Decoder`.
        trust_remote_code: names of models that may run Python code from their own directories.
        shard: measure this part of the groups alone, in a directory of its own, see `runs.shards`.
        untimed: keep no times, for others use the device, too.
        say: where progress is told, a line at a time; None to be silent.
        progress: show a bar on standard error, if it is a terminal.
        debug: tell the traceback of a cell that fails, too.
        certify: called with the cells to measure and the limit, before models are loaded; raises what refuses them.
        so_far: called with what there is, now and then while a run with a time budget goes on.
        clock: seconds, for the time budget and estimates.

    Raises:
        UsageError: the recipe or its prompts are wrong, or something it names cannot work: told before anything is
            measured. A cell that fails while it is measured is no error: see `Outcome.failed`.
    """
    tell = say or (lambda _: None)
    expanded, prompts = plan(recipe), recipe.selected_prompts.load()
    directory = RunDirectory(directory_of(recipe, expanded, out, shard))
    session = _Session(recipe, expanded, prompts, directory, Models(trust_remote_code), StepLimit(step_limit), shard)
    session.tell, session.validate, session.fail_fast, session.debug = tell, validate, fail_fast, debug
    session.out, session.timed, session.certify = Path(out), not untimed, certify
    session.so_far, session.clock = so_far, clock
    counts = [counted(sum(map(len, session.groups)), "cell"), counted(len(session.groups), "group")]
    part = f" (shard {shard} of {counted(len(expanded.groups()), 'group')})" if shard else ""
    tell(f"{recipe.name}: {counts[0]} in {counts[1]}{part}, {counted(len(prompts), 'prompt')} each")
    for skipped in expanded.skipped:
        tell(f"skipped: {skipped}")
    try:
        count = sum(map(len, session.groups))
        with directory.locked(), Reporter(directory, count) as state:
            directory.write_json("recipe.json", recipe.model_dump(mode="json"))
            directory.write_text(README, readme(directory.path.name, recipe, count, len(prompts)))
            tell(f"writes tables, charts and every step to {directory.path}; its README.md says what is what")
            session.write_shard()
            session.run(fresh, retry_failed, progress, state)
            session.write_shard()
    except OSError as error:
        if not session.outcome.results:
            raise UsageError(f"cannot write to {directory.path}: {error.strerror or error}") from None
        session.outcome.stopped = f"cannot write to {directory.path}: {error.strerror or error}"
    return session.outcome


def directory_of(recipe: Recipe, expanded: Plan, out: Path | str, shard: Shard | None = None) -> Path:
    """The directory of a run, or of a shard of it."""
    path = Path(out) / f"{recipe.name}-{expanded.hash}"
    return shard.directory(path) if shard else path


class _Session:
    """What the groups of a run have in common: prompts, loaded models, the machine."""

    tell: Callable[[str], None]
    validate: str
    fail_fast: bool
    debug: bool
    out: Path
    timed: bool
    certify: Callable[[Sequence[CellConfig], StepLimit], None] | None
    so_far: Callable[[Outcome], None] | None
    clock: Callable[[], float]

    def __init__(
        self,
        recipe: Recipe,
        expanded: Plan,
        prompts: Sequence[Prompt],
        directory: RunDirectory,
        models: Models,
        limit: StepLimit,
        shard: Shard | None,
    ):
        self.recipe, self.plan, self.prompts, self.directory = recipe, expanded, prompts, directory
        self.models, self.limit, self.environment = models, limit, describe()
        self.digest = digest([asdict(prompt) for prompt in prompts])
        #: Cells that are whole, on disk: all results but those of a group that was cut short.
        self.kept: list[CellResult] = []
        every = expanded.groups()
        self.shard, self.groups = shard, shard.part(every) if shard else every
        self.blocks = blocks_of(prompts, {cell.batch_size for cell in expanded.cells}, Random(recipe.seed))
        self.finished: list[str] = []  # keys of groups
        cells = [cell for group in self.groups for cell in group]
        self.outcome = Outcome(recipe, directory.path, skipped=expanded.skipped, notes=notes_of(cells, prompts))
        self.about = about(recipe, directory.path, len(cells), shard)

    def run(self, fresh: bool, retry_failed: bool, progress: bool, state: Reporter) -> None:
        plugins.notify("crossdraft_run_started", run=self.about)
        groups, cells = self.groups, self.plan.cells
        known = {}
        for group in groups:
            known[group[0].group] = (None, "") if fresh else self._stored(group, retry_failed)
        new = [cell for group in groups if known[group[0].group][0] is None for cell in group]
        if self.certify is not None:
            self.certify(new, self.limit)
        for note in preflight(self.recipe, new, self.prompts, self.models):
            self.outcome.notes.append(note)
            self.tell(f"note: {note}")
        budget, meter = self._meter(len(new), progress, state)
        with meter:
            try:
                begun: list[Group] = []
                for number, group in enumerate(groups, 1):
                    title = f"group {number} of {len(groups)} ({group_title(group[0], cells)})"
                    results, reason = known[group[0].group]
                    what = f"{'running' if results is None else 'reusing'} {counted(len(group), 'cell')}"
                    meter.say(f"{title}: {what}{f', {reason}' if reason else ''}")
                    if results is not None:
                        self.outcome.results += results
                        self.kept += results
                    elif budget is not None:
                        begun.append(self._group(group, fresh, meter))
                        continue
                    else:
                        self._measure(group, fresh, meter)
                    self._settle(group, meter, state)
                if budget is not None and begun:
                    self._measure_within(budget, begun, meter)
                    for group in begun:
                        self._settle(group.configs, meter, state)
            except KeyboardInterrupt:  # what is finished is kept and shown; the exit code tells
                if not asked():
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
        """The time budget, if there is one, and the meter of so many cells."""
        recipe, prompts, turns = self.recipe, len(self.prompts), sum(len(prompt.turns) for prompt in self.prompts)
        given = (cells * prompts, self.tell, progress, state.beat, self.clock, cells * turns)
        if recipe.time is None:
            return None, Meter(*given)
        budget = Budget(recipe.time, self.prompts, self.blocks, recipe.max_new_tokens, self.clock)
        judging = {"most": lambda pace: budget.most(pace, cells), "judge": lambda pace: budget.verdict(pace, cells)}
        return budget, Meter(*given, **judging)

    def _settle(self, group: Sequence[CellConfig], meter: Meter, state: Reporter) -> None:
        """Note that a group is over."""
        self.finished.append(group[0].group)
        meter.settle(sum(r.prompts if r.planned else len(self.prompts) for r in self.kept if not r.reused))
        state.update(**self._counts(), progress=meter.share)

    def _counts(self) -> dict[str, int]:
        failed = sum(result.error is not None for result in self.kept)
        return {"finished": len(self.kept) - failed, "failed": failed}

    def _group(self, configs: Sequence[CellConfig], fresh: bool, meter: Meter) -> Group:
        """A group to be measured."""

        def failed(result: CellResult) -> None:
            self._failed(result, meter)

        told = Progress(meter.warming, meter.at, meter.step, meter.advance, meter.skip, meter.piece, failed, meter.say)
        if fresh:
            self.directory.drop_group(configs[0].group)
        sources = [self._provenance(config) for config in configs]
        return Group(configs, sources, self.directory, self.models, self.limit, told, self.validate, self.timed)

    def _measure(self, configs: Sequence[CellConfig], fresh: bool, meter: Meter) -> None:
        """Measure a group, and keep its cells; of one that is cut short, show what there is."""
        group = self._group(configs, fresh, meter)
        try:
            group.open(self.prompts, self.blocks)
            group.advance(len(self.blocks))
        finally:
            group.settle()
            self._show(group)
        if group.whole:
            for result in group.results:
                self._save(result)
        self.directory.drop_group(configs[0].group)

    def _show(self, group: Group, blocks: int = 0) -> None:
        """Put into the outcome what a group has measured: in so many blocks, or in all its pieces."""
        if not group.whole and group.finished:
            title = group_title(group.configs[0], self.plan.cells)
            where = f"block {blocks} of {len(self.blocks)}" if blocks else f"piece {group.finished} of {group.pieces}"
            self.outcome.notes.append(f"{title}: cut short after {where}")
        found = [r for r in group.results if r.metrics is not None or r.error is not None]
        self.outcome.results += found
        if not group.whole:
            with suppress(OSError):  # the disk may be what ends the run
                self.directory.save_partial(found)

    def _measure_within(self, budget: Budget, groups: Sequence[Group], meter: Meter) -> None:
        """Measure what fits a time budget, and keep its cells; if that is cut short, show what all groups have."""

        def more() -> None:
            if not budget.table_due(sys.stderr.isatty()):
                return
            self._keep(budget, groups)
            if self.so_far is not None:
                results = [result for group in groups for result in group.results]
                with meter.aside():
                    self.so_far(replace(self.outcome, results=self.outcome.results + results))

        try:
            budget.measure(groups, lambda: meter.pace, more)
        except BaseException:
            for group in groups:
                group.settle(budget.done or None)
                self._show(group, budget.done)
            raise
        self._keep(budget, groups)
        for group in groups:
            self.outcome.results += group.results
            self.kept += group.results
            for result in group.results:
                self._tell_finished(result)
            if budget.done == len(self.blocks):
                self.directory.drop_group(group.configs[0].group)

    def _keep(self, budget: Budget, groups: Sequence[Group]) -> None:
        """Write the cells of the blocks that all groups have finished."""
        whole = budget.done == len(self.blocks)
        for group in groups:
            group.settle(budget.done)
            for result in group.results:
                cut = result.error is None and not whole
                result.planned, result.budget = (len(self.prompts), budget.text) if cut else (None, "")
                self._write(result)

    def _save(self, result: CellResult) -> None:
        self._write(result)
        self.kept.append(result)
        self._tell_finished(result)

    def _write(self, result: CellResult) -> None:
        try:
            self.directory.save(result)
        except OSError as error:
            reason = f"cannot write to {self.directory.path}: {error.strerror or error}"
            raise Unwritable(reason) from None

    def _tell_finished(self, result: CellResult) -> None:
        if result.metrics is not None:
            plugins.notify("crossdraft_cell_finished", run=self.about, cell=result.summary())

    def _failed(self, result: CellResult, meter: Meter) -> None:
        """Tell at once what has failed."""
        config = result.config
        pair = f"{config.drafter.title} × {verifier_title(config)}"
        meter.say(f"failed: {pair}: {result.error}")
        if self.debug:
            meter.say(result.traceback.rstrip())
        if self.fail_fast:
            raise FirstFailure(f"{pair} failed, and nothing was run after it (--fail-fast)")

    def _provenance(self, config: CellConfig) -> dict[str, Any]:
        return provenance(config, self.environment, self.digest, self.timed)

    def write_shard(self) -> None:
        """Of a shard: which cells there are in all, which groups it has finished so far, and what of them failed."""
        if self.shard is not None:
            head = {"shard": str(self.shard), "cells": [cell.hash for cell in self.plan.cells]}
            failed = {result.config.hash: result.error for result in self.outcome.failed}
            head |= {"finished": self.finished, "failed": failed, "notes": self.outcome.notes}
            self.directory.write_json(FILE, head)

    # -- what is there already -----------------------------------------------------------------------------

    def _stored(self, group: Sequence[CellConfig], retry_failed: bool) -> tuple[list[CellResult] | None, str]:
        """The whole group as it was measured before; or None, and why it has to be measured again."""
        results, reason = self._stored_in(self.directory, group)
        cut = next((result.cut for result in results or () if result.planned is not None), "")
        if cut:  # the pieces it goes on from are here
            if retry_failed and any(result.error for result in results or ()):
                self.directory.drop_group(group[0].group)
            return None, f"measured before: {cut.partition(';')[0]}"
        if results is None:
            runs = f"{self.recipe.name}-????????????"
            others = [*sorted(self.out.glob(runs)), *sorted(self.out.glob(f"{runs}/{FOLDER}/*-of-*"))]
            for other in (RunDirectory(path) for path in others if path != self.directory.path):
                found, _ = self._stored_in(other, group)
                if found is not None and not any(result.planned for result in found):
                    self.directory.adopt(other, group)
                    results, reason = found, f"measured in {other.path.relative_to(self.out)}"
                    break
        if results is None:
            return None, reason
        failed = sum(result.error is not None for result in results)
        if failed and retry_failed:
            return None, f"{counted(failed, 'cell')} failed before"
        if failed:
            reason = f"{counted(failed, 'cell')} failed before and not tried again (--retry-failed)"
        return results, reason

    def _stored_in(self, directory: RunDirectory, group: Sequence[CellConfig]) -> tuple[list[CellResult] | None, str]:
        found = [directory.load(config) for config in group]
        results = [result for result in found if result is not None]
        if not results:
            return None, ""
        if len(results) < len(group) or len({result.measured for result in results}) > 1:
            return None, "some of its cells are new"
        changed: dict[str, list[str]] = {}
        for result in results:
            for what in changes(result.provenance, self._provenance(result.config)):
                changed.setdefault(what, []).append(result.config.drafter.title)
        if changed:
            shown = "; ".join(list(changed)[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            return None, f"measured again, because these have changed: {shown}"
        return results, ""

    def _write_environment(self) -> None:
        """What the numbers depend on, if any were measured now."""
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
    """What notifications tell about a run."""
    return {"name": recipe.name, "directory": str(directory), "cells": cells, "shard": str(shard) if shard else ""}


def notes_of(cells: Sequence[CellConfig], prompts: Sequence[Prompt]) -> list[str]:
    wide = sorted({cell.batch_size for cell in cells if cell.batch_size > len(prompts)})
    few = counted(len(prompts), "prompt")
    return [f"batch size {b} with only {few}: some slots stay empty, tok/s are those of fewer rows" for b in wide]
