"""Run of a recipe, in one direction: plan, measure, store, print.

::

    with opened(make_plan(config)) as run:
        run.measure()
    print(run.outcome)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import plugins
from ..cost.summary import Summary
from ..errors import CrossdraftError, UsageError, printable
from ..recipe.recipe import Recipe
from ..runs.interrupts import user_interrupted
from ..runs.labels import counted
from ..runs.records import CellResult
from ..runs.state import Reporter
from ..util.input_files import BROKEN, describe_forbidden_char
from ..util.output_files import check_writable
from .budget import Budget, fit_memory
from .cells.cell_runner import Models
from .cells.step_limit import StepLimit
from .config import RunConfig
from .group_runner import FirstFailure, GroupRunner
from .plan import Plan, make_plan
from .preflight import preflight
from .progress import Progress
from .store import Store, unwritable, write_head, writing


def run(recipe: Recipe, out: Path | str = "runs", **options: Any) -> Summary:
    """Run every cell of a recipe and write the records to ``out/<recipe>-<hash>/``.

    A group is reused if all its cells are on disk, in this directory or that of another run of a recipe of the same
    name, and were measured together with the same code, models and prompts. An interrupted group is resumed.

    Args:
        options: options of `RunConfig`.

    Raises:
        UsageError: the recipe, its prompts, an option or something it names is invalid; raised before anything is
            measured. Cells that fail while they are measured do not raise, see `Summary.failed`.
        CrossdraftError: a launcher measured no group; contains the errors of its processes.
    """
    with opened(make_plan(RunConfig(recipe, Path(out), **options))) as started:
        started.measure()
    return started.outcome


@contextmanager
def opened(plan: Plan) -> Iterator[LocalRun]:
    """Lock the directory of a run and find the results on disk; a launcher's run leaves that to its processes.

    Raises:
        UsageError: an option is invalid, or another process writes to the directory.
        CrossdraftError: a launcher measured no group; contains the errors of its processes.
    """
    config = plan.config
    _check_out(config.out)
    prompts, outcome = counted(len(plan.prompts), "prompt"), Summary(config.recipe, plan.directory.path)
    outcome.skipped, limit = plan.expansion.skipped, StepLimit(config.step_limit)
    outcome.notes = [
        f"batch size {b} with only {prompts}: some slots stay empty; tok/s are those of a smaller batch"
        for b in sorted({cell.batch_size for cell in plan.cells if cell.batch_size > len(plan.prompts)})
    ]
    shard = f" (shard {config.shard} of {counted(len(plan.expansion.groups), 'group')})" if config.shard else ""
    cells, groups = counted(len(plan.cells), "cell"), counted(len(plan.groups), "group")
    run: Any = LocalRun(plan, outcome, limit)
    if config.launcher:
        plugins.get("launchers", config.launcher)
        run = plugins.of_companion("runner of launchers")(plan, outcome, limit)
    try:
        part = f", {run.processes}" if config.launcher else shard
        config.message(f"{config.recipe.name}: {cells} in {groups}{part}, {prompts} each")
        for skipped in plan.expansion.skipped:
            config.message(f"skipped: {skipped}")
        with writing(outcome), plan.directory.locked(), Reporter(plan.directory, len(plan.cells)) as run.state:
            write_head(plan, outcome)
            plan.started = True
            plugins.notify("crossdraft_run_started", run=plan.about)
            if not config.launcher:
                plan.look_up()
            yield run
    finally:
        if config.launcher:
            run.close()
    if config.launcher and not outcome.results and not outcome.interrupted:
        raise CrossdraftError(outcome.stopped)


def _check_out(out: Path) -> None:
    """Create the parent of the run's directory. Raises UsageError if records with its name cannot be stored there."""
    about = f"--out {printable(str(out))}"
    if (reason := describe_forbidden_char(str(out.absolute()), BROKEN)) is not None:
        raise UsageError(f"{about}: its full name is not UTF-8, it contains {reason}; name another directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{about} cannot be created: {getattr(error, 'strerror', None) or error}") from None
    check_writable(out, about)


@dataclass
class LocalRun:
    """A run in this process: in one go group by group, or block by block within a time budget.

    Attributes:
        outcome: its results; complete after `measure`.
        limit: time limit of a step.
        state: state of the run, for other processes.
    """

    plan: Plan
    outcome: Summary
    limit: StepLimit
    state: Reporter = field(init=False)

    def measure(self) -> None:
        """Measure the cells.

        Raises:
            UsageError, ModelError: something that the recipe names is invalid; raised before anything is measured.
        """
        plan, config, prompts = self.plan, self.plan.config, self.plan.prompts
        models, turns = Models(config.trust_remote_code), sum(len(prompt.turns) for prompt in prompts)
        groups = [group.cells for group in plan.groups if group.stored is None]
        self._note(preflight(config.recipe, groups, prompts, models))
        budget, recipe = None, config.recipe
        if recipe.time is not None:
            budget = Budget(recipe.time, prompts, plan.blocks, recipe.max_new_tokens, config.clock)
        options: dict[str, Any] = {"bar": config.progress, "clock": config.clock, "budget": budget}
        progress = Progress(len(plan.new), len(prompts), turns, config.message, **options)
        with progress.bar:
            store = Store(plan, self.outcome, self.state)
            try:
                self._measure_groups(store, progress, models, budget)
            except KeyboardInterrupt:  # finished results are kept and shown
                if not user_interrupted():
                    raise
                self.outcome.interrupted = True
            except OSError as error:
                self.outcome.stopped = unwritable(self.outcome, error)
            except FirstFailure as error:
                self.outcome.stopped = str(error)
        store.close(progress.share)

    def _note(self, notes: Sequence[str]) -> None:
        for note in notes:
            if note not in self.outcome.notes:
                self.outcome.notes.append(note)
                self.plan.config.message(f"note: {note}")

    def _measure_groups(self, store: Store, progress: Progress, models: Models, budget: Budget | None) -> None:
        waiting: list[GroupRunner] = []
        strict = True  # the first group: preflight has checked the others
        for planned in self.plan.groups:
            progress.start_group(planned)
            if planned.discard:
                self.plan.directory.drop_group(planned.key)
            if planned.stored is not None:
                store.finish_groups([planned.key], planned.stored, progress.share)
                continue
            waiting.append(GroupRunner(planned, self.plan, models, self.limit, self.state, progress, strict))
            strict = False
            if budget is None:
                self._measure(waiting, store, progress)
                waiting.clear()
        if waiting:
            self._measure(waiting, store, progress, budget)

    def _measure(
        self, runners: Sequence[GroupRunner], store: Store, progress: Progress, budget: Budget | None = None
    ) -> None:
        """Measure all blocks of groups, or those that fit a budget: a block in all groups before the next one."""
        blocks, clock, opening, done = len(self.plan.blocks), self.plan.config.clock, 0.0, 0
        share_memory = len(runners) == 1 or fit_memory([runner.planned.cells[0] for runner in runners])
        try:
            runners[0].open()  # models are loaded and checked before the budget starts
            self._note(runners[0].notes)
            if budget is not None:
                budget.restart()
            while done < blocks:
                until = blocks
                if budget is not None:
                    all_open = all(runner.running or not runner.alive for runner in runners)
                    cells = sum(runner.alive for runner in runners)
                    until = budget.next(cells, progress.pace, opening, all_open)
                    if until <= done:
                        break
                    if done and budget.table_due(sys.stderr.isatty()):
                        self._show(runners, done, store)
                opening = 0.0
                for number, runner in enumerate(runners):
                    if budget and number and not done and budget.table_due(sys.stderr.isatty()):
                        self._show(runners[:number], 1, store)
                    for other in runners:
                        if other is not runner and not share_memory:
                            other.close()
                    start = clock()
                    runner.open()
                    opening += clock() - start
                    runner.advance(until)
                done = min((runner.blocks for runner in runners if runner.alive), default=blocks)
                if budget is not None:
                    budget.done = done
        except BaseException:
            for runner in runners:
                results = [r for r in runner.settle(done or None) if r.metrics is not None or r.error is not None]
                position = f"block {done} of {blocks}" if done else f"piece {runner.finished} of {len(runner.pieces)}"
                cut_short = 0 < runner.finished < len(runner.pieces)
                store.interrupt(results, f"{runner.planned.settings}: cut short after {position}" if cut_short else "")
            raise
        finally:
            for runner in runners:
                runner.close()
        results = self._settle(runners, done)
        progress.finish_groups(results)
        keys = [runner.planned.key for runner in runners]
        store.finish_groups(keys, results, progress.share, complete=done == blocks)

    def _show(self, runners: Sequence[GroupRunner], blocks: int, store: Store) -> None:
        """Store the results of the first blocks of groups, and print their tables above the bar."""
        results = [*self.outcome.results, *self._settle(runners, blocks)]
        for result in results:
            if not result.reused:
                self.plan.directory.save(result)
        if self.plan.config.table is None:
            return
        with tqdm.external_write_mode():
            self.plan.config.table(replace(self.outcome, results=results))

    def _settle(self, runners: Sequence[GroupRunner], done: int) -> list[CellResult]:
        """Results of the blocks finished by all groups."""
        results = [result for runner in runners for result in runner.settle(done)]
        for result in results:
            cut = result.error is None and done < len(self.plan.blocks)
            budget = str(self.plan.config.recipe.time)
            result.planned, result.budget = (len(self.plan.prompts), budget) if cut else (None, "")
        return results
