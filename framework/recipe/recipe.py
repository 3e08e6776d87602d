"""Recipes: flat YAML files that describe a comparison, and the configs of its cells.

    target: smollm2-135m-instruct
    prompts: builtin
    drafters: [prompt-lookup, {name: draft-model, model: smollm2-draft-model}]
    verifiers: [token, block]
    matrix: {temperature: [0.6, 1.0], batch_size: [1, 8], gamma: [4]}

Each combination of matrix values, drafter and verifier is a *cell*. A matrix key is a sampling key, a run key (see
`RUN_KEYS`) or a field of ``Config`` of a drafter or verifier, and then applies to all that have it; matrix values take
precedence. Cells that differ only in drafter and verifier form a *group*: they are measured in turns, with the baseline
(drafter ``none``) added.

This module reads recipes; `bench.matrix` expands them. Errors contain file and line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from .. import plugins
from ..contracts.constraint import Constraint
from ..contracts.options import Options, fault
from ..contracts.sampling import Sampling
from ..errors import UnknownNameError, UsageError, printable, quoted
from ..util.input_files import UNPRINTABLE, describe_forbidden_char, kind_of, path_of
from ..util.limits import (
    MOST_EXCLUDED,
    MOST_LISTED,
    MOST_NAME,
    MOST_PROMPTS,
    MOST_ROWS,
    MOST_SEED,
    MOST_TOKENS,
    PREFILL_TOKENS,
)
from .builtin_recipes import builtin_recipes
from .durations import Duration
from .prompts import Prompt, load_prompts
from .yaml_errors import Places, explain, override, read_yaml
from .yaml_values import yaml_value

#: Matrix keys that are neither sampling keys nor options of a drafter or verifier.
RUN_KEYS = (
    "target",
    "engine",
    "dtype",
    "batch_size",
    "seed",
    "max_new_tokens",
    "compile_verifier",
    "prefill_tokens",
    "constraint",
)
SAMPLING_KEYS = tuple(Sampling.model_fields)
BASELINE = "none"
#: Name of the engine that is the decoding loop of this process.
OWN_ENGINE = "crossdraft"


def _printable(name: str) -> str:
    if reason := describe_forbidden_char(name, UNPRINTABLE):
        raise ValueError(f"contains {reason}; a name must be printable text on one line")
    return name


#: Names in tables, directories and messages.
Name = Annotated[str, AfterValidator(_printable)]


def _device(value: Any) -> Any:
    entries, kinds = (value.values(), str | int) if isinstance(value, dict) else ([value], str)
    if not all(isinstance(entry, kinds) and not isinstance(entry, bool) for entry in entries):
        raise ValueError(f"must be a device, or a mapping of modules to devices, not {quoted(value)}")
    return value


#: A device name, or a device map of the target.
Device = Annotated[Name | dict[Name, Name | Annotated[int, Field(ge=0, strict=True)]], BeforeValidator(_device)]


class PromptSpec(Options):
    """Selection of prompts, with the fields of `load_prompts`.

    A plain name or path is short for ``{name: ...}``; the default is the built-in prompts.
    """

    name: Name = ""
    path: Name = ""
    categories: list[Name] = Field(default=[])
    limit: int | None = Field(default=None, ge=1, le=MOST_PROMPTS)
    split: Name | None = None
    column: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and not value.keys() & {"name", "path"}:
            return {"name": "builtin", **value}
        return value

    @model_validator(mode="after")
    def _one_source(self) -> PromptSpec:
        if bool(self.name) == bool(self.path):
            raise ValueError("give either the name of the prompts or the path of a file")
        return self

    @property
    def source(self) -> str:
        return self.name or self.path

    def load(self) -> list[Prompt]:
        options = {"limit": self.limit, "split": self.split, "column": self.column}
        return load_prompts(self.source, categories=self.categories, **options)  # type: ignore[arg-type]


class Strategy(Options):
    """Name and config of a drafter or verifier. A plain name is short for ``{name: ...}``.

    In YAML and JSON the options are at the level of the name: ``{name: draft-model, model: ..., gamma: 4}``.
    """

    name: Name = Field(min_length=1)
    label: Name = Field(default="", description="name in tables")
    config: dict[str, Any] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, dict):
            return value
        fields = {key: value[key] for key in ("name", "label") if key in value}
        return fields | {"config": {key: v for key, v in value.items() if key not in fields}}

    @classmethod
    def parse(cls, text: str, place: str, options: Mapping[str, Any] | None = None) -> Strategy:
        """Parse a command-line argument: a name, or a mapping as in recipes, ``{name: draft-model, gamma: 4}``.

        Args:
            place: start of error messages.
            options: further options.

        Raises:
            UsageError: the text is not a valid strategy.
        """
        data: Any = {"name": text}
        if text.lstrip().startswith("{"):
            data = yaml_value(text, lambda line: place)
            if "name" not in data:
                raise UsageError(f"{place} {text}: a mapping needs a name, as in {{name: draft-model, gamma: 4}}")
        try:
            return cls.model_validate({**data, **(options or {})})
        except ValidationError as error:
            problem = error.errors()[0]
            raise UsageError(f"{place}: key {'.'.join(map(str, problem['loc']))!r}: {fault(problem)}") from None

    @property
    def title(self) -> str:
        """Name in tables."""
        return self.label or self.name

    @property
    def identity(self) -> str:
        """Name and options, equal for strategies that differ in their labels only."""
        return json.dumps([self.name, self.config], sort_keys=True, default=str)

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"name": self.name, **({"label": self.label} if self.label else {}), **self.config}


def _engine(value: Any) -> Any:
    return None if value == OWN_ENGINE or (isinstance(value, Mapping) and value.get("name") == OWN_ENGINE) else value


#: An engine whose server decodes; None: the decoding loop of this process.
EngineChoice = Annotated[Strategy | None, BeforeValidator(_engine)]


class RunSettings(Options):
    """Settings of a cell, and of a recipe if its matrix does not vary them."""

    target: Name = Field(min_length=1, description="name, directory or Hub id of the target model")
    engine: EngineChoice = Field(
        default=None, description="crossdraft's own loop, or an engine: a name, or a mapping of name and options"
    )
    dtype: Name = Field(default="auto", description="dtype of target and draft models")
    device: Device = Field(
        default="auto", description="cpu, cuda, cuda:1, ..; spread, a device map or tp for several devices"
    )
    attn_implementation: Name | None = Field(default=None, description="attention of the target; transformers' default")
    prompts: PromptSpec = Field(default=PromptSpec(name="builtin"), description="a name, a file, or a mapping")
    max_new_tokens: int = Field(default=128, ge=1, le=MOST_TOKENS, description="maximum number of tokens of a response")
    batch_size: int = Field(default=1, ge=1, le=MOST_ROWS, description="sequences decoded in one batch")
    seed: int = Field(default=0, ge=0, le=MOST_SEED, description="seed of all random numbers")
    compile_verifier: bool = Field(default=False, description="compile the verify step")
    prefill_tokens: int = Field(
        default=PREFILL_TOKENS,
        ge=0,
        le=MOST_TOKENS,
        description="maximum number of tokens of a prefill pass shared by prompts; 0 = one prompt per pass",
    )
    constraint: Constraint | None = Field(
        default=None, description="language of the responses: a mapping with json_schema, regex, grammar or choice"
    )
    sampling: Sampling = Field(default=Sampling.model_validate({}), description="temperature, top_k, top_p, min_p")


class CellConfig(RunSettings):
    """Complete config of a cell. Two cells are equal if their configs are equal except for labels."""

    drafter: Strategy
    verifier: Strategy

    @property
    def is_baseline(self) -> bool:
        return self.drafter.name == BASELINE

    @property
    def hash(self) -> str:
        """12 hexadecimal digits, stable across machines and Python versions."""
        return digest(self._unlabelled())

    @property
    def group(self) -> str:
        """Hash of the group: equal for cells that differ only in drafter and verifier."""
        shared = self._unlabelled()
        del shared["drafter"], shared["verifier"]
        return digest(shared)

    @property
    def drafter_traits(self) -> Any:
        """Traits of the drafter of a finished cell."""
        return plugins.recorded_traits("drafters", self.drafter.name, self.drafter.config, self.sampling)

    @property
    def verifier_traits(self) -> Any:
        """Traits of the verifier of a finished cell."""
        return plugins.recorded_traits("verifiers", self.verifier.name, self.verifier.config)

    def _unlabelled(self) -> dict[str, Any]:
        config = self.model_dump(mode="json")
        for kind in ("drafter", "verifier", "engine"):
            (config[kind] or {}).pop("label", None)
        for name in ("engine", "compile_verifier", "prefill_tokens", "constraint"):  # newer than hashes of stored runs
            if config[name] == type(self).model_fields[name].default:
                del config[name]
        return config


class Recipe(RunSettings):
    """A comparison, see the module docstring. `crossdraft.load_recipe` reads one from a file."""

    name: str = Field(
        default="recipe",
        pattern=r"^[\w.-]+$",
        max_length=MOST_NAME,
        description="name of the run; by default that of the file",
    )
    description: str = Field(default="", description="description for reports")
    question: str = Field(default="", description="question that the recipe answers")
    limit: int | None = Field(default=None, ge=1, le=MOST_PROMPTS, description="use only the first prompts")
    time: Duration | None = Field(
        default=None,
        description="time budget (90s, 5m, 2h): measures as many blocks of prompts as fit, the same for all pairs",
    )
    drafters: list[Strategy] = Field(
        min_length=1, max_length=MOST_LISTED, description="names, or mappings of name, label and options"
    )
    verifiers: list[Strategy] = Field(
        min_length=1, max_length=MOST_LISTED, description="names, or mappings of name, label and options"
    )
    matrix: dict[str, list[Any]] = Field(default={}, description="lists of values; all combinations are run")
    exclude: list[dict[str, Any]] = Field(
        default=[], max_length=MOST_EXCLUDED, description="exclude cells that match an entry"
    )

    _places: Places = PrivateAttr(default_factory=Places)

    @field_validator("matrix", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: v if isinstance(v, list) else [v] for key, v in value.items()}
        return value

    @field_validator("drafters", "verifiers", mode="after")
    @classmethod
    def _short(cls, value: list[Strategy]) -> list[Strategy]:
        # Not in Strategy: labels of cells contain the options that differ, and may be longer.
        if long := next((strategy.label for strategy in value if MOST_NAME.violation(strategy.label)), None):
            raise ValueError(f"the label {quoted(long, 30)} is too long; {MOST_NAME.violation(long)}")
        return value

    @property
    def selected_prompts(self) -> PromptSpec:
        """Prompts with the limit of the recipe, which takes precedence."""
        limit = self.limit if self.limit is not None else self.prompts.limit
        return self.prompts.model_copy(update={"limit": limit})

    @property
    def places(self) -> Places:
        """Places of the keys, for errors."""
        return self._places


def read_recipe(name: str | Path, overrides: Mapping[str, Any] | Iterable[str] = ()) -> Recipe:
    """Read a recipe and check its keys, but not its cells: its plug-ins need not be installed."""
    path = _find(str(name))
    data, places = read_yaml(path)
    override(data, places, overrides)
    data.setdefault("name", re.sub(r"[^\w.-]", "-", path.stem)[:MOST_NAME])
    with places.at(("prompts",)):
        _resolve_prompt_file(data, path)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        models: Any = {(): Recipe, ("sampling",): Sampling, ("prompts",): PromptSpec}
        models |= {("constraint",): Constraint}
        hints = dict.fromkeys(SAMPLING_KEYS, "; put it under sampling, or under matrix with a list of values")
        hints["trust_remote_code"] = "; a recipe cannot allow that; use crossdraft run --trust-remote-code MODEL"
        raise explain(error, places, models=models, hints=hints) from None
    recipe._places = places
    return recipe


def _find(name: str) -> Path:
    path = path_of(name)
    kind = kind_of(path)
    if kind in ("file", "other"):
        return path
    if name in (recipes := builtin_recipes()):
        return recipes[name]
    if path.suffix in (".yaml", ".yml", ".json") or kind == "directory":
        problem = "is a directory" if kind else "does not exist"
        raise UsageError(f"the recipe file {printable(name)} {problem}; recipes by name: {', '.join(recipes)}")
    raise UnknownNameError.among("recipe", name, recipes, "Or give the path of a YAML file.")


def _resolve_prompt_file(data: dict[str, Any], recipe: Path) -> None:
    """Look up a relative prompt file in the directory of the recipe if it is not in the current one."""
    prompts = data.get("prompts")
    spec = {"name": prompts} if isinstance(prompts, str) else prompts
    if not isinstance(spec, dict):
        return
    for key in ("name", "path"):
        source = spec.get(key)
        if not isinstance(source, str) or not source or source in plugins.entries("prompts"):
            continue
        sibling = recipe.parent / source
        if not kind_of(source) and kind_of(sibling):
            data["prompts"] = spec | {key: str(sibling)}


def digest(value: Any) -> str:
    """First 12 hexadecimal digits of the SHA-256 of a value as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
