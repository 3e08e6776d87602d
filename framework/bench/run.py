"""Run of a recipe, in one direction: plan, measure, store, print.

::

    with opened(make_plan(config)) as run:
        for outcome in run.measure():  # the results so far, whenever a table is due
            print(outcome)
    print(run.outcome)
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import plugins
from ..errors import CrossdraftError, UsageError, printable
from ..recipe.recipe import Recipe
from ..runs.interrupts import user_interrupted
from ..runs.labels import counted
from ..runs.records import CellResult, Outcome
from ..runs.state import Reporter
from ..util.input_files import BROKEN, describe_forbidden_char
from ..util.output_files import check_writable
from .budget import Budget, fit_memory
from .cells.cell_runner import Models
from .cells.step_limit import StepLimit
from .config import RunConfig
from .group_runner import FirstFailure, GroupRunner
from .launch import Launch
from .plan import Plan, make_plan
from .preflight import preflight
from .progress import Progress, hidden_bar
from .store import Store, Unwritable, write_head, writing


def run(recipe: Recipe, out: Path | str = "runs", **options: Any) -> Outcome:
    """Run every cell of a recipe and write the records to ``out/<recipe>-<hash>/``.

    A group is reused if all its cells are on disk, in this directory or that of another run of a recipe of the same
    name, and were measured together with the same code, models and prompts. An interrupted group is resumed.

    Args:
        options: options of `RunConfig`.

    Raises:
        UsageError: the recipe, its prompts, an option or something it names is invalid; raised before anything is
            measured. Cells that fail while they are measured do not raise, see `Outcome.failed`.
        CrossdraftError: a launcher measured no group; contains the errors of its processes.
    """
    with opened(make_plan(RunConfig(recipe, Path(out), **options))) as started:
        for _ in started.measure():
            pass
    return started.outcome


@contextmanager
def opened(plan: Plan) -> Iterator[LocalRun | Launch]:
    """Lock the directory of a run and find the results on disk; a launcher's run leaves that to its processes.

    Raises:
        UsageError: an option is invalid, or another process writes to the directory.
        CrossdraftError: a launcher measured no group; contains the errors of its processes.
    """
    config = plan.config
    _check_out(config.out)
    outcome = Outcome(config.recipe, plan.directory.path, skipped=plan.expansion.skipped, notes=plan.notes)
    if config.launcher:
        launch = Launch(plan, outcome)
        try:
            with writing(outcome):
                yield launch
        finally:
            launch.close()
        if not outcome.results and not outcome.interrupted:
            raise CrossdraftError(outcome.stopped)
        return
    limit, shard = StepLimit(config.step_limit), config.shard
    part = f" (shard {shard} of {counted(len(plan.expansion.groups()), 'group')})" if shard else ""
    cells, groups = counted(len(plan.cells), "cell"), counted(len(plan.groups), "group")
    config.message(f"{config.recipe.name}: {cells} in {groups}{part}, {counted(len(plan.prompts), 'prompt')} each")
    for skipped in plan.expansion.skipped:
        config.message(f"skipped: {skipped}")
    with writing(outcome), plan.directory.locked(), Reporter(plan.directory, len(plan.cells)) as state:
        write_head(plan, outcome)
        plugins.notify("crossdraft_run_started", run=plan.about)
        plan.look_up()
        yield LocalRun(plan, outcome, state, limit)


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


class LocalRun:
    """A run in this process: in one go group by group, or block by block within a time budget.

    Attributes:
        outcome: its results; complete after `measure`.
        new: cells to measure with the loop of this process.
        limit: time limit of a step.
    """

    def __init__(self, plan: Plan, outcome: Outcome, state: Reporter, limit: StepLimit):
        self.plan, self.outcome, self.limit, self._state = plan, outcome, limit, state
        self.new = [cell for cell in plan.new if cell.engine is None]

    def measure(self) -> Generator[Outcome, None, None]:
        """Measure the cells; yield the results so far when a table is due. Closed early, the run is interrupted.

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
        with Progress(len(plan.new), len(prompts), turns, config.message, **options) as progress:
            store = Store(plan, self.outcome, self._state)
            try:
                yield from self._groups(store, progress, models, budget)
            except KeyboardInterrupt:  # finished results are kept and shown
                if not user_interrupted():
                    raise
                self.outcome.interrupted = True
            except GeneratorExit:
                self.outcome.interrupted = True
            except (Unwritable, FirstFailure) as error:
                self.outcome.stopped = str(error)
        store.close(progress.share)

    def _note(self, notes: Sequence[str]) -> None:
        for note in notes:
            if note not in self.outcome.notes:
                self.outcome.notes.append(note)
                self.plan.config.message(f"note: {note}")

    def _groups(self, store: Store, progress: Progress, models: Models, budget: Budget | None) -> Iterator[Outcome]:
        waiting: list[GroupRunner] = []
        strict = True  # the first group: preflight has checked the others
        for planned in self.plan.groups:
            progress.start_group(planned)
            if planned.discard:
                store.directory.drop_group(planned.key)
            if planned.stored is not None:
                store.finish_groups([planned.key], planned.stored, progress.share)
                continue
            runner = GroupRunner(planned, self.plan, models, self.limit, store, progress, strict)
            strict = False
            if budget is None:
                self._measure(runner, store, progress)
            else:
                waiting.append(runner)
        if budget is not None and waiting:
            yield from self._measure_within(budget, waiting, store, progress)

    def _measure(self, runner: GroupRunner, store: Store, progress: Progress) -> None:
        try:
            self._open(runner)
            self._advance(runner, len(self.plan.blocks), store, progress)
        finally:
            runner.close()
            runner.settle()
            if not runner.complete:
                _interrupt(runner, f"piece {runner.finished} of {len(runner.pieces)}", store)
        results = runner.results if runner.complete else []
        progress.finish_groups(results)
        store.finish_groups([runner.planned.key], results, progress.share)

    def _open(self, runner: GroupRunner) -> None:
        runner.open()
        self._note(runner.notes)

    def _advance(self, runner: GroupRunner, blocks: int, store: Store, progress: Progress) -> None:
        """Measure the pieces of a group until ``blocks`` blocks are finished."""
        for number in runner.remaining(blocks):
            store.add(runner.planned.key, number, runner.measure(number), progress.share)
            progress.finish_piece()

    def _measure_within(
        self, budget: Budget, runners: Sequence[GroupRunner], store: Store, progress: Progress
    ) -> Iterator[Outcome]:
        """Measure blocks in all groups while they fit the budget."""
        blocks, clock, opening = len(self.plan.blocks), self.plan.config.clock, 0.0
        share_memory = fit_memory([runner.planned.cells[0] for runner in runners])
        try:
            self._open(runners[0])  # models are loaded and checked before the budget starts
            budget.restart()
            while True:
                all_open = all(runner.running or not runner.alive for runner in runners)
                cells = sum(runner.alive for runner in runners)
                until = budget.next(cells, progress.pace, opening, all_open)
                if until <= budget.done:
                    break
                if budget.done and budget.table_due(sys.stderr.isatty()):
                    results = self._settle(budget, runners)
                    store.save(results)
                    with hidden_bar():
                        yield replace(self.outcome, results=[*self.outcome.results, *results])
                opening = 0.0
                for runner in runners:
                    for other in runners:
                        if other is not runner and not share_memory:
                            other.close()
                    start = clock()
                    self._open(runner)
                    opening += clock() - start
                    self._advance(runner, until, store, progress)
                budget.done = min((runner.blocks for runner in runners if runner.alive), default=blocks)
        except BaseException:
            done = budget.done
            for runner in runners:
                runner.settle(done or None)
                pieces = f"piece {runner.finished} of {len(runner.pieces)}"
                _interrupt(runner, f"block {done} of {blocks}" if done else pieces, store)
            raise
        finally:
            for runner in runners:
                runner.close()
        results = self._settle(budget, runners)
        progress.finish_groups(results)
        keys = [runner.planned.key for runner in runners]
        store.finish_groups(keys, results, progress.share, complete=budget.done == blocks)

    def _settle(self, budget: Budget, runners: Sequence[GroupRunner]) -> list[CellResult]:
        """Results of the blocks finished by all groups."""
        results = [result for runner in runners for result in runner.settle(budget.done)]
        for result in results:
            cut = result.error is None and budget.done < len(self.plan.blocks)
            result.planned, result.budget = (len(self.plan.prompts), budget.text) if cut else (None, "")
        return results


def _interrupt(runner: GroupRunner, position: str, store: Store) -> None:
    """Add the finished part of a group to the results."""
    cut_short = runner.finished and not runner.complete
    note = f"{runner.planned.settings}: cut short after {position}" if cut_short else ""
    store.interrupt([r for r in runner.results if r.metrics is not None or r.error is not None], note)
