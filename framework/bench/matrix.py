"""From a recipe to its cells: every combination of the matrix, the drafters and the verifiers, checked.

Names, configs and pairs are decided from registered classes and their traits; no model is loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from .. import plugins
from ..contracts.errors import UnknownNameError, UsageError
from ..contracts.sampling import Sampling
from ..contracts.verifier import incompatible
from ..models.device import pick_dtype
from ..runs.prompts import check_source
from ..runs.recipe import BASELINE, RUN_KEYS, SAMPLING_KEYS, CellConfig, Recipe, Strategy, digest, read_recipe
from ..runs.yaml_errors import KeyPath, Places, dotted, explain, suggest


@dataclass
class Plan:
    """What a recipe comes to.

    Attributes:
        cells: in the order they are reported; the baseline of each group first.
        skipped: why pairs of the cross product are left out, a sentence each.
    """

    cells: list[CellConfig] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def groups(self) -> list[list[CellConfig]]:
        """The cells that are measured together."""
        groups: dict[str, list[CellConfig]] = {}
        for cell in self.cells:
            groups.setdefault(cell.group, []).append(cell)
        return list(groups.values())

    @property
    def hash(self) -> str:
        """12 hexadecimal digits: the same for recipes with the same cells."""
        return digest(sorted(cell.hash for cell in self.cells))


def load_recipe(name: str | Path, overrides: Mapping[str, Any] | Iterable[str] = ()) -> Recipe:
    """Read, complete and check the recipe in the file `name`, or the registered one of that name.

    Args:
        overrides: dotted keys and what they are set to, ``{"matrix.batch_size": [1, 4]}``, or as on the
            command line: ``["matrix.batch_size=[1,4]", "limit=8", "drafters.0.gamma=6"]``.

    Raises:
        UsageError: for everything that is wrong with it, with file and line.
    """
    recipe = read_recipe(name, overrides)
    plan(recipe)
    return recipe


def plan(recipe: Recipe) -> Plan:
    """Check all names and configs of a recipe, and expand its matrix.

    Raises:
        UsageError: with the place; an unknown name or key, a config that its drafter or verifier refuses, or drafters
            and verifiers of which none, or one in no cell, can be paired.
    """
    return _Expansion(recipe, recipe.places).plan()


@dataclass
class _Side:
    """A drafter or verifier of the recipe: its place, its class, and how its pairs fare."""

    kind: str  # "drafters" or "verifiers"
    path: KeyPath
    strategy: Strategy
    cls: Any
    paired: int = 0
    refused: list[str] = field(default_factory=list)

    @property
    def fields(self) -> set[str]:
        """The config keys that the matrix may set; a sampling or run key of that name means the run's."""
        return set(self.cls.Config.model_fields) - {*RUN_KEYS, *SAMPLING_KEYS}


class _Expansion:
    def __init__(self, recipe: Recipe, places: Places):
        self.recipe, self.places = recipe, places
        self.drafters = [self._side("drafters", i, s) for i, s in enumerate(recipe.drafters)]
        self.verifiers = [self._side("verifiers", i, s) for i, s in enumerate(recipe.verifiers)]
        fields = set().union(*(side.fields for side in (*self.drafters, *self.verifiers)))
        self.matrix_keys = {*SAMPLING_KEYS, *RUN_KEYS, *fields}
        self.at: dict[str, int] = {}  # which value of each matrix row the current point has

    def plan(self) -> Plan:
        self._check_prompts()
        self._check_matrix()
        self._check_exclude()
        drafters = [side for side in self.drafters if side.strategy.name != BASELINE]  # it is always there
        plan = Plan()
        found: dict[str, CellConfig] = {}
        for run_point in self._points([*RUN_KEYS, *SAMPLING_KEYS]):
            base = self._baseline(run_point)
            group = {base.hash: base}
            for drafter, verifier in itertools.product(drafters, self.verifiers):
                for point in self._points(sorted(drafter.fields | verifier.fields)):
                    pair = {
                        "drafter": self._resolved(drafter, point),
                        "verifier": self._resolved(verifier, point),
                    }
                    cell = base.model_copy(update=pair)
                    if self._excluded(cell):
                        continue
                    if reason := self._incompatible(cell, drafter, verifier):
                        if reason not in plan.skipped:
                            plan.skipped.append(reason)
                        continue
                    group.setdefault(cell.hash, cell)
            if len(group) > 1 or not drafters:
                found |= group
        if drafters:
            self._check_pairs(drafters, plan.skipped)
        if not found:
            raise self.places.error(("exclude",), "exclude leaves no cell to run")
        plan.cells = _labelled(list(found.values()))
        return plan

    # -- pieces ----------------------------------------------------------------------------------------------

    def _side(self, kind: str, index: int, strategy: Strategy) -> _Side:
        known = plugins.entries(kind)
        if strategy.name not in known:
            raise self._unknown((kind, index), kind.removesuffix("s"), strategy.name, known)
        return _Side(kind, (kind, index), strategy, plugins.get(kind, strategy.name))

    def _points(self, keys: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Every combination of the matrix rows among `keys`, the first key slowest."""
        names = [key for key in keys if key in self.recipe.matrix]
        for values in itertools.product(*(enumerate(self.recipe.matrix[name]) for name in names)):
            self.at |= {name: i for name, (i, _) in zip(names, values, strict=True)}
            yield {name: value for name, (_, value) in zip(names, values, strict=True)}

    def _in_matrix(self, keys: Iterable[str]) -> dict[KeyPath, KeyPath]:
        """Where an error about a key of the current point belongs."""
        return {(key,): ("matrix", key, self.at[key]) for key in keys}

    def _baseline(self, point: Mapping[str, Any]) -> CellConfig:
        """The cell of plain decoding at a point of the run and sampling keys."""
        recipe, where = self.recipe, self._in_matrix(point)
        keys = (*RUN_KEYS, "device", "attn_implementation")
        run = {key: point.get(key, getattr(recipe, key)) for key in keys}
        sampled = {key: point[key] for key in SAMPLING_KEYS if key in point}
        try:
            sampling = Sampling(**recipe.sampling.model_dump() | sampled)
            cell = CellConfig(
                **run,
                prompts=recipe.selected_prompts,
                sampling=sampling,
                drafter=Strategy(name=BASELINE),
                verifier=Strategy(name="greedy" if sampling.temperature == 0 else "token"),
            )
        except ValidationError as error:
            raise explain(error, self.places, where=where) from None
        self._check_model(cell.target, where.get(("target",), ("target",)))
        if cell.dtype != "auto":
            try:
                pick_dtype(cell.dtype, torch.device("cpu"))
            except UsageError as error:
                raise self.places.error(where.get(("dtype",), ("dtype",)), str(error)) from None
        return cell

    def _resolved(self, side: _Side, point: Mapping[str, Any]) -> Strategy:
        """The strategy with its whole config, defaults included, checked by its own class."""
        mine = {key: value for key, value in point.items() if key in side.fields}
        where = {(): side.path} | self._in_matrix(mine)
        try:
            config = side.cls.Config(**side.strategy.config | mine)
        except ValidationError as error:
            owner = f"{side.kind.removesuffix('s')} '{side.strategy.name}'"
            raise explain(error, self.places, where=where, models={(): side.cls.Config}, owner=owner) from None
        if isinstance(model := getattr(config, "model", None), str):
            self._check_model(model, where.get(("model",), (*side.path, "model")))
        return side.strategy.model_copy(update={"config": config.model_dump(mode="json")})

    def _incompatible(self, cell: CellConfig, drafter: _Side, verifier: _Side) -> str | None:
        names = drafter.strategy.name, verifier.strategy.name
        traits = drafter.cls.traits(drafter.cls.Config(**cell.drafter.config), cell.sampling)
        rule = verifier.cls.traits(verifier.cls.Config(**cell.verifier.config))
        reason = incompatible(names[0], traits, names[1], rule, cell.sampling)
        for side in (drafter, verifier):
            if reason is None:
                side.paired += 1
            else:
                side.refused.append(reason)
        return reason

    def _excluded(self, cell: CellConfig) -> bool:
        entries = self.recipe.exclude
        return any(all(_matches(cell, key, value) for key, value in entry.items()) for entry in entries)

    # -- checks ----------------------------------------------------------------------------------------------

    def _unknown(self, path: KeyPath, what: str, name: str, known: Iterable[str], hint: str = "") -> UsageError:
        error = UnknownNameError.among(what, name, known, hint)
        return self.places.error(path, str(error), UnknownNameError)

    def _check_prompts(self) -> None:
        try:
            check_source(self.recipe.prompts.source)
        except UsageError as error:
            raise self.places.error(("prompts",), str(error), type(error)) from None

    def _check_model(self, name: str, path: KeyPath) -> None:
        """That `name` can be a model; whether it can be had is known only when it is loaded."""
        known = plugins.entries("models")
        if name in known or Path(name).expanduser().exists():
            return
        if name.startswith(("/", ".", "~")) or name.count("/") > 1:
            raise self.places.error(path, f"there is no model directory {name}")
        if "/" not in name:
            raise self._unknown(path, "model", name, known, "Or give a directory, or a Hub id (org/name).")

    def _check_matrix(self) -> None:
        for key, values in self.recipe.matrix.items():
            path = ("matrix", key)
            if key not in self.matrix_keys:
                what = f"unknown key {key!r} in matrix: no drafter or verifier of this recipe has it"
                raise self.places.error(path, what + suggest(key, self.matrix_keys))
            if not values:
                raise self.places.error(path, f"{dotted(path)} is an empty list, which leaves no cell")

    def _check_exclude(self) -> None:
        keys = {"drafter", "verifier", *self.matrix_keys}
        for i, entry in enumerate(self.recipe.exclude):
            if not entry:
                raise self.places.error(("exclude", i), "an empty entry of exclude would leave out every cell")
            for key, value in entry.items():
                path = ("exclude", i, key)
                if key not in keys:
                    raise self.places.error(path, f"unknown key {key!r} in exclude{suggest(key, keys)}")
                if key not in ("drafter", "verifier"):
                    continue
                sides = self.drafters if key == "drafter" else self.verifiers
                known = {*plugins.entries(f"{key}s"), *(s.strategy.label for s in sides if s.strategy.label)}
                for name in value if isinstance(value, list) else [value]:
                    if name not in known:
                        raise self._unknown(path, key, str(name), known)

    def _check_pairs(self, drafters: list[_Side], skipped: list[str]) -> None:
        for side in (*drafters, *self.verifiers):
            if side.refused and not side.paired:
                what = f"{side.kind.removesuffix('s')} '{side.strategy.name}' runs in no cell"
                raise self.places.error(side.path, f"{what}: {side.refused[0]}")
        if len(self.verifiers) == 1 and skipped:  # a choice, not what a cross product leaves over
            raise self.places.error(self.verifiers[0].path, f"{skipped[0]}, or exclude these cells")


def _matches(cell: CellConfig, key: str, wanted: Any) -> bool:
    """Whether a cell has `wanted`, or one of the values in it, under `key`."""
    options = wanted if isinstance(wanted, list) else [wanted]
    if key in ("drafter", "verifier"):
        strategy: Strategy = getattr(cell, key)
        return strategy.name in options or (strategy.label != "" and strategy.label in options)
    if key in SAMPLING_KEYS:
        return getattr(cell.sampling, key) in options
    if key in RUN_KEYS:
        return getattr(cell, key) in options
    return any(key in s.config and s.config[key] in options for s in (cell.drafter, cell.verifier))


def _labelled(cells: list[CellConfig]) -> list[CellConfig]:
    """Give each strategy a label; the config keys that differ tell apart those that would share one."""
    for kind in ("drafter", "verifier"):
        variants: dict[str, list[dict[str, Any]]] = {}
        strategies: list[Strategy] = [getattr(cell, kind) for cell in cells]
        for cell, strategy in zip(cells, strategies, strict=True):
            configs = variants.setdefault(strategy.title, [])
            if strategy.config not in configs and not cell.is_baseline:
                configs.append(strategy.config)
        for i, strategy in enumerate(strategies):
            label, config = strategy.title, strategy.config
            others = variants[label]
            differ = [key for key in config if any(v.get(key) != config[key] for v in others)]
            label += "".join(f" {key}={_shown(config[key])}" for key in differ)
            cells[i] = cells[i].model_copy(update={kind: strategy.model_copy(update={"label": label})})
    return cells


def _shown(value: Any) -> str:
    """An option in a label: of one that has options of its own, its name and what was set."""
    if not isinstance(value, dict) or "name" not in value:
        return str(value)
    own = [f"{key}={v}" for key, v in value.items() if key != "name" and v is not None]
    return f"{value['name']}({', '.join(own)})" if own else str(value["name"])
