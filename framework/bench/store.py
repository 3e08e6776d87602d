"""Files and outcome of a run, written as its groups are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from .. import plugins
from ..cost.summary import Summary
from ..errors import UsageError
from ..runs.readme import FILE as README
from ..runs.readme import readme
from ..runs.records import CellResult
from ..runs.shards import FILE
from ..runs.state import Reporter
from .plan import Plan
from .provenance import distinct


@contextmanager
def writing(outcome: Summary) -> Iterator[None]:
    """Turn a write error into the reason why the run stopped, or into a UsageError before the first result."""
    try:
        yield
    except OSError as error:
        if not outcome.results:
            raise UsageError(unwritable(outcome, error)) from None
        outcome.stopped = unwritable(outcome, error)


def unwritable(outcome: Summary, error: OSError) -> str:
    return f"cannot write to {outcome.directory}: {error.strerror or error}"


def write_head(plan: Plan, outcome: Summary) -> None:
    """Write the files that exist from the start of a run."""
    recipe, path = plan.config.recipe, plan.directory.path
    plan.directory.write_json("recipe.json", recipe.model_dump(mode="json"))
    plan.directory.write_text(README, readme(path.name, recipe, len(plan.cells), len(plan.prompts)))
    plan.config.message(f"writing tables, charts and steps to {path}; README.md there describes the files")
    _write_shard(plan, outcome, [])


class Store:
    """Writer of the results of a run, to its directory, `Summary` and ``state.json``.

    The directory must be locked. Reused results are stored at once, with the labels of this run.
    """

    def __init__(self, plan: Plan, outcome: Summary, state: Reporter):
        self._plan, self._outcome, self._state = plan, outcome, state
        self._finished: list[str] = []  # keys of groups
        self._counts = {"finished": 0, "failed": 0}
        for group in plan.groups:
            if group.stored is not None:
                self._plan.directory.adopt(group.source or self._plan.directory, group.cells)

    def interrupt(self, results: Sequence[CellResult], note: str) -> None:
        """Add the results of a group that ends before its last piece, and a note for readers or an empty text."""
        self._outcome.notes += [note] if note else []
        self._outcome.results += results
        with suppress(OSError):  # the run may have ended because the disk is full
            self._plan.directory.save_partial(results)

    def finish_groups(
        self, keys: Sequence[str], results: Sequence[CellResult], share: float, complete: bool = True
    ) -> None:
        """Add finished groups; not ``complete`` if a time budget ended them before their last block."""
        self._outcome.results += results
        for result in results:
            if not result.reused:
                self._plan.directory.save(result)
            self._counts["finished" if result.error is None else "failed"] += 1
            if result.metrics is not None and not result.reused:
                plugins.notify("crossdraft_cell_finished", run=self._plan.about, cell=result.summary())
        for key in keys if complete else ():
            self._plan.directory.drop_group(key)
        self._finished += keys
        self._state.update(**self._counts, progress=share)

    def close(self, share: float) -> None:
        """Write the files of the end of a run."""
        outcome = self._outcome
        by_cell = {result.config.hash: result for result in outcome.results}
        outcome.results = [by_cell[cell.hash] for cell in self._plan.cells if cell.hash in by_cell]
        cuts = sorted({result.cut for result in outcome.results} - {""})
        outcome.notes += [*cuts, *_notes_on(outcome.results)]
        note = outcome.stopped or "; ".join(cuts)
        self._state.update(**self._counts, progress=share, state=outcome.state, note=note)
        if not all(result.reused for result in outcome.results):
            prompts = {"source": self._plan.config.recipe.prompts.source, "count": len(self._plan.prompts)}
            about = self._plan.environment | {"models": {}, "prompts": prompts}
            for result in outcome.results:
                about["models"] |= result.provenance.get("models", {})
            about["conditions"] = distinct(result.provenance for result in outcome.results)
            self._plan.directory.write_json("environment.json", about)
        _write_shard(self._plan, outcome, self._finished)


def _notes_on(results: Sequence[CellResult]) -> list[str]:
    """Notes about responses that ended with an error, and passes without a CUDA graph."""
    notes = []
    for result in results:
        config = result.config
        cell = f"{config.drafter.title} x {config.verifier.title}, batch size {config.batch_size}"
        if errors := [response["error"] for response in result.responses if response.get("error")]:
            notes.append(f"{cell}: {len(errors)} of {len(result.responses)} responses ended with an error: {errors[0]}")
        if result.metrics is not None and (missed := result.metrics.missed_graphs):
            notes.append(
                f"{cell}: {missed} passes ran without a CUDA graph, which the warm-up did not record; the cell is "
                "faster than shown"
            )
    return notes


def _write_shard(plan: Plan, outcome: Summary, finished: Sequence[str]) -> None:
    """Write the shard's file: all cells of the run, and finished groups and failed cells of the shard."""
    if (shard := plan.config.shard) is not None:
        head = {"shard": str(shard), "cells": [cell.hash for cell in plan.expansion.cells]}
        failed = {result.config.hash: result.error for result in outcome.failed}
        plan.directory.write_json(FILE, head | {"finished": finished, "failed": failed, "notes": outcome.notes})
