"""Measuring a group: its cells take turns on one target, piece by piece of the prompts, and every piece is kept.

A piece is small (one prompt at batch size 1) and is decoded by all cells back to back, in random order: whatever the
machine does meanwhile, it does to all of them. Pieces are on disk as soon as they are finished, so an interrupted group
goes on where it stopped. At the end of a piece slots run empty: that tail does not count towards throughput (`Piece`).
Pieces make up *blocks* of prompts, which are the same for all groups of a run: a time budget cuts a run after a block.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from random import Random
from statistics import median_low
from typing import Any

from ..api.build import make_slots
from ..errors import CrossdraftError, first_line
from ..lm.cuda_graphs import recorded_nbytes
from ..metrics.cell_metrics import compare, measure
from ..metrics.intervals import LEAST_PIECES
from ..models.placement import input_device
from ..models.threads import choose_for_group, described, disturbance, restored, set_threads
from ..recipe.prompts import Prompt
from ..recipe.recipe import CellConfig
from ..runs.interrupts import asked
from ..runs.records import CellResult, cells_of
from ..runs.run_directory import FORMAT, PieceResult, RunDirectory
from . import memory
from .cell_runner import Cell, Conversation, Models, lengths, positions, prepare
from .provenance import models_used
from .step_limit import StepLimit

logger = logging.getLogger(__name__)

#: Most tokens of a prompt of the warm-up.
LONGEST_WARM_UP = 512


class Unwritable(CrossdraftError):
    """A piece cannot be written: the run cannot go on."""


@dataclass
class Progress:
    """Who is told while a group runs.

    Attributes:
        warming: the cell that is warmed up next.
        at: the cell that decodes next.
        step: a step is over; the number of turns that its tokens make, one token a row.
        advance: the number of prompts that a cell has finished, and of their turns.
        skip: the number of prompts that were finished before.
        piece: the number of the piece that all cells have finished, from 1, and how many there are.
        failed: a cell that has failed, as soon as it does; what it raises ends the run.
        say: a sentence.
    """

    warming: Callable[[], Any] = lambda: None
    at: Callable[[CellConfig], Any] = lambda config: None
    step: Callable[[float], Any] = lambda turns: None
    advance: Callable[[int, int], Any] = lambda n, turns: None
    skip: Callable[[int], Any] = lambda n: None
    piece: Callable[[int, int], Any] = lambda number, pieces: None
    failed: Callable[[CellResult], Any] = lambda result: None
    say: Callable[[str], Any] = lambda line: None


@dataclass
class Group:
    """The cells of a group while they are measured.

    Args:
        configs: of the cells, the baseline first.
        provenance: of each, see `provenance`; without models.
        directory: where pieces are kept.
        timed: False where others use the device, too: nothing that a clock says is kept.

    Attributes:
        results: one for each config, as `settle` sets them.
        finished: how many pieces are there; pieces: how many there will be.
    """

    configs: Sequence[CellConfig]
    provenance: Sequence[Mapping[str, Any]]
    directory: RunDirectory
    models: Models
    limit: StepLimit
    progress: Progress = field(default_factory=Progress)
    validate: str = "sampled"
    timed: bool = True
    results: list[CellResult] = field(init=False)
    finished: int = field(init=False, default=0)
    pieces: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.results = [CellResult(config, measured=now) for config in self.configs]
        self._cells: dict[int, Cell] = {}
        self._depths: dict[int, int] = {}
        self._found: dict[int, list[PieceResult]] = {i: [] for i in range(len(self.configs))}
        self._slot = 0
        self._threads: dict[str, Any] = {}
        self._disturbed = False
        self._key = self.configs[0].group
        self._pieces: list[Sequence[Conversation]] = []
        self._edges: list[int] = []  # pieces there are when a block ends

    @property
    def is_open(self) -> bool:
        """True if its cells are built."""
        return bool(self._cells)

    @property
    def alive(self) -> int:
        """Number of cells that have not failed."""
        return sum(result.error is None for result in self.results)

    @property
    def whole(self) -> bool:
        """True if all of its pieces are finished."""
        return self.pieces > 0 and self.finished == self.pieces

    @property
    def blocks(self) -> int:
        """Number of finished blocks."""
        return sum(edge <= self.finished for edge in self._edges)

    def open(self, prompts: Sequence[Prompt], blocks: Sequence[Sequence[int]]) -> None:
        """Build the cells and take over the pieces that an earlier process left. A cell that fails is left out.

        Args:
            blocks: every prompt's position in ``prompts``, see `blocks_of`.

        Raises:
            KeyboardInterrupt: the user ended the run.
            Unwritable: the head of the group cannot be written.
        """
        if self._cells or not self.alive:
            return
        with restored():  # the group has its own number of threads
            self._open(prompts, blocks)

    def _open(self, prompts: Sequence[Prompt], blocks: Sequence[Sequence[int]]) -> None:
        first = self.configs[0]
        try:
            target = self.models.target(first)
            conversations = prepare(prompts, target, first.max_new_tokens)
            sequence, self._slot = lengths(conversations, self.configs, target.context_length)
            lm = make_slots(target, first.batch_size, self._slot)
            kept = self.directory.group_head(self._key).get("threads")
            self._threads = choose_for_group(lm, kept[-1] if isinstance(kept, list) and kept else None)
        except BaseException as error:
            self._fail(range(len(self.configs)), error)
            return
        typical = median_low([c.room[0] for c in conversations])
        warm_up = max(1, min(typical, LONGEST_WARM_UP, sequence - first.max_new_tokens))
        for i, config in enumerate(self.configs):
            if self.results[i].error is not None:
                continue

            def start(i: int = i, config: CellConfig = config) -> None:
                self._cells[i] = Cell(config, target, lm, self.models, sequence, self._slot, self._step, self.validate)
                self._depths[i] = self._cells[i].depth
                self.progress.warming()
                self._cells[i].warm_up(warm_up)

            self._attempt(i, start)
        if self.pieces:  # it was open before
            self._remember(self._pieces[: self.finished])
            return
        for i, result in enumerate(self.results):
            used = self._cells[i].models if i in self._cells else {}
            result.provenance = {**self.provenance[i], "models": models_used(used)}
        random, least = Random(first.seed), -(-LEAST_PIECES // len(blocks))
        cuts = [cut([conversations[i] for i in block], first.batch_size, random, least) for block in blocks]
        self._pieces = [piece for pieces in cuts for piece in pieces]
        self._edges = list(accumulate(map(len, cuts)))
        self.pieces = len(self._pieces)
        if self._cells:
            self._resume(self._pieces)
            for result in self.results:
                result.provenance["decoding_threads"] = self._head["threads"]

    def advance(self, blocks: int) -> None:
        """Measure until so many blocks are finished. Raises what `open` raises."""
        if not self._cells:
            return
        with restored():
            set_threads(self._threads["number"])
            for number in range(self.finished, self._edges[blocks - 1]):
                self._piece(number, self._pieces[number])
                self._watch()

    def close(self) -> None:
        """Free what the cells hold; `open` builds them again."""
        self._cells.clear()

    def settle(self, blocks: int | None = None) -> None:
        """Set the results of so many blocks, or of all pieces that are there."""
        pieces = self.finished if blocks is None or not self._edges else self._edges[blocks - 1]
        for i, result in enumerate(self.results):
            if result.error is None and self._found[i] and pieces:
                self._attempt(i, lambda i=i: self._measured(i, pieces))
        compare_group(self.results)

    def _step(self) -> None:
        self.limit.restart()
        self.progress.step(self.configs[0].batch_size / self.configs[0].max_new_tokens)

    # -- pieces -------------------------------------------------------------------------------------------

    def _resume(self, pieces: Sequence[Sequence[Conversation]]) -> None:
        """Take over the pieces that an earlier process left, or start over."""
        prompts = [[c.prompt.index for c in piece] for piece in pieces]
        cells = {config.hash: r.provenance for config, r in zip(self.configs, self.results, strict=True)}
        same = {"format": FORMAT, "cells": cells, "pieces": prompts}
        head = self.directory.group_head(self._key)
        failed: Any = head.get("failed")
        if isinstance(failed, dict) and {key: head.get(key) for key in same} == same:
            self._head = head
            for result in self.results:
                result.measured = str(head.get("measured"))
            for i, config in enumerate(self.configs):
                if config.hash in failed and i in self._cells:
                    self._fail([i], CrossdraftError(str(failed[config.hash])))
            while (found := self.directory.load_piece(self._key, self.finished)) is not None:
                alive = [i for i in self._cells if self.configs[i].hash in found]
                if len(alive) < len(self._cells):
                    break
                for i in alive:
                    self._found[i].append(found[self.configs[i].hash])
                self.finished += 1
            if self.finished:
                self.progress.say(f"going on after piece {self.finished} of {len(pieces)}")
                self.progress.skip(len(self.configs) * sum(map(len, pieces[: self.finished])))
                self._remember(pieces[: self.finished])
            self._continue_with_threads()
            return
        if head:
            self.progress.say("starting over: what the pieces on disk were measured with has changed")
        self._head = {**same, "measured": self.results[0].measured, "failed": self._failures()}
        self._head["threads"] = [{"piece": 1, **self._threads}]
        self._write(lambda: self.directory.begin_group(self._key, self._head))

    def _continue_with_threads(self) -> None:
        """Note from which piece on the group is measured with other threads than before, if it is."""
        before = self._head.get("threads") if self.finished else None
        before = [one for one in before if isinstance(one, dict)] if isinstance(before, list) else []
        now = {"piece": self.finished + 1, **self._threads}
        if before and {**before[-1], "piece": now["piece"]} == now:
            return
        if before:
            self.progress.say(
                f"threads from piece {now['piece']} on: {described(now)}; before: {described(before[-1])}"
            )
        self._head["threads"] = [*before, now]
        self._write(lambda: self.directory.save_head(self._key, self._head))

    def _watch(self) -> None:
        """Say once if the threads of the last piece waited for processors of other programs."""
        last = [self._found[i][-1].piece for i in self._cells if self._found[i]]
        steps = [step for piece in last for rows in piece.steps.values() for step in rows]
        waited, seconds = sum(step[4] for step in steps) / 1e6, sum(sum(step[:4]) for step in steps) / 1e6
        sentence = disturbance(waited, seconds, self._threads["number"])
        if sentence and not self._disturbed:
            self._disturbed = True
            self.progress.say(sentence)

    def _remember(self, pieces: Sequence[Sequence[Conversation]]) -> None:
        """Let drafters that remember live through the pieces that are not measured again."""
        for i, cell in list(self._cells.items()):
            if cell.remembers:
                for piece in pieces:
                    self._attempt(i, lambda cell=cell, piece=piece: cell.run(piece))

    def _piece(self, number: int, piece: Sequence[Conversation]) -> None:
        found: dict[int, PieceResult] = {}
        order = list(self._cells)
        Random(f"{self._key} {number}").shuffle(order)
        if number == 0:  # the first estimate of the duration comes from plain decoding
            order.sort(key=lambda i: not self.configs[i].is_baseline)
        for i in order:
            self.progress.at(self.configs[i])

            def run(i: int = i) -> None:
                found[i] = self._cells[i].run(piece)
                if not self.timed:
                    found[i].piece = found[i].piece.untimed()

            self._attempt(i, run)
            self.progress.advance(len(piece), turns_of(piece))
        self._write(
            lambda: self.directory.save_piece(self._key, number, {self.configs[i].hash: found[i] for i in found})
        )
        for i, result in found.items():
            self._found[i].append(result)
        self.finished = number + 1
        self.progress.piece(self.finished, self.pieces)

    def _write(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise Unwritable(f"cannot write to {self.directory.path}: {error.strerror or error}") from None

    # -- results -------------------------------------------------------------------------------------------

    def _measured(self, i: int, pieces: int) -> None:
        result, found = self.results[i], self._found[i][:pieces]
        result.records = [record for one in found for record in one.records]
        result.responses = [response for one in found for response in one.responses]
        result.pieces = [one.piece for one in found]
        gamma = self.configs[i].drafter.config.get("gamma")  # None: as many as the drafter can
        least = gamma if isinstance(gamma, int) else 0
        result.metrics = measure(
            result.records, result.pieces, sum(one.passes for one in found), least, self._depths[i]
        )
        result.metrics.peak_memory = max((one.peak_memory for one in found if one.peak_memory), default=None)

    # -- failures ------------------------------------------------------------------------------------------

    def _attempt(self, i: int, action: Callable[[], Any]) -> None:
        """Do something for a cell; whatever goes wrong costs this cell alone."""
        try:
            action()
        except BaseException as error:  # a plug-in's sys.exit, too
            self._fail([i], error)
        finally:
            self.limit.stop()

    def _fail(self, cells: Sequence[int], error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt) and asked():
            raise error
        trace = "".join(traceback.format_exception(error))
        for i in cells:
            self._cells.pop(i, None)
            result = self.results[i]
            result.error, result.traceback, result.metrics = self._reason(error, self.configs[i]), trace, None
            logger.debug("cell %s failed", self.configs[i].hash, exc_info=error)
            self.progress.failed(result)
        if self.pieces:
            self._head["failed"] = self._failures()
            self._write(lambda: self.directory.save_head(self._key, self._head))

    def _failures(self) -> dict[str, str]:
        return {result.config.hash: result.error for result in self.results if result.error is not None}

    def _reason(self, error: BaseException, config: CellConfig) -> str:
        """Why a cell failed; if it was for want of memory, with what it needed."""
        loaded = self.models.of(config)
        if not memory.exhausted(error) or not loaded:
            return sentence(error)
        models = [one.model for one in loaded]
        device = input_device(models[0])
        available, recorded = memory.total(device), recorded_nbytes(device)
        return memory.explain(models, config.batch_size, self._slot, positions(config), available, recorded)


def turns_of(conversations: Iterable[Conversation]) -> int:
    return sum(len(one.prompt.turns) for one in conversations)


def blocks_of(prompts: Sequence[Prompt], batch_sizes: Iterable[int], random: Random) -> list[list[int]]:
    """Positions of the prompts of each block: a piece of the largest batch size, which smaller ones divide.

    The first one is one of the shortest, counted in turns: it decides when there is a table.
    """
    position = {id(prompt): i for i, prompt in enumerate(prompts)}
    pieces = list(cut([Conversation(prompt, ()) for prompt in prompts], max(batch_sizes), random))
    pieces.insert(0, pieces.pop(min(range(len(pieces)), key=lambda i: turns_of(pieces[i]))))
    return [[position[id(one.prompt)] for one in piece] for piece in pieces]


def cut(
    conversations: Sequence[Conversation], batch_size: int, random: Random, least: int = LEAST_PIECES
) -> Sequence[Sequence[Conversation]]:
    """Pieces of nearly equal size, each of one category where all of them are large enough.

    Of 2B - 1 prompts or more each, so that B of them finish before slots stay empty; of B, where that leaves fewer than
    ``least`` pieces; all prompts in one piece where they are fewer. Their order is random, but the first pieces hold
    each category in its share, however many they are.
    """
    categories: dict[str, list[Conversation]] = {}
    for conversation in random.sample(list(conversations), len(conversations)):
        categories.setdefault(conversation.prompt.category, []).append(conversation)
    whole = 2 * batch_size - 1
    if min(map(len, categories.values())) < least * whole:
        pieces = max(len(conversations) // whole, min(least, len(conversations) // batch_size), 1)
        mixed = [c for mine in categories.values() for c in mine]
        found = [mixed[i::pieces] for i in range(pieces)]  # every category in every piece
    else:
        found = [piece for mine in categories.values() for piece in _slices(mine, len(mine) // whole)]
    return _balanced(found, random)


def _balanced(pieces: Sequence[Sequence[Conversation]], random: Random) -> list[Sequence[Conversation]]:
    """The pieces in an order of which every beginning holds the categories in their shares, to a piece.

    The n pieces of a category are drawn into n equal parts of the way, one each.
    """
    alike: dict[str, list[Sequence[Conversation]]] = {}
    for piece in random.sample(list(pieces), len(pieces)):
        held = {one.prompt.category for one in piece}
        alike.setdefault(held.pop() if len(held) == 1 else "", []).append(piece)
    drawn = [((k + random.random()) / len(mine), piece) for mine in alike.values() for k, piece in enumerate(mine)]
    return [piece for _, piece in sorted(drawn, key=lambda one: one[0])]


def _slices(conversations: Sequence[Conversation], pieces: int) -> list[Sequence[Conversation]]:
    edges = [i * len(conversations) // pieces for i in range(pieces + 1)]
    return [conversations[a:b] for a, b in pairwise(edges)]


def compare_group(results: Sequence[CellResult]) -> None:
    """Set the metrics that come from the whole group, as far as it was measured."""
    measured = [r for r in results if r.metrics is not None]
    baseline = next((i for i, r in enumerate(measured) if r.config.is_baseline), None)
    compare([r.metrics for r in measured if r.metrics], cells_of(measured), baseline)
    if baseline is None:
        return
    said = {(r["question_id"], r["turn"]): r["tokens"] for r in measured[baseline].responses}
    for result in measured:
        if result.metrics is not None and result.config.sampling.temperature == 0:
            same = [r["tokens"] == said[r["question_id"], r["turn"]] for r in result.responses]
            result.metrics.same_as_baseline = sum(same) / len(same)


def sentence(error: BaseException) -> str:
    """What an error says in one line; of one that is not ours, its kind too."""
    return str(error) if isinstance(error, CrossdraftError) else first_line(error).rstrip(": ")
