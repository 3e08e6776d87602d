"""Running a recipe: group by group, the cells of a group interleaved, so that they are compared fairly.

A group's prompts are cut into chunks; each chunk is run by every cell, the baseline included, in rotating
order. Whatever the machine does meanwhile, it does to all of them. At the end of a chunk slots run empty: that tail
does not count towards throughput (see `metrics.Chunk`).
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .. import plugins
from ..contracts.errors import CrossdraftError, UsageError
from ..decoding.build import make_slots
from ..models.device import pick_device, pick_dtype
from ..models.digests import weights_sha256
from ..models.environment import describe
from ..models.resolve import resolve
from ..runs.metrics import LEAST_PIECES, compare, measure
from ..runs.prompts import Prompt
from ..runs.recipe import CellConfig, Recipe, digest
from ..runs.records import CellResult, Outcome, RunDirectory
from ..runs.titles import group_title
from . import memory
from .cell_runner import Cell, Conversation, Models, lengths, positions, prepare
from .matrix import plan

logger = logging.getLogger(__name__)

#: Pieces that a group's prompts are cut into; fewer where that would leave little but tails.
CHUNKS = 6


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(
    recipe: Recipe,
    out: Path | str = "runs",
    *,
    fresh: bool = False,
    say: Callable[[str], None] | None = say,
    progress: bool = False,
) -> Outcome:
    """Run every cell of a recipe, and write its records to ``out/<recipe>-<hash>/``.

    A group whose cells are all on disk, measured together from the same models and prompts, is not run again.

    Args:
        fresh: measure everything, whatever is on disk.
        say: where progress is told, a line at a time; None to be silent.
        progress: show a bar on standard error, if it is a terminal.

    Raises:
        UsageError: the recipe or its prompts are wrong. A cell that fails is no error: see `Outcome.failed`.
    """
    tell = say or (lambda _: None)
    expanded, prompts = plan(recipe), recipe.selected_prompts.load()
    groups, cells = expanded.groups(), expanded.cells
    directory = RunDirectory(Path(out) / f"{recipe.name}-{expanded.hash}")
    outcome = Outcome(recipe, directory.path, skipped=expanded.skipped, notes=_notes(cells, prompts))
    counts = _count(len(cells), "cell"), _count(len(groups), "group"), _count(len(prompts), "prompt")
    tell(f"{recipe.name}: {counts[0]} in {counts[1]}, {counts[2]} each")
    for sentence in expanded.skipped:
        tell(f"skipped: {sentence}")
    try:
        directory.write_json("recipe.json", recipe.model_dump(mode="json"))
    except OSError as error:
        raise UsageError(f"cannot write to {directory.path}: {error.strerror}") from None
    about = {"name": recipe.name, "directory": str(directory.path), "cells": len(cells)}
    plugins.notify("crossdraft_run_started", run=about)
    session = _Session(prompts, describe())
    # None: no bar unless standard error is a terminal.
    disable = None if progress else True
    with tqdm(total=len(cells) * len(prompts), unit="prompt", miniters=1, leave=False, disable=disable) as bar:
        try:
            for number, group in enumerate(groups, 1):
                title = f"group {number} of {len(groups)} ({group_title(group[0], cells)})"
                results = None if fresh else session.stored(directory, group)
                with tqdm.external_write_mode():
                    doing = "running" if results is None else "reusing"
                    tell(f"{title}: {doing} {_count(len(group), 'cell')}")
                if results is None:
                    results = session.measure_group(group, bar.update)
                    for result in results:
                        if result.metrics is not None and _saved(directory, result):
                            plugins.notify("crossdraft_cell_finished", run=about, cell=result.summary())
                outcome.results += results
                bar.n = len(outcome.results) * len(prompts)
                bar.refresh()
        except KeyboardInterrupt:  # what is finished is kept and shown; the exit code tells
            outcome.interrupted = True
    _write_environment(directory, outcome, session)
    return outcome


def _saved(directory: RunDirectory, result: CellResult) -> bool:
    """Write a cell; one that cannot be written has failed."""
    try:
        directory.save(result)
    except OSError as error:
        result.error = f"its records cannot be written: {error}"
    return result.error is None


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _notes(cells: Sequence[CellConfig], prompts: Sequence[Prompt]) -> list[str]:
    wide = sorted({cell.batch_size for cell in cells if cell.batch_size > len(prompts)})
    few = _count(len(prompts), "prompt")
    return [f"batch size {b} with only {few}: some slots stay empty, tok/s are those of fewer rows" for b in wide]


def _write_environment(directory: RunDirectory, outcome: Outcome, session: _Session) -> None:
    """What the numbers depend on, if any were measured now."""
    if all(result.reused for result in outcome.results):
        return
    models: dict[str, Any] = {}
    for result in outcome.results:
        models |= result.provenance.get("models", {})
    prompts = {"source": outcome.recipe.prompts.source, "count": len(session.prompts)}
    about = session.environment | {"models": models, "prompts": prompts}
    about["conditions"] = _distinct(result.provenance for result in outcome.results)
    directory.write_json("environment.json", about)


def _distinct(provenances: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the cells were measured with: device, dtype, versions, digest of the prompts; usually one entry."""
    found: list[dict[str, Any]] = []
    for provenance in provenances:
        conditions = {key: value for key, value in provenance.items() if key != "models"}
        if conditions and conditions not in found:
            found.append(conditions)
    return found


def chunked(conversations: Sequence[Conversation], batch_size: int) -> list[Sequence[Conversation]]:
    """At most `CHUNKS` pieces of nearly equal size, of each category where all of them are large enough.

    Of 2B - 1 prompts or more each, so that B of them finish before slots stay empty; of B, where that leaves too few
    pieces for an interval; all prompts in one piece where they are fewer.
    """
    categories: dict[str, list[Conversation]] = {}
    for conversation in conversations:
        categories.setdefault(conversation.prompt.category, []).append(conversation)
    whole = 2 * batch_size - 1
    if min(map(len, categories.values())) < LEAST_PIECES * whole:
        pieces = max(len(conversations) // whole, min(LEAST_PIECES, len(conversations) // batch_size), 1)
        return _cut(conversations, min(CHUNKS, pieces))
    return [piece for mine in categories.values() for piece in _cut(mine, min(CHUNKS, len(mine) // whole))]


def _cut(conversations: Sequence[Conversation], pieces: int) -> list[Sequence[Conversation]]:
    edges = [i * len(conversations) // pieces for i in range(pieces + 1)]
    return [conversations[a:b] for a, b in pairwise(edges)]


class _Session:
    """What the groups of a run have in common: prompts, loaded models, the machine."""

    def __init__(self, prompts: Sequence[Prompt], environment: dict[str, Any]):
        self.prompts, self.environment, self.models = prompts, environment, Models()
        self.digest = digest([asdict(prompt) for prompt in prompts])

    def measure_group(self, configs: Sequence[CellConfig], advance: Callable[[int], Any]) -> list[CellResult]:
        """Run the cells of a group interleaved. One that fails is marked and left out; the others go on."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        results = [CellResult(config, measured=now) for config in configs]
        try:
            target = self.models.target(configs[0])
            conversations = prepare(self.prompts, target, configs[0].max_new_tokens)
            sequence, slot = lengths(conversations, configs, target.context_length)
            lm = make_slots(target, configs[0].batch_size, slot)
        except Exception as error:
            for result in results:
                result.error = _sentence(error)
            return results

        cells: dict[int, Cell] = {}

        def attempt(i: int, action: Callable[[], None]) -> None:
            try:
                action()
            except Exception as error:
                logger.debug("cell %s failed", configs[i].hash, exc_info=True)
                results[i].error = self._reason(error, configs[i], slot)
                cells.pop(i, None)

        def start(i: int) -> None:
            cells[i] = Cell(configs[i], target, lm, self.models, sequence, slot)
            cells[i].warm_up(conversations)

        for i in range(len(configs)):
            attempt(i, partial(start, i))
        for n, chunk in enumerate(chunked(conversations, configs[0].batch_size)):
            order = deque(cells)
            order.rotate(-n)
            for i in order:
                attempt(i, partial(cells[i].run, chunk))
                advance(len(chunk))
        for i, cell in cells.items():
            gamma = cell.config.drafter.config.get("gamma") or 0  # None: as many as the drafter can
            results[i].metrics = metrics = measure(cell.records, cell.chunks, cell.passes, gamma)
            metrics.peak_memory = cell.peak_memory
            results[i].records, results[i].responses, results[i].chunks = (
                cell.records,
                cell.responses,
                cell.chunks,
            )
            results[i].provenance = self._provenance(configs[i]) | {"models": cell.models}
        _compare(results)
        return results

    def stored(self, directory: RunDirectory, group: Sequence[CellConfig]) -> list[CellResult] | None:
        """The whole group as it was measured before, or None if it has to be measured (again)."""
        found = [directory.load(config) for config in group]
        results = [result for result in found if result is not None]
        if len(results) < len(group) or len({result.measured for result in results}) > 1:
            return None
        same = all(
            {k: v for k, v in result.provenance.items() if k != "models"} == self._provenance(result.config)
            for result in results
        )
        used = {name: model for r in results for name, model in r.provenance["models"].items()}
        return results if same and all(_unchanged(name, model) for name, model in used.items()) else None

    def _provenance(self, config: CellConfig) -> dict[str, Any]:
        """What numbers depend on beside the cell's config and its models."""
        device = pick_device(config.device)
        cuda = device.type == "cuda"
        hardware = torch.cuda.get_device_name(device) if cuda else self.environment["cpu"]["model"]
        return {
            "crossdraft": self.environment["versions"]["crossdraft"],
            "torch": self.environment["versions"]["torch"],
            "device": f"{device.type} ({hardware})",
            "threads": torch.get_num_threads(),
            "dtype": str(pick_dtype(config.dtype, device)).removeprefix("torch."),
            "prompts": self.digest,
        }

    def _reason(self, error: Exception, config: CellConfig, slot: int) -> str:
        """Why a cell failed; if it was for want of memory, with what it needed."""
        loaded = self.models.of(config)
        if not memory.exhausted(error) or not loaded:
            return _sentence(error)
        models = [one.model for one in loaded]
        available = memory.total(models[0].device)
        return memory.explain(models, config.batch_size, slot, positions(config), available)


def _unchanged(name: str, model: dict[str, Any]) -> bool:
    try:
        return weights_sha256(resolve(name, heads=model.get("heads", False)).path) == model["sha256"]
    except CrossdraftError:
        return False  # measuring will say why


def _compare(results: Sequence[CellResult]) -> None:
    """Set the metrics that need the baseline of the group, if it was measured."""
    baseline = next((r for r in results if r.config.is_baseline and r.metrics is not None), None)
    if baseline is None:
        return
    said = {(r["question_id"], r["turn"]): r["tokens"] for r in baseline.responses}
    for result in results:
        if result.metrics is None:
            continue
        compare(result.metrics, result.chunks, baseline.chunks)
        if result.config.sampling.temperature == 0:
            same = [r["tokens"] == said[r["question_id"], r["turn"]] for r in result.responses]
            result.metrics.same_as_baseline = sum(same) / len(same)


def _sentence(error: Exception) -> str:
    if isinstance(error, CrossdraftError):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")
