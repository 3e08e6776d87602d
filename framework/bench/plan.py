"""Plan of a run: its directory, its groups, and their results on disk. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from random import Random
from typing import Any

from .. import plugins
from ..recipe.prompts import Prompt, refuse_constraints
from ..recipe.recipe import CellConfig, digest
from ..runs.labels import counted, group_title
from ..runs.records import CellResult
from ..runs.run_directory import RunDirectory
from ..runs.shards import FOLDER
from .cells.conversations import blocks_of
from .config import RunConfig
from .environment import describe
from .matrix import Expansion, expand
from .provenance import changes, provenance


@dataclass
class PlannedGroup:
    """A group of a run, see `bench.group_runner`.

    Attributes:
        cells: configs of the cells, the baseline first.
        key: see `CellConfig.group`.
        title: its position in the run and its settings, ``"group 1 of 3 (temperature 1, batch size 1)"``.
        settings: settings that its cells share and other groups do not.
        stored: results on disk, or None if the group is to be measured.
        source: directory of another run that has these results.
        reason: reason why the results are reused or measured again, or empty.
        discard: remove the pieces on disk before the measurement.
    """

    cells: Sequence[CellConfig]
    key: str
    title: str
    settings: str
    stored: list[CellResult] | None = None
    source: RunDirectory | None = None
    reason: str = ""
    discard: bool = False


@dataclass
class Plan:
    """Plan of a run.

    Attributes:
        expansion: cells of the whole recipe.
        directory: directory of the run or of its shard.
        groups: groups of the run or of its shard; ``cells``: their cells.
        provenance: returns the conditions of a measurement of a cell now; they include the certificates, so they change
            when cells are certified.
        blocks: positions of the prompts of each block, see `blocks_of`.
        environment: see `describe`; empty for a launcher, which leaves the devices to its processes.
        about: description of the run in plug-in notifications.
        started: True once plug-ins were notified of the run.
        disturbed: True once a warning of other programs was printed.
    """

    config: RunConfig
    expansion: Expansion
    prompts: Sequence[Prompt]
    directory: RunDirectory
    groups: list[PlannedGroup]
    cells: list[CellConfig]
    provenance: Callable[[CellConfig], dict[str, Any]]
    blocks: list[list[int]]
    environment: dict[str, Any]
    about: dict[str, Any]
    started: bool = False
    disturbed: bool = False

    @property
    def new(self) -> list[CellConfig]:
        """Cells to measure."""
        return [cell for group in self.groups if group.stored is None for cell in group.cells]

    def look_up(self) -> None:
        """Find the results on disk. The directory must be locked, because another run may write to it otherwise."""
        for group in self.groups:
            if self.config.fresh:
                group.discard = True
            else:
                self._look_up(group)

    def _look_up(self, group: PlannedGroup) -> None:
        results, group.reason = self._stored_in(self.directory, group.cells)
        cut = next((result.cut for result in results or () if result.planned is not None), "")
        if cut:  # its pieces are in this directory
            group.discard = self.config.retry_failed and any(result.error for result in results or ())
            group.reason = f"resuming: {cut.partition(';')[0]}"
            return
        if results is None:
            out, pattern = self.config.out, f"{self.config.recipe.name}-????????????"
            candidates = [*sorted(out.glob(pattern)), *sorted(out.glob(f"{pattern}/{FOLDER}/*-of-*"))]
            for candidate in (RunDirectory(path) for path in candidates if path != self.directory.path):
                cells, _ = self._stored_in(candidate, group.cells)
                if cells is not None and not any(result.planned for result in cells):
                    results, group.source = cells, candidate
                    group.reason = f"measured in {candidate.path.relative_to(out)}"
                    break
        head = self.directory.group_head(group.key)
        if self.config.retry_failed and head.get("failed"):
            group.discard = True
        if results and str(head.get("measured", "")) > results[0].measured:  # a later measurement was interrupted
            group.source, group.reason = None, "" if group.discard else "resuming"
            return
        failed = sum(result.error is not None for result in results or ())
        if failed:
            group.reason = f"{counted(failed, 'cell')} failed before"
            if self.config.retry_failed:
                return
            group.reason += "; use --retry-failed to measure again"
        group.stored = results

    def _stored_in(self, directory: RunDirectory, cells: Sequence[CellConfig]) -> tuple[list[CellResult] | None, str]:
        """Return the results of a group in a directory, or None with the reason why they cannot be reused."""
        results = [result for cell in cells if (result := directory.load(cell)) is not None]
        if not results:
            return None, ""
        if len(results) < len(cells) or len({result.measured for result in results}) > 1:
            return None, "some cells are new"
        changed: dict[str, None] = {}  # in order
        for result in results:
            changed |= dict.fromkeys(changes(result.provenance, self.provenance(result.config)))
        if changed:
            text = "; ".join(list(changed)[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            return None, f"measured again because of changes: {text}"
        return results, ""


def make_plan(config: RunConfig) -> Plan:
    """Expand the recipe of a run and load its prompts; `Plan.look_up` adds the results on disk.

    Raises:
        UsageError: the recipe, its prompts or something it names is invalid.
    """
    recipe = config.recipe
    expansion = expand(recipe)
    engine = next((cell.engine for cell in expansion.cells if cell.engine is not None), None)
    if engine or config.allow_programs:
        with recipe.places.at(("engine",)):
            plugins.of_companion("consent to programs")(expansion.cells, config.allow_programs)
    prompts = recipe.selected_prompts.load()
    if engine:
        refuse_constraints(prompts, f"the engine {engine.name}")
    path = config.out / f"{recipe.name}-{expansion.hash}"
    groups = list(expansion.groups.items())
    if config.shard:
        path, groups = config.shard.directory(path), config.shard.part(groups)
    planned = []
    for number, (key, cells) in enumerate(groups, 1):
        settings = group_title(cells[0], expansion.cells)
        title = f"group {number} of {len(groups)} ({settings})"
        planned.append(PlannedGroup(cells, key, title, settings))
    environment = {} if config.launcher else describe()
    own_cells = [cell for _, cells in groups for cell in cells]
    return Plan(
        config,
        expansion,
        prompts,
        RunDirectory(path),
        planned,
        own_cells,
        partial(provenance, environment=environment, prompts=_digest(prompts), timed=not config.untimed),
        blocks=blocks_of(prompts, {cell.batch_size for cell in expansion.cells}, Random(recipe.seed)),
        environment=environment,
        about={
            "name": recipe.name,
            "directory": str(path),
            "cells": len(own_cells),
            "shard": str(config.shard) if config.shard else "",
        },
    )


def _digest(prompts: Sequence[Prompt]) -> str:
    contents = []
    for prompt in prompts:
        content = asdict(replace(prompt, constraint=None))
        del content["constraint"]  # present only if there is one
        contents.append(content | ({"constraint": prompt.constraint.key} if prompt.constraint else {}))
    return digest(contents)
