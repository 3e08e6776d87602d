"""Run of a recipe: plan, execute, store.

Groups are measured one by one (see `bench.group`); their events go to the progress, the store and the meter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import plugins
from ..errors import CrossdraftError, UsageError, printable
from ..recipe.recipe import CellConfig, Recipe
from ..runs.interrupts import user_interrupted
from ..runs.labels import counted, verifier_title
from ..runs.records import CellResult, Outcome
from ..runs.state import Reporter
from ..util.input_files import BROKEN, flaw
from ..util.output_files import check_writable
from .budget import Budget, fit_memory
from .cells.cell_runner import Models
from .cells.step_limit import StepLimit
from .config import RunConfig
from .events import (
    BlocksFinished,
    CellFailed,
    Emit,
    Event,
    GroupInterrupted,
    GroupsFinished,
    GroupStarted,
)
from .group import Group
from .launch import launch
from .meter import Meter, hidden_bar
from .plan import Plan, plan
from .preflight import preflight
from .progress import Progress
from .store import Store, Unwritable, write_head, writing


class FirstFailure(CrossdraftError):
    """A failed cell that ends the run (``fail_fast``)."""


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
    config = RunConfig(recipe, Path(out), **options)
    planned = plan(config)
    _check_out(config.out)
    return (launch if config.launcher else execute)(planned)


def _check_out(out: Path) -> None:
    """Create the parent of the run's directory. Raises UsageError if records with its name cannot be stored there."""
    about = f"--out {printable(str(out))}"
    if (reason := flaw(str(out.absolute()), BROKEN)) is not None:
        raise UsageError(f"{about}: its full name is not UTF-8, it contains {reason}; name another directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{about} cannot be created: {getattr(error, 'strerror', None) or error}") from None
    check_writable(out, about)


def execute(plan: Plan) -> Outcome:
    """Measure the groups of a plan that are not on disk.

    Raises:
        UsageError: something that the recipe names is invalid; raised before anything is measured.
    """
    config, recipe = plan.config, plan.config.recipe
    models, limit = Models(config.trust_remote_code), StepLimit(config.step_limit)
    _announce(plan)
    outcome = Outcome(recipe, plan.directory.path, skipped=plan.expansion.skipped, notes=plan.notes)
    with writing(outcome), plan.directory.locked(), Reporter(plan.directory, len(plan.cells)) as state:
        write_head(plan, outcome)
        plugins.notify("crossdraft_run_started", run=plan.about)
        plan.look_up()
        new = plan.new
        if config.certify is not None:
            config.certify([cell for cell in new if cell.engine is None], limit)
        for note in preflight(recipe, new, plan.prompts, models):
            outcome.notes.append(note)
            config.message(f"note: {note}")
        progress = _progress(plan, new)
        store = Store(plan, outcome, state, progress)
        with Meter(progress, config.message, config.progress, config.clock, config.debug) as meter:
            try:
                _Execution(plan, models, limit, outcome, progress, (progress, store, meter)).run()
            except KeyboardInterrupt:  # finished results are kept and shown
                if not user_interrupted():
                    raise
                outcome.interrupted = True
            except (Unwritable, FirstFailure) as error:
                outcome.stopped = str(error)
        store.close()
    return outcome


def _announce(plan: Plan) -> None:
    message, shard = plan.config.message, plan.config.shard
    counts = [counted(len(plan.cells), "cell"), counted(len(plan.groups), "group")]
    part = f" (shard {shard} of {counted(len(plan.expansion.groups()), 'group')})" if shard else ""
    message(f"{plan.config.recipe.name}: {' in '.join(counts)}{part}, {counted(len(plan.prompts), 'prompt')} each")
    for skipped in plan.expansion.skipped:
        message(f"skipped: {skipped}")


def _progress(plan: Plan, new: Sequence[CellConfig]) -> Progress:
    """Create the progress, with the time budget if the recipe has one."""
    recipe, prompts, clock, budget = plan.config.recipe, plan.prompts, plan.config.clock, None
    if recipe.time is not None:
        budget = Budget(recipe.time, prompts, plan.blocks, recipe.max_new_tokens, clock)
    return Progress(len(new), len(prompts), sum(len(prompt.turns) for prompt in prompts), clock, budget)


class _Execution:
    """Measurement of the groups, in one go each, or block by block within a time budget."""

    def __init__(
        self,
        plan: Plan,
        models: Models,
        limit: StepLimit,
        outcome: Outcome,
        progress: Progress,
        consumers: Sequence[Callable[[Event], None]],
    ):
        self.plan, self.models, self.limit, self.outcome, self.progress = plan, models, limit, outcome, progress
        self.consumers = consumers

    def emit(self, event: Event) -> None:
        for consumer in self.consumers:
            consumer(event)
        if isinstance(event, CellFailed) and self.plan.config.fail_fast:
            config = event.result.config
            pair = f"{config.drafter.title} × {verifier_title(config)}"
            raise FirstFailure(f"{pair} failed; the run was stopped (--fail-fast)")

    def run(self) -> None:
        groups: list[Group] = []
        for planned in self.plan.groups:
            self.emit(GroupStarted(planned))
            if planned.stored is not None:
                self.emit(GroupsFinished([planned.key], planned.stored))
                continue
            group = Group(planned, self.plan, self.models, self.limit, self.emit)
            if self.progress.budget is None:
                self._measure(group)
            else:
                groups.append(group)
        if self.progress.budget is not None and groups:
            self._measure_within(self.progress.budget, groups)

    def _measure(self, group: Group) -> None:
        complete = False
        try:
            group.open()
            group.advance(len(self.plan.blocks))
            complete = group.complete
        finally:
            group.close()
            group.settle()
            if not complete:
                _interrupted(group, f"piece {group.finished} of {group.pieces}", self.emit)
        self.emit(GroupsFinished([group.planned.key], group.results if complete else []))

    def _measure_within(self, budget: Budget, groups: Sequence[Group]) -> None:
        """Measure blocks in all groups while they fit the budget."""
        blocks, on_partial = len(self.plan.blocks), self.plan.config.on_partial
        opening = 0.0
        budget.restart()
        try:
            while (until := self._next(budget, groups, opening)) > budget.done:
                if budget.done and budget.table_due(sys.stderr.isatty()):
                    results = self._settle(budget, groups)
                    self.emit(BlocksFinished(results))
                    if on_partial is not None:
                        with hidden_bar():
                            on_partial(replace(self.outcome, results=[*self.outcome.results, *results]))
                opening = self._advance(groups, until)
                budget.done = min((group.blocks for group in groups if group.alive), default=blocks)
        except BaseException:
            done = budget.done
            for group in groups:
                group.settle(done or None)
                position = f"block {done} of {blocks}" if done else f"piece {group.finished} of {group.pieces}"
                _interrupted(group, position, self.emit)
            raise
        finally:
            for group in groups:
                group.close()
        keys = [group.planned.key for group in groups]
        self.emit(GroupsFinished(keys, self._settle(budget, groups), complete=budget.done == blocks))

    def _next(self, budget: Budget, groups: Sequence[Group], opening: float) -> int:
        all_open = all(group.is_open or not group.alive for group in groups)
        return budget.next(sum(group.alive for group in groups), self.progress.pace, opening, all_open)

    def _advance(self, groups: Sequence[Group], blocks: int) -> float:
        """Measure until ``blocks`` blocks are finished. Returns the seconds that opening the groups took."""
        clock, opening = self.plan.config.clock, 0.0
        share_memory = fit_memory([group.configs[0] for group in groups])
        for group in groups:
            for other in groups:
                if other is not group and not share_memory:
                    other.close()
            start = clock()
            group.open()
            opening += clock() - start
            group.advance(blocks)
        return opening

    def _settle(self, budget: Budget, groups: Sequence[Group]) -> list[CellResult]:
        """Results of the blocks finished by all groups."""
        for group in groups:
            group.settle(budget.done)
        results = [result for group in groups for result in group.results]
        for result in results:
            cut = result.error is None and budget.done < len(self.plan.blocks)
            result.planned, result.budget = (len(self.plan.prompts), budget.text) if cut else (None, "")
        return results


def _interrupted(group: Group, position: str, emit: Emit) -> None:
    """Report the finished part of a group."""
    cut_short = group.finished and not group.complete
    note = f"{group.planned.settings}: cut short after {position}" if cut_short else ""
    results = [result for result in group.results if result.metrics is not None or result.error is not None]
    emit(GroupInterrupted(results, note))
