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
from collections.abc import Callable, Mapping, Sequence
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
from ..errors import CrossdraftError, first_line
from ..lm.cuda_graphs import recorded_nbytes
from ..metrics.cell_metrics import compare, measure
from ..metrics.intervals import LEAST_PIECES
from ..models.cpu.threads import choose_for_group, describe_threads, disturbance, restored, set_threads
from ..models.placement import input_device
from ..recipe.recipe import CellConfig
from ..runs.interrupts import user_interrupted
from ..runs.labels import is_lossless
from ..runs.records import CellResult, cells_of
from ..runs.run_directory import FORMAT, PieceResult
from . import memory
from .cells.cell_runner import Cell, Models, lengths, positions
from .cells.conversations import compile_constraints, cut_pieces, prepare, turns_of
from .cells.step_limit import StepLimit
from .events import (
    CellFailed,
    CellStarted,
    Emit,
    GroupHead,
    Message,
    PieceFinished,
    PromptsFinished,
    PromptsSkipped,
    StepFinished,
    WarmUpStarted,
)
from .greedy_differences import agreement, decide
from .plan import Plan, PlannedGroup
from .provenance import models_used

logger = logging.getLogger(__name__)

#: Maximum length of a warm-up prompt, in tokens.
MAX_WARM_UP_TOKENS = 512


class Group:
    """A group of cells under measurement.

    Args:
        planned: its cells, the baseline first.
        plan: plan of the run; its directory has the pieces of an interrupted group.
        emit: receives the events. An exception raised by it ends the run.

    Attributes:
        results: one result per config, set by `settle`.
        finished: number of finished pieces.
        pieces: number of all pieces.
    """

    def __init__(self, planned: PlannedGroup, plan: Plan, models: Models, limit: StepLimit, emit: Emit):
        self.planned, self.configs, self.plan = planned, planned.cells, plan
        self.models, self.limit, self.emit = models, limit, emit
        self._key, self._directory = planned.key, plan.directory
        self._provenance = [plan.provenance(config) for config in planned.cells]
        self.finished = self.pieces = 0
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.results = [CellResult(config, measured=now) for config in planned.cells]
        self._cells: dict[int, CellRunner] = {}
        self._depths: dict[int, int] = {}
        self._results_of: dict[int, list[PieceResult]] = {i: [] for i in range(len(self.configs))}
        self._target: tuple[LoadedModel, LM] | None = None  # and its slots, unless an engine decodes
        self._slot = 0
        self._threads: dict[str, Any] = {}
        self._pieces: list[Sequence[Conversation]] = []
        self._block_ends: list[int] = []  # number of finished pieces at the end of each block

    @property
    def is_open(self) -> bool:
        """True if the cells are built."""
        return bool(self._cells)

    @property
    def alive(self) -> int:
        """Number of cells that have not failed."""
        return sum(result.error is None for result in self.results)

    @property
    def complete(self) -> bool:
        """True if all pieces are finished."""
        return self.pieces > 0 and self.finished == self.pieces

    @property
    def blocks(self) -> int:
        """Number of finished blocks."""
        return sum(end <= self.finished for end in self._block_ends)

    def open(self) -> None:
        """Build the cells and read the finished pieces from disk. Cells that fail are removed.

        Raises:
            KeyboardInterrupt: the user interrupted the run.
        """
        if self._cells or not self.alive:
            return
        with restored():  # the group sets its own number of threads
            self._open()

    def _open(self) -> None:
        first, blocks, validate = self.configs[0], self.plan.blocks, self.plan.config.validate
        try:
            target = self.models.target(first)
            conversations = prepare(self.plan.prompts, target, first.max_new_tokens)
            sequence, self._slot = lengths(conversations, self.configs, target.context_length)
            lm = None if first.engine is not None else make_slots(target, first.batch_size, self._slot)
            self._target = None if lm is None else (target, lm)
            if lm is not None:
                conversations = compile_constraints(conversations, target, lm.vocab_size)
            old_threads = self._directory.group_head(self._key).get("threads")
            self._threads = choose_for_group(
                lm, old_threads[-1] if isinstance(old_threads, list) and old_threads else None
            )
        except BaseException as error:
            self._fail(range(len(self.configs)), error)
            return
        mask_drafts = any(c.grammar is not None and c.grammar.mask_drafts for c in conversations)
        typical = median_low([c.prompt_lens[0] for c in conversations])
        warm_up = max(1, min(typical, MAX_WARM_UP_TOKENS, sequence - first.max_new_tokens))
        for i, config in enumerate(self.configs):
            if self.results[i].error is not None:
                continue

            def start(i: int = i, config: CellConfig = config) -> None:
                self._cells[i] = (
                    plugins.get("cell_runners", "engine")(
                        config, target, self._slot, self._directory.path / "servers" / config.hash, self._served
                    )
                    if lm is None
                    else Cell(config, target, lm, self.models, sequence, self._slot, self._step, validate, mask_drafts)
                )
                self._depths[i] = self._cells[i].depth
                self.emit(WarmUpStarted())
                self._cells[i].warm_up(warm_up)

            self._attempt(i, start)
        if self.pieces:  # opened again
            self._replay(self._pieces[: self.finished])
            return
        for i, result in enumerate(self.results):
            model_digests = self._cells[i].models if i in self._cells else {}
            result.provenance = {**self._provenance[i], "models": models_used(model_digests)}
        random, min_pieces = Random(first.seed), -(-LEAST_PIECES // len(blocks))
        cuts = [cut_pieces([conversations[i] for i in block], first.batch_size, random, min_pieces) for block in blocks]
        self._pieces = [piece for pieces in cuts for piece in pieces]
        self._block_ends = list(accumulate(map(len, cuts)))
        self.pieces = len(self._pieces)
        if self._cells:
            self._resume(self._pieces)
            for result in self.results:
                result.provenance["decoding_threads"] = self._head["threads"]

    def advance(self, blocks: int) -> None:
        """Measure until ``blocks`` blocks are finished. Raises as `open` does."""
        if not self._cells:
            return
        with restored():
            set_threads(self._threads["number"])
            for number in range(self.finished, self._block_ends[blocks - 1]):
                self._piece(number, self._pieces[number])
                self._warn_if_disturbed()

    def close(self) -> None:
        """Free the cells; `open` builds them again."""
        for cell in self._cells.values():
            cell.close()
        self._cells.clear()
        self._target = None

    def settle(self, blocks: int | None = None) -> None:
        """Set the results of the first ``blocks`` blocks, by default of all finished pieces."""
        pieces = self.finished if blocks is None or not self._block_ends else self._block_ends[blocks - 1]
        for i, result in enumerate(self.results):
            if result.error is None and self._results_of[i] and pieces:
                self._attempt(i, lambda i=i: self._measured(i, pieces))
        compare_group(self.results)

    def _step(self) -> None:
        self.limit.restart()
        self.emit(StepFinished(self.configs[0].batch_size / self.configs[0].max_new_tokens))

    def _served(self) -> None:
        self.limit.restart()
        self.emit(StepFinished(1.0))

    # -- pieces -------------------------------------------------------------------------------------------

    def _resume(self, pieces: Sequence[Sequence[Conversation]]) -> None:
        """Read the pieces of an earlier process, or start over if they do not match."""
        prompts = [[c.prompt.index for c in piece] for piece in pieces]
        cells = {
            config.hash: {key: value for key, value in r.provenance.items() if key != "mark"}  # see `changes`
            for config, r in zip(self.configs, self.results, strict=True)
        }
        identity = {"format": FORMAT, "cells": cells, "pieces": prompts}
        head = self._directory.group_head(self._key)
        failed: Any = head.get("failed")
        if isinstance(failed, dict) and {key: head.get(key) for key in identity} == identity:
            self._head = head
            for result in self.results:
                result.measured = str(head.get("measured"))
            for i, config in enumerate(self.configs):
                if config.hash in failed and i in self._cells:
                    self._fail([i], CrossdraftError(str(failed[config.hash])))
            while (results := self._directory.load_piece(self._key, self.finished)) is not None:
                complete = [i for i in self._cells if self.configs[i].hash in results]
                if len(complete) < len(self._cells):
                    break
                for i in complete:
                    self._results_of[i].append(results[self.configs[i].hash])
                self.finished += 1
            if self.finished:
                self.emit(Message(f"resuming after piece {self.finished} of {len(pieces)}"))
                self.emit(PromptsSkipped(len(self.configs) * sum(map(len, pieces[: self.finished]))))
                self._replay(pieces[: self.finished])
            self._record_threads()
            return
        if head:
            self.emit(Message("starting over: the pieces on disk were measured under other conditions"))
        self._head = {**identity, "measured": self.results[0].measured, "failed": self._failures()}
        self._head["threads"] = [{"piece": 1, **self._threads}]
        self.emit(GroupHead(self._key, self._head, restart=True))

    def _record_threads(self) -> None:
        """Record the threads of the next piece if they differ from those of the previous one."""
        history = self._head.get("threads") if self.finished else None
        history = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
        current = {"piece": self.finished + 1, **self._threads}
        if history and {**history[-1], "piece": current["piece"]} == current:
            return
        if history:
            old, new = describe_threads(history[-1]), describe_threads(current)
            self.emit(Message(f"threads from piece {current['piece']}: {new}; before: {old}"))
        self._head["threads"] = [*history, current]
        self.emit(GroupHead(self._key, self._head))

    def _warn_if_disturbed(self) -> None:
        """Warn once a run if the threads of the last piece waited for processors used by other programs."""
        last = [self._results_of[i][-1].piece for i in self._cells if self._results_of[i]]
        steps = [step for piece in last for rows in piece.steps.values() for step in rows]
        wait, seconds = sum(step[4] for step in steps) / 1e6, sum(sum(step[:4]) for step in steps) / 1e6
        warning = disturbance(wait, seconds, self._threads["number"])
        if warning and not self.plan.disturbed:
            self.plan.disturbed = True
            self.emit(Message(warning))

    def _replay(self, pieces: Sequence[Sequence[Conversation]]) -> None:
        """Decode finished pieces again, unmeasured, with the drafters that depend on earlier sequences."""
        for i, cell in list(self._cells.items()):
            if cell.remembers:
                for piece in pieces:
                    self._attempt(i, lambda cell=cell, piece=piece: cell.run(piece))

    def _piece(self, number: int, piece: Sequence[Conversation]) -> None:
        results: dict[int, PieceResult] = {}
        order = list(self._cells)
        Random(f"{self._key} {number}").shuffle(order)
        if number == 0:  # the first estimate of the duration uses plain decoding
            order.sort(key=lambda i: not self.configs[i].is_baseline)
        for i in order:
            self.emit(CellStarted(self.configs[i]))

            def run(i: int = i) -> None:
                results[i] = self._cells[i].run(piece)
                if self.plan.config.untimed:
                    results[i].piece = results[i].piece.untimed()

            self._attempt(i, run)
            self.emit(PromptsFinished(len(piece), turns_of(piece)))
        self._decide_differences(piece, results)
        self.emit(PieceFinished(self._key, number, {self.configs[i].hash: results[i] for i in results}))
        for i, result in results.items():
            self._results_of[i].append(result)
        self.finished = number + 1

    def _decide_differences(self, piece: Sequence[Conversation], results: Mapping[int, PieceResult]) -> None:
        """Compare greedy texts with plain decoding, see `greedy_differences`; an error of a model leaves them open."""
        baseline = next((results[i] for i in results if self.configs[i].is_baseline), None)
        if self._target is None or baseline is None or self.configs[0].sampling.temperature > 0:
            return
        lossless = [r for i, r in results.items() if r is not baseline and is_lossless(self.configs[i])]
        try:
            decide(piece, lossless, baseline, *self._target)
        except (CrossdraftError, RuntimeError) as error:
            self.emit(Message(f"differences from plain decoding stay undecided: {error_message(error)}"))

    # -- results -------------------------------------------------------------------------------------------

    def _measured(self, i: int, pieces: int) -> None:
        result, measured = self.results[i], self._results_of[i][:pieces]
        result.records = [record for part in measured for record in part.records]
        result.responses = [response for part in measured for response in part.responses]
        result.pieces = [part.piece for part in measured]
        gamma = self.configs[i].drafter.config.get("gamma")  # None: no fixed length
        min_depth = min(gamma, self._depths[i]) if isinstance(gamma, int) else 0
        result.metrics = measure(
            result.records, result.pieces, sum(part.passes for part in measured), min_depth, self._depths[i]
        )
        result.metrics.missed_graphs = sum(part.missed_graphs for part in measured)
        result.metrics.peak_memory = max((part.peak_memory for part in measured if part.peak_memory), default=None)
        for part in measured:
            for name, numbers in part.other_traffic.items():
                counted, own = result.metrics.other_traffic.get(name, (0.0, 0.0))
                result.metrics.other_traffic[name] = (counted + numbers[0], own + numbers[1])

    # -- failures ------------------------------------------------------------------------------------------

    def _attempt(self, i: int, action: Callable[[], Any]) -> None:
        """Run an action for a cell; an error fails this cell only."""
        try:
            action()
        except BaseException as error:  # includes sys.exit in a plug-in
            self._fail([i], error)
        finally:
            self.limit.stop()

    def _fail(self, cells: Sequence[int], error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt) and user_interrupted():
            raise error
        trace = "".join(traceback.format_exception(error))
        for i in cells:
            if (cell := self._cells.pop(i, None)) is not None:
                cell.close()
            result = self.results[i]
            result.error, result.traceback, result.metrics = self._reason(error, self.configs[i]), trace, None
            logger.debug("cell %s failed", self.configs[i].hash, exc_info=error)
            self.emit(CellFailed(result))
        if self.pieces:
            self._head["failed"] = self._failures()
            self.emit(GroupHead(self._key, self._head))

    def _failures(self) -> dict[str, str]:
        return {result.config.hash: result.error for result in self.results if result.error is not None}

    def _reason(self, error: BaseException, config: CellConfig) -> str:
        """Reason of a failure; if memory ran out, with the memory that the cell needs."""
        loaded = self.models.of(config)
        if not memory.exhausted(error) or not loaded:
            return error_message(error)
        models = [model.model for model in loaded]
        device = input_device(models[0])
        available, recorded = memory.total(device), recorded_nbytes(device)
        return memory.explain(models, config.batch_size, self._slot, positions(config), available, recorded)


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


def error_message(error: BaseException) -> str:
    """One-line message of an error, with its type unless it is a CrossdraftError."""
    return str(error) if isinstance(error, CrossdraftError) else first_line(error).rstrip(": ")
