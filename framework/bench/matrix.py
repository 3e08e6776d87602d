"""Expansion of a recipe to its cells: all combinations of the matrix, the drafters and the verifiers.

Names, configs and pairs are checked with registered classes and their traits; no model is loaded.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from .. import plugins
from ..contracts.constraint import Constraint, checked_constraint
from ..contracts.sampling import Sampling
from ..contracts.verifier import incompatible
from ..errors import ContractError, CrossdraftError, UnknownNameError, UsageError, printable, quoted
from ..models.adapters import split_adapter
from ..models.device import pick_dtype
from ..models.quantization import split
from ..recipe.prompts import source_kind
from ..recipe.recipe import (
    BASELINE,
    OWN_ENGINE,
    RUN_KEYS,
    SAMPLING_KEYS,
    CellConfig,
    Recipe,
    Strategy,
    digest,
    read_recipe,
)
from ..recipe.yaml_errors import KeyPath, dotted, explain, suggest
from ..util.input_files import kind_of
from ..util.limits import MOST_CELLS


@dataclass(frozen=True)
class Expansion:
    """Cells of a recipe.

    Attributes:
        cells: cells in the order of reports; the baseline of each group first.
        groups: cells by the hash of their group, see `bench.group_runner`.
        hash: 12 hexadecimal digits, equal for recipes with the same cells.
        skipped: reasons why pairs of the cross product are left out.
    """

    cells: list[CellConfig]
    groups: dict[str, list[CellConfig]]
    hash: str
    skipped: list[str]


def load_recipe(name: str | Path, overrides: Mapping[str, Any] | Iterable[str] = ()) -> Recipe:
    """Load and check a recipe.

    Args:
        name: path of a YAML file, or name of a built-in recipe.
        overrides: values by dotted keys, ``{"matrix.batch_size": [1, 4]}``, or as on the command line,
            ``["matrix.batch_size=[1,4]", "limit=8", "drafters.0.gamma=6"]``.

    Raises:
        UsageError: the recipe is invalid; the message contains file and line.
    """
    recipe = read_recipe(name, overrides)
    expand(recipe)
    return recipe


def expand(recipe: Recipe) -> Expansion:
    """Check all names and configs of a recipe, and expand its matrix.

    Raises:
        UsageError: an unknown name or key, an invalid config of a drafter or verifier, a drafter or verifier without a
            compatible partner, a duplicate pair, an exclude entry without a match, or too many cells; with the place
            in the recipe.
        ContractError: invalid config or traits of a plug-in; with the place in the recipe.
    """
    return _Expander(recipe).expand()


@dataclass
class _Side:
    """A drafter or verifier of the recipe, with the results of pairing it."""

    kind: str  # "drafters" or "verifiers"
    path: KeyPath
    strategy: Strategy
    cls: Any
    #: Config keys that the matrix may set; sampling and run keys take precedence.
    fields: set[str]
    paired: int = 0
    refused: list[str] = field(default_factory=list)
    #: Strategies with their complete configs, and these, by the places of their matrix values.
    resolved: dict[tuple[KeyPath, ...], tuple[Strategy, Any]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.kind.removesuffix('s')} '{self.strategy.name}'"


def _engine_refusal(cell: CellConfig) -> str | None:
    """The reason why the engine of a cell does not run its pair; None if it does."""
    try:
        plugins.of_companion("runner of engines").check_pair(cell)
    except UsageError as error:
        return str(error)
    return None


class _Expander:
    def __init__(self, recipe: Recipe):
        self.recipe, self.places = recipe, recipe.places
        self.drafters = [self._side("drafters", i, s) for i, s in enumerate(recipe.drafters)]
        self.verifiers = [self._side("verifiers", i, s) for i, s in enumerate(recipe.verifiers)]
        fields = set().union(*(side.fields for side in (*self.drafters, *self.verifiers)))
        self.matrix_keys = {*SAMPLING_KEYS, *RUN_KEYS, *fields}

    def expand(self) -> Expansion:
        with self.places.at(("prompts",)):
            source_kind(self.recipe.prompts.source)
        self._check_labels()
        self._check_matrix()
        self._check_exclude()
        drafters = [side for side in self.drafters if side.strategy.name != BASELINE]  # part of every group
        self._check_count(drafters)
        cells: dict[str, CellConfig] = {}
        refusals: list[tuple[str, str, float]] = []  # reason, pair and temperature
        left_out: list[tuple[str, str, float]] = []  # the same of plain decoding
        measured: dict[str, set[float]] = {}  # temperatures by pair
        excluded: set[int] = set()  # entries of exclude that matched
        for run_point, places in self._points([*RUN_KEYS, *SAMPLING_KEYS]):
            base = self._baseline(run_point, places)
            if not drafters and (matching := self._excluding(base)):
                excluded |= matching
                continue
            group = {base.hash: base}
            sides: dict[str, tuple[_Side, _Side]] = {}
            for drafter, verifier in itertools.product(drafters, self.verifiers):
                for point, places in self._points(sorted(drafter.fields | verifier.fields)):
                    pair = self._resolved(drafter, point, places), self._resolved(verifier, point, places)
                    cell = base.model_copy(update={"drafter": pair[0][0], "verifier": pair[1][0]})
                    if matching := self._excluding(cell):
                        excluded |= matching
                        continue
                    title = f"{drafter.strategy.title} × {verifier.strategy.title}"
                    if reason := self._incompatible(drafter, verifier, pair[0][1], pair[1][1], cell):
                        refusals.append((reason, title, cell.sampling.temperature))
                        continue
                    measured.setdefault(title, set()).add(cell.sampling.temperature)
                    key = cell.hash
                    self._check_duplicate(sides.setdefault(key, (drafter, verifier)), (drafter, verifier))
                    group.setdefault(key, cell)
            if (
                len(group) > 1 and base.engine and (reason := _engine_refusal(base))
            ):  # left out; without pairs, it fails
                left_out.append((reason, f"{base.drafter.title} × {base.verifier.title}", base.sampling.temperature))
                cells |= {key: cell for key, cell in group.items() if cell is not base}
            elif len(group) > 1 or not drafters:
                cells |= group
        if drafters:
            self._check_pairs(drafters, [reason for reason, *_ in refusals])
        if not cells:
            raise self.places.error(("exclude",), "exclude matches every cell; no cell is left to run")
        for i, entry in enumerate(self.recipe.exclude):
            if drafters and i not in excluded and not self._is_overridden(i, entry):
                message = f"exclude[{i}], {quoted(entry)}, matches no cell; correct or remove it"
                raise self.places.error(("exclude", i), message)
        groups: dict[str, list[CellConfig]] = {}
        labelled = _labelled(list(cells.values()))
        for cell in labelled:
            groups.setdefault(cell.group, []).append(cell)
        return Expansion(labelled, groups, digest(sorted(cells)), _skipped([*refusals, *left_out], measured))

    def _is_overridden(self, i: int, entry: Mapping[str, Any]) -> bool:
        """True if ``--set`` changed the values of a key of an exclude entry that it did not set itself."""
        lists = {"drafter": ("drafters",), "verifier": ("verifiers",)}
        changed = [self.places.of(lists.get(key, ("matrix", key))) for key in entry]
        return not self.places.of(("exclude", i)).startswith("--set") and any(p.startswith("--set") for p in changed)

    # -- expansion -------------------------------------------------------------------------------------------

    def _side(self, kind: str, index: int, strategy: Strategy) -> _Side:
        with self.places.at((kind, index)):
            cls = plugins.get(kind, strategy.name)
        fields = set(cls.Config.model_fields) - {*RUN_KEYS, *SAMPLING_KEYS}
        return _Side(kind, (kind, index), strategy, cls, fields)

    def _points(self, keys: Iterable[str]) -> Iterator[tuple[dict[str, Any], dict[KeyPath, KeyPath]]]:
        """Every combination of the matrix rows among `keys`, the first key slowest; and places in the recipe by key."""
        names = [key for key in keys if key in self.recipe.matrix]
        for values in itertools.product(*(enumerate(self.recipe.matrix[name]) for name in names)):
            items = [(name, i, value) for name, (i, value) in zip(names, values, strict=True)]
            yield {name: value for name, _, value in items}, {(name,): ("matrix", name, i) for name, i, _ in items}

    def _baseline(self, point: Mapping[str, Any], places: Mapping[KeyPath, KeyPath]) -> CellConfig:
        """Cell of plain decoding at a point of the run and sampling keys."""
        recipe = self.recipe
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
            raise explain(error, self.places, renamed=places) from None
        with self.places.at(places.get(("target",), ("target",))):
            _check_model(cell.target)
        with self.places.at(places.get(("dtype",), ("dtype",))):
            if cell.dtype != "auto":
                pick_dtype(cell.dtype, torch.device("cpu"))
        return (
            cell if cell.engine is None else self._with_engine(cell, cell.engine, places.get(("engine",), ("engine",)))
        )

    def _resolved(
        self, side: _Side, point: Mapping[str, Any], places: Mapping[KeyPath, KeyPath]
    ) -> tuple[Strategy, Any]:
        """Return the strategy with its complete config, and this, validated by its class and as JSON."""
        own = {(key,): places[(key,)] for key in point if key in side.fields}
        if (known := side.resolved.get(tuple(own.values()))) is not None:
            return known
        name, Config = side.strategy.name, side.cls.Config
        options = {**side.strategy.config, **{key: point[key] for (key,) in own}}
        with self.places.at(side.path, ContractError):
            try:
                with plugins.guarded(side.kind, name, "its Config", (CrossdraftError, ValidationError)):
                    config = Config(**options)
            except ValidationError as error:
                renamed: dict[KeyPath, KeyPath] = {(): side.path, **own}
                raise explain(error, self.places, renamed=renamed, models={(): Config}, owner=side.title) from None
            with plugins.guarded(side.kind, name, "its Config, written as JSON and read again,", ()):
                plain = config.model_dump(mode="json")
                parsed = type(config)(**json.loads(json.dumps(plain, allow_nan=False)))
                if parsed != config:
                    raise ValueError(f"{config} becomes {parsed}")
        # Only a config field, not another attribute named model.
        if "model" in Config.model_fields and isinstance(model := config.model, str):
            with self.places.at(own.get(("model",), (*side.path, "model"))):
                _check_model(model)
        resolved = side.strategy.model_copy(update={"config": plain}), config
        side.resolved[tuple(own.values())] = resolved
        return resolved

    def _incompatible(
        self, drafter: _Side, verifier: _Side, draft_config: Any, verify_config: Any, cell: CellConfig
    ) -> str | None:
        with self.places.at(drafter.path, ContractError):
            draft = plugins.traits_of("drafters", drafter.cls, draft_config, cell.sampling)
        with self.places.at(verifier.path, ContractError):
            accepted = plugins.traits_of("verifiers", verifier.cls, verify_config)
        reason = incompatible(drafter.strategy.name, draft, verifier.strategy.name, accepted, cell.sampling)
        reason = reason or (_engine_refusal(cell) if cell.engine else None)
        for side in (drafter, verifier):
            if reason is None:
                side.paired += 1
            else:
                side.refused.append(reason)
        return reason

    def _excluding(self, cell: CellConfig) -> set[int]:
        """Indices of the exclude entries that match the cell."""
        entries = enumerate(self.recipe.exclude)
        return {i for i, entry in entries if all(_matches(cell, key, value) for key, value in entry.items())}

    # -- checks ----------------------------------------------------------------------------------------------

    def _check_labels(self) -> None:
        """Raise UsageError for a label in use for another drafter or verifier: results would share a name."""
        for sides in (self.drafters, self.verifiers):
            titles: dict[str, _Side] = {}
            for side in sides:
                first = titles.setdefault(side.strategy.title, side)
                if first.strategy.name != side.strategy.name:
                    message = f"{dotted(side.path)} has the same name in tables as {dotted(first.path)}, {first.title}"
                    raise self.places.error(side.path, f"{message}: {quoted(side.strategy.title)}; change its label")

    def _with_engine(self, cell: CellConfig, engine: Strategy, path: KeyPath) -> CellConfig:
        """Check the name and the options of the engine; returns the cell with all options."""
        name = engine.name
        with self.places.at(path):
            if cell.constraint is not None:
                raise UsageError(
                    f"engine {name}: constraint is given, which only crossdraft's own loop supports; remove it or the "
                    "engine"
                )
            plugins.of_companion("runner of engines")
            if name not in (names := plugins.entries("servers")):
                hint = "Engines are plug-ins, such as crossdraft-vllm and crossdraft-llamacpp."
                raise UnknownNameError.among("engine", name, [OWN_ENGINE, *names], hint)
        Config = plugins.get("servers", name).Config
        try:
            config = Config(**engine.config)
        except ValidationError as error:
            raise explain(error, self.places, renamed={(): path}, models={(): Config}, owner=name) from None
        engine = engine.model_copy(update={"config": config.model_dump(mode="json")})
        return cell.model_copy(update={"engine": engine})

    def _check_matrix(self) -> None:
        for key, values in self.recipe.matrix.items():
            with self.places.at(("matrix", key)):
                if key not in self.matrix_keys:
                    message = f"unknown key {key!r} in matrix: no drafter or verifier of this recipe has this option"
                    raise UsageError(message + suggest(key, self.matrix_keys))
                if not values:
                    raise UsageError(f"{dotted(('matrix', key))} is an empty list; add a value or remove the key")

    def _check_exclude(self) -> None:
        keys = {"drafter", "verifier", *self.matrix_keys}
        for i, entry in enumerate(self.recipe.exclude):
            with self.places.at(("exclude", i)):
                if not entry:
                    raise UsageError(f"exclude[{i}] is empty and would match every cell; add a key or remove it")
            for key, value in entry.items():
                with self.places.at(("exclude", i, key)):
                    if key not in keys:
                        raise UsageError(f"unknown key {key!r} in exclude{suggest(key, keys)}")
                    if not self._is_overridden(i, entry):  # it may name what is not there any more
                        self._check_excluded(f"exclude[{i}].{key}", key, value if isinstance(value, list) else [value])

    def _check_excluded(self, name: str, key: str, options: list[Any]) -> None:
        """Check the values of a key of an entry of ``exclude``."""
        if key == "constraint":
            for option in options:
                checked_constraint(option, name)
        if key in ("drafter", "verifier"):
            sides = self.drafters if key == "drafter" else self.verifiers
            names = {*plugins.entries(f"{key}s"), *(s.strategy.label for s in sides if s.strategy.label)}
            for option in options:
                if not isinstance(option, str):
                    raise UsageError(f"{name} must be a name or a list of names, not {quoted(option)}")
                if option not in names:
                    raise UnknownNameError.among(key, option, names)

    def _check_count(self, drafters: list[_Side]) -> None:
        """Check the number of cells before creating them."""
        rows = {key: len(values) for key, values in self.recipe.matrix.items()}
        outer = prod(rows.get(key, 1) for key in (*RUN_KEYS, *SAMPLING_KEYS))
        pairs = itertools.product(drafters, self.verifiers)
        inner = sum(prod(rows.get(key, 1) for key in drafter.fields | verifier.fields) for drafter, verifier in pairs)
        if reason := MOST_CELLS.violation(outer * (inner + 1)):
            raise self.places.error(("matrix",), f"the recipe has {outer * (inner + 1)} cells; {reason}")

    def _check_duplicate(self, first: tuple[_Side, _Side], second: tuple[_Side, _Side]) -> None:
        """Raise UsageError for a drafter or verifier that equals an earlier one except for its label."""
        for old, new in zip(first, second, strict=True):
            if old is not new:
                message = f"{dotted(new.path)}: {new.title} is the same as {dotted(old.path)}, with the same options"
                raise self.places.error(new.path, f"{message} (those of the matrix included); remove one of them")

    def _check_pairs(self, drafters: list[_Side], skipped: list[str]) -> None:
        for side in (*drafters, *self.verifiers):
            if side.refused and not side.paired:
                hint = f"; see crossdraft list drafters {side.strategy.name} for compatible verifiers"
                hint = hint if side.kind == "drafters" else ""
                raise self.places.error(side.path, f"{side.title} has no compatible partner: {side.refused[0]}{hint}")
        if len(self.verifiers) == 1 and skipped:  # with a single verifier every pair is explicit
            raise self.places.error(self.verifiers[0].path, f"{skipped[0]}, or exclude these cells")


def _check_model(name: str) -> None:
    """Raise UsageError unless ``name`` may be a model name, path or Hub id; it is not loaded."""
    names = plugins.entries("models")
    if name in names or (name and kind_of(name)):
        return
    base, quantization = split(name)
    if quantization:
        return _check_model(base)
    base, adapter = split_adapter(name)
    if adapter:
        if not kind_of(adapter) and "/" not in adapter:
            raise UsageError(f"the adapter {quoted(adapter)} is neither a directory nor a Hub id (org/name)")
        return _check_model(base)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UsageError(f"model directory {printable(name)} does not exist")
    if "/" not in name:
        raise UnknownNameError.among("model", name, names, "Or give a directory, or a Hub id (org/name).")


def _skipped(refusals: Sequence[tuple[str, str, float]], measured: Mapping[str, Collection[float]]) -> list[str]:
    """The reasons of refusals, each once.

    A reason that does not name the temperature is replaced for pairs that are measured at other temperatures: drafters
    of several sequences draft one chain at temperature 0.
    """
    reasons, elsewhere = dict[str, None](), dict[tuple[str, str], dict[str, None]]()
    for reason, pair, temperature in refusals:
        temperatures = measured.get(pair, ())
        if not temperatures or temperature in temperatures or f"temperature is {temperature:g}" in reason:
            reasons[reason] = None
            continue
        key = f"{temperature:g}", ", ".join(f"{t:g}" for t in sorted(temperatures))
        elsewhere.setdefault(key, {})[pair] = None
    lines = [
        f"at temperature {refused}, {', '.join(pairs)}: measured at temperature {others} only"
        for (refused, others), pairs in elsewhere.items()
    ]
    return [*reasons, *lines]


def _matches(cell: CellConfig, key: str, value: Any) -> bool:
    """Return True if the cell has `value`, or an item of that list, under `key`."""
    options = value if isinstance(value, list) else [value]
    if key == "verifier" and cell.is_baseline:
        return False
    if key in ("drafter", "verifier"):
        strategy: Strategy = getattr(cell, key)
        return strategy.name in options or (strategy.label != "" and strategy.label in options)
    if key in SAMPLING_KEYS:
        return getattr(cell.sampling, key) in options
    if key == "engine":
        return (cell.engine.name if cell.engine else OWN_ENGINE) in options
    if key == "constraint":
        return (cell.constraint and cell.constraint.key) in [
            Constraint.model_validate(option).key if isinstance(option, dict) else option for option in options
        ]
    if key in RUN_KEYS:
        return getattr(cell, key) in options
    return any(key in s.config and s.config[key] in options for s in (cell.drafter, cell.verifier))


def _labelled(cells: list[CellConfig]) -> list[CellConfig]:
    """Set the labels of strategies and engines; options that differ are appended if they would share a label."""
    for kind in ("drafter", "verifier", "engine"):
        by_id = {id(strategy): strategy for cell in cells if (strategy := getattr(cell, kind)) is not None}
        measured = {id(getattr(cell, kind)) for cell in cells if kind == "engine" or not cell.is_baseline}
        variants: dict[str, dict[str, dict[str, Any]]] = {}  # by title: configs by their JSON
        for number, strategy in by_id.items():
            if number in measured:
                variants.setdefault(strategy.title, {})[json.dumps(strategy.config)] = strategy.config
        values: dict[str, dict[str, set[str]]] = {}  # by title and key: JSON values, null if missing
        for title, configs in variants.items():
            keys = {key for config in configs.values() for key in config}
            values[title] = {key: {json.dumps(config.get(key)) for config in configs.values()} for key in keys}
        for number, strategy in by_id.items():
            label, others = strategy.title, values.get(strategy.title, {})
            config = {key: value for key, value in strategy.config.items() if value is not None}
            differ = [key for key, value in config.items() if others.get(key, set()) - {json.dumps(value)}]
            label += "".join(f" {key}={_shown(config[key])}" for key in differ)
            by_id[number] = strategy.model_copy(update={"label": label})
        cells = [cell.model_copy(update={kind: by_id.get(id(getattr(cell, kind)))}) for cell in cells]
    return cells


def _shown(value: Any) -> str:
    """Format an option for a label; nested strategies as name(option=value, ...)."""
    if not isinstance(value, dict) or "name" not in value:
        return str(value)
    options = [f"{key}={v}" for key, v in value.items() if key != "name" and v is not None]
    return f"{value['name']}({', '.join(options)})" if options else str(value["name"])
