"""Measurement of a group: its cells take turns on one target, piece by piece of the prompts.

- A *cell* is one combination of settings, drafter and verifier.
- A *group* contains the cells that differ only in drafter and verifier, with plain decoding as their baseline.
- A *piece* is a small part of the prompts (one prompt at batch size 1). All cells of a group decode it back to back, in
  random order, so that other load on the machine affects all of them. Finished pieces are written to disk at once, so
  an interrupted group can resume. The steps at the end of a piece, when slots run empty, are its tail (see `Piece`).
- A *block* consists of pieces and has the same prompts in all groups. A time budget ends a run after a block.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from random import Random
from statistics import median_low
from typing import Any

from .. import plugins
from ..api.build import make_slots
from ..api.cell_runner import CellRunner, Conversation
from ..contracts.lm import LM
from ..contracts.models import LoadedModel
from ..errors import CrossdraftError, ModelError, UsageError, message_of
from ..lm.cuda_graphs import recorded_nbytes
from ..lm.idle import free_idle
from ..metrics.cell_metrics import compare, measure
from ..metrics.intervals import LEAST_PIECES
from ..models.device import total_memory
from ..models.placement import input_device
from ..recipe.recipe import CellConfig
from ..recipe.yaml_errors import Places
from ..runs.interrupts import propagate_interrupt
from ..runs.labels import pair_title
from ..runs.records import CellResult, cells_of
from ..runs.run_directory import FORMAT, PieceResult
from ..runs.state import Reporter
from ..runs.threads import describe_threads, disturbance, threads_in_use
from . import memory
from .cells.cell_runner import Cell, Models, lengths
from .cells.conversations import compile_constraints, cut_pieces, prepare_conversations
from .cells.step_limit import StepLimit
from .greedy_differences import agreement, decide
from .plan import Plan, PlannedGroup
from .preflight import notes_on, recipe_place
from .progress import Progress
from .provenance import models_used

logger = logging.getLogger(__name__)

#: Maximum length of a warm-up prompt, in tokens.
MAX_WARM_UP_TOKENS = 512


class FirstFailure(CrossdraftError):
    """A failed cell that ends the run (``fail_fast``)."""


@dataclass
class GroupCell:
    """A cell of a group under measurement.

    Attributes:
        result: set by `GroupRunner.settle`, or at once if the cell fails.
        runner: None while the group is closed, and after a failure.
        depth: maximum depth of its drafts.
        pieces: results of the finished pieces.
    """

    config: CellConfig
    result: CellResult
    runner: CellRunner | None = None
    depth: int = 0
    pieces: list[PieceResult] = field(default_factory=list)

    def settle(self, count: int) -> None:
        """Set the result of the first ``count`` pieces."""
        result, pieces = self.result, self.pieces[:count]
        result.records = [record for part in pieces for record in part.records]
        result.responses = [response for part in pieces for response in part.responses]
        result.pieces = [part.piece for part in pieces]
        gamma = self.config.drafter.config.get("gamma")  # None: no fixed length
        min_depth = min(gamma, self.depth) if isinstance(gamma, int) else 0
        passes = sum(part.passes for part in pieces)
        metrics = result.metrics = measure(result.records, result.pieces, passes, min_depth, self.depth)
        metrics.sequences = len(result.responses)  # also those without a step
        metrics.missed_graphs = sum(part.missed_graphs for part in pieces)
        metrics.peak_memory = max((part.peak_memory for part in pieces if part.peak_memory), default=None)
        for part in pieces:
            for name, numbers in part.other_traffic.items():
                counted, own = metrics.other_traffic.get(name, (0.0, 0.0))
                metrics.other_traffic[name] = (counted + numbers[0], own + numbers[1])


class GroupRunner:
    """Measurement of a group: builds its target and its decoders once, and decodes its pieces.

    Args:
        planned: its cells, the baseline first.
        plan: plan of the run; its directory has the pieces of an interrupted group.
        state, progress: receive the finished share, and messages.
        strict: raise errors of models and options instead of failing cells.

    Attributes:
        cells: the cells; ``results``: theirs.
        pieces: the pieces of the prompts, once the group was opened.
        finished: number of finished pieces.
        notes: notes for readers of the results.
    """

    def __init__(
        self,
        planned: PlannedGroup,
        plan: Plan,
        models: Models,
        limit: StepLimit,
        state: Reporter,
        progress: Progress,
        strict: bool = False,
    ):
        self.planned, self.plan, self.models, self.limit = planned, plan, models, limit
        self.state, self.progress, self.strict = state, progress, strict
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.cells = [
            GroupCell(config, CellResult(config, measured=now, provenance=plan.provenance(config)))
            for config in planned.cells
        ]
        self.results = [cell.result for cell in self.cells]
        self.pieces: list[Sequence[Conversation]] = []
        self.finished = 0
        self.notes: list[str] = []
        self._target: tuple[LoadedModel, LM] | None = None  # and its slots, unless an engine decodes
        self._slot = 0
        self._head: dict[str, Any] = {}  # conditions of the pieces
        self._block_ends: list[int] = []  # number of finished pieces at the end of each block

    @property
    def running(self) -> list[tuple[GroupCell, CellRunner]]:
        """Cells that are built and have not failed."""
        return [(cell, cell.runner) for cell in self.cells if cell.runner is not None]

    @property
    def alive(self) -> int:
        """Number of cells that have not failed."""
        return sum(cell.result.error is None for cell in self.cells)

    @property
    def blocks(self) -> int:
        """Number of finished blocks."""
        return sum(end <= self.finished for end in self._block_ends)

    def open(self) -> None:
        """Build the cells and read the finished pieces from disk. Cells that fail are removed.

        Raises:
            UsageError, ModelError: an invalid model or option, with its place in the recipe, if ``strict``.
            KeyboardInterrupt: the user interrupted the run.
        """
        if self.running or not self.alive:
            return
        free_idle()  # memory of other groups
        strict = self.strict and not self.pieces
        first, recipe = self.cells[0].config, self.plan.config.recipe
        places = recipe.places if strict else Places()
        try:
            with places.at(("target",)):
                target = self.models.target(first)
                conversations = prepare_conversations(self.plan.prompts, target, first.max_new_tokens)
            sequence, self._slot = lengths(conversations, self.planned.cells, target.context_length)
            lm = None if first.engine is not None else make_slots(target, first.batch_size, self._slot)
            self._target = None if lm is None else (target, lm)
            if lm is not None and any(prompt.constraint is not None for prompt in self.plan.prompts):
                conversations = compile_constraints(conversations, target, lm.vocab_size)
        except BaseException as error:
            self._fail(self.cells, error, strict)
            return
        if strict:
            self.notes = notes_on(self.plan.prompts, target.tokenizer)
        typical = median_low([c.prompt_lens[0] for c in conversations])
        warm_up = max(1, min(typical, MAX_WARM_UP_TOKENS, sequence - first.max_new_tokens))
        mask_drafts = any(c.grammar is not None and c.grammar.mask_drafts for c in conversations)
        for cell in self.cells:
            if cell.result.error is not None:
                continue
            with self._attempt(cell, strict and lm is not None):
                config = cell.config
                if lm is None:
                    logs = self.plan.directory.path / "servers" / config.hash
                    engine_runner = plugins.of_companion("runner of engines")
                    cell.runner = engine_runner(config, target, self._slot, logs, self._begin_step)
                else:
                    options = self._begin_step, self.plan.config.validate, mask_drafts
                    with places.at(recipe_place(recipe, config)):
                        cell.runner = Cell(config, target, lm, self.models, sequence, self._slot, *options)
        for cell, runner in self.running:
            cell.depth = runner.depth
            self.progress.start_cell(cell.result, runner)
            with self._attempt(cell):
                runner.warm_up(warm_up)
        if self.pieces:  # opened again
            self._replay()
        else:
            self._cut(conversations)

    def _begin_step(self) -> None:
        self.limit.restart()
        self.progress.estimate_early()

    def _cut(self, conversations: Sequence[Conversation]) -> None:
        """Divide the prompts into pieces, and read those of an earlier process."""
        first, blocks = self.cells[0].config, self.plan.blocks
        for cell in self.cells:
            cell.result.provenance["models"] = models_used(cell.runner.models if cell.runner else {})
            if passes := getattr(self._target and self._target[1], "passes_by", ""):
                cell.result.provenance["passes"] = passes
        random, min_pieces = Random(first.seed), -(-LEAST_PIECES // len(blocks))
        cuts = [cut_pieces([conversations[i] for i in block], first.batch_size, random, min_pieces) for block in blocks]
        self.pieces = [piece for pieces in cuts for piece in pieces]
        self._block_ends = list(accumulate(map(len, cuts)))
        if self.running:
            self._resume()
            for cell in self.cells:
                cell.result.provenance["decoding_threads"] = self._head["threads"]

    def advance(self, blocks: int) -> None:
        """Measure and store pieces until ``blocks`` blocks are finished: each with every cell, in random order."""
        if not self.running:
            return
        for number in range(self.finished, self._block_ends[blocks - 1]):
            piece, results, order = self.pieces[number], dict[str, PieceResult](), self.running
            Random(f"{self.planned.key} {number}").shuffle(order)
            turns = sum(len(conversation.prompt.turns) for conversation in piece)
            if number == 0:  # the first estimate of the duration uses plain decoding
                order.sort(key=lambda item: not item[0].config.is_baseline)
            for cell, runner in order:
                self.progress.start_cell(cell.result, runner)
                with self._attempt(cell):
                    result = runner.run(piece)
                    if self.plan.config.untimed:
                        result.piece = result.piece.untimed()
                    results[cell.config.hash] = result
                self.progress.finish_cell(len(piece), turns)
            self._decide_differences(piece, results)
            self.plan.directory.save_piece(self.planned.key, number, results)
            self.state.update_progress(self.progress.share)
            self.progress.finish_piece()
            for cell in self.cells:
                if cell.config.hash in results:
                    cell.pieces.append(results[cell.config.hash])
            self.finished = number + 1
            self._warn_if_disturbed()

    def close(self) -> None:
        """Free the cells; `open` builds them again."""
        for cell, runner in self.running:
            runner.close()
            cell.runner = None
        self._target = None

    def settle(self, blocks: int | None = None) -> list[CellResult]:
        """Set and return the results of the first ``blocks`` blocks, by default of all finished pieces."""
        pieces = self.finished if blocks is None or not self._block_ends else self._block_ends[blocks - 1]
        for cell in self.cells:
            if cell.result.error is None and cell.pieces and pieces:
                with self._attempt(cell):
                    cell.settle(pieces)
        compare_group(self.results)
        return self.results

    # -- pieces -------------------------------------------------------------------------------------------

    def _decide_differences(self, piece: Sequence[Conversation], results: Mapping[str, PieceResult]) -> None:
        """Compare greedy texts with plain decoding, see `greedy_differences`; an error of a model leaves them open."""
        configs = [cell.config for cell in self.cells if cell.config.hash in results]
        baseline = next((config for config in configs if config.is_baseline), None)
        if self._target is None or baseline is None or baseline.sampling.temperature > 0:
            return
        lossless = [results[c.hash] for c in configs if not c.is_baseline and c.verifier_traits.lossless]
        try:
            decide(piece, lossless, results[baseline.hash], *self._target)
        except (CrossdraftError, RuntimeError) as error:
            self.progress.message(f"differences from plain decoding stay undecided: {message_of(error)}")

    def _resume(self) -> None:
        """Read the pieces of an earlier process, or start over if they do not match."""
        key, message = self.planned.key, self.progress.message
        conditions = {
            cell.config.hash: {key: value for key, value in cell.result.provenance.items() if key != "mark"}
            for cell in self.cells  # without the mark: see `changes`
        }
        pieces = [[c.prompt.index for c in piece] for piece in self.pieces]
        identity = {"format": FORMAT, "cells": conditions, "pieces": pieces}
        head = self.plan.directory.group_head(key)
        if {name: head.get(name) for name in identity} != identity:
            if head:
                message("starting over: the pieces on disk were measured under other conditions")
            self.plan.directory.drop_group(key)
            threads = [{"piece": 1, **threads_in_use()}]
            self._write_head({**identity, "measured": self.results[0].measured, "failed": {}, "threads": threads})
            return
        self._head = head
        for cell in self.cells:
            cell.result.measured = head["measured"]
            if cell.runner is not None and cell.config.hash in head["failed"]:
                self._fail([cell], CrossdraftError(head["failed"][cell.config.hash]))
        while (results := self.plan.directory.load_piece(key, self.finished)) is not None:
            if any(cell.config.hash not in results for cell, _ in self.running):
                break
            for cell, _ in self.running:
                cell.pieces.append(results[cell.config.hash])
            self.finished += 1
        if self.finished:
            message(f"resuming after piece {self.finished} of {len(self.pieces)}")
            self.progress.skip(len(self.cells) * sum(map(len, self.pieces[: self.finished])))
            self._replay()
        self._record_threads()

    def _record_threads(self) -> None:
        """Record the threads of the next piece if they differ from those of the previous one."""
        history = self._head["threads"] if self.finished else []
        current = {"piece": self.finished + 1, **threads_in_use()}
        if history and {**history[-1], "piece": current["piece"]} == current:
            return
        if history:
            new, old = describe_threads(current), describe_threads(history[-1])
            self.progress.message(f"threads from piece {current['piece']}: {new}; before: {old}")
        self._write_head({**self._head, "threads": [*history, current]})

    def _warn_if_disturbed(self) -> None:
        """Warn once a run if the threads of the last piece waited for processors used by other programs."""
        last = [cell.pieces[-1].piece for cell, _ in self.running if cell.pieces]
        steps = [step for piece in last for rows in piece.steps.values() for step in rows]
        wait, seconds = sum(step[4] for step in steps) / 1e6, sum(sum(step[:4]) for step in steps) / 1e6
        warning = disturbance(wait, seconds)
        if warning and not self.plan.disturbed:
            self.plan.disturbed = True
            self.progress.message(warning)

    def _replay(self) -> None:
        """Decode finished pieces again, unmeasured, with the drafters that depend on earlier sequences."""
        for cell, runner in self.running:
            for piece in self.pieces[: self.finished] if runner.remembers else ():
                if cell.runner is not None:
                    with self._attempt(cell):
                        runner.run(piece)

    # -- failures ------------------------------------------------------------------------------------------

    @contextmanager
    def _attempt(self, cell: GroupCell, strict: bool = False) -> Iterator[None]:
        """Run a part of a cell's measurement; an error ends the block and fails this cell only."""
        try:
            yield
        except BaseException as error:  # includes sys.exit in a plug-in
            self._fail([cell], error, strict)
        finally:
            self.limit.stop()

    def _fail(self, cells: Sequence[GroupCell], error: BaseException, strict: bool = False) -> None:
        propagate_interrupt(error)
        if strict and isinstance(error, UsageError | ModelError):
            raise error
        trace = "".join(traceback.format_exception(error))
        for cell in cells:
            if cell.runner is not None:
                cell.runner.close()
                cell.runner = None
            result = cell.result
            result.error, result.traceback, result.metrics = self._reason(error, cell.config), trace, None
            logger.debug("cell %s failed", cell.config.hash, exc_info=error)
            pair = pair_title(result)
            self.progress.message(f"failed: {pair}: {result.error}")
            if self.plan.config.debug:
                self.progress.message(trace.rstrip())
            if self.plan.config.fail_fast:
                raise FirstFailure(f"{pair} failed; the run was stopped (--fail-fast)")
        if self._head:
            self._write_head(self._head)

    def _write_head(self, head: dict[str, Any]) -> None:
        """Write the conditions of the pieces, and the cells that failed."""
        failed = {result.config.hash: result.error for result in self.results if result.error is not None}
        self._head = {**head, "failed": failed}
        self.plan.directory.write_json(f"groups/{self.planned.key}/group.json", self._head)

    def _reason(self, error: BaseException, config: CellConfig) -> str:
        """Reason of a failure; if memory ran out, with the memory that the cell needs."""
        loaded = self.models.of(config)
        if not memory.exhausted(error) or not loaded:
            return message_of(error)
        models = [model.model for model in loaded]
        device = input_device(models[0])
        available, recorded = total_memory(device), recorded_nbytes(device)
        positions = config.drafter_traits.nodes + 1  # of a row, the root included
        return memory.memory_message(models, config.batch_size, self._slot, positions, available, recorded)


def compare_group(results: Sequence[CellResult]) -> None:
    """Set the metrics that need all measured cells of a group, see `compare`."""
    measured = [r for r in results if r.metrics is not None]
    baseline = next((i for i, r in enumerate(measured) if r.config.is_baseline), None)
    compare([r.metrics for r in measured if r.metrics], cells_of(measured), baseline)
    if baseline is None:
        return
    expected = {(r["question_id"], r["turn"]): r["tokens"] for r in measured[baseline].responses}
    for result in measured:
        if result.config.sampling.temperature == 0:
            agreement(result, expected)
