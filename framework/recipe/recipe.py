"""A recipe: one flat YAML file that says what to compare, and the cells that follow from it.

    target: smollm2-135m-instruct
    prompts: builtin
    drafters: [prompt-lookup, {name: draft-model, model: smollm2-draft-model}]
    verifiers: [token, block]
    matrix: {temperature: [0.6, 1.0], batch_size: [1, 8], gamma: [4]}

Every combination of the matrix, every drafter and every verifier is a *cell*. A matrix key is a sampling key,
a run key (see `RUN_KEYS`) or a field of some drafter's or verifier's ``Config``, and then applies to all that
have it; what the matrix says goes before what stands elsewhere. The cells that differ in drafter and verifier
alone are a *group*: they are measured together, with the drafter ``none`` (the baseline) added.

This module reads recipes and says what a cell is; `bench.matrix` expands them. Every error names the file and the line.
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
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from .. import plugins
from ..contracts.options import Options, fault
from ..contracts.sampling import Sampling
from ..errors import UnknownNameError, UsageError, printable, quoted
from ..util.input_files import UNPRINTABLE, flaw, kind_of, path_of
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
from .durations import Duration
from .prompts import Prompt, load_prompts
from .yaml_errors import Places, explain, override, read_yaml
from .yaml_values import yaml_value

#: What may be in the matrix and belongs to neither the sampling nor a drafter or verifier.
RUN_KEYS = ("target", "dtype", "batch_size", "seed", "max_new_tokens", "compile_verifier", "prefill_tokens")
SAMPLING_KEYS = tuple(Sampling.model_fields)
BASELINE = "none"


def _printable(name: str) -> str:
    if reason := flaw(name, UNPRINTABLE):
        raise ValueError(f"holds {reason}; a name is printable text on one line")
    return name


#: What tables, directories and sentences show.
Name = Annotated[str, AfterValidator(_printable)]


#: A device by name, or one for each part of the target.
Device = Name | dict[Annotated[str, AfterValidator(_printable)], Name | Annotated[int, Field(ge=0, strict=True)]]


class PromptSpec(Options):
    """Which prompts: see `load_prompts` for the fields. A plain name or path stands for ``{name: ...}``,
    and no name for the built-in ones."""

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
            raise ValueError("give the name of the prompts or the path of a file, one of them")
        return self

    @property
    def source(self) -> str:
        return self.name or self.path

    def load(self) -> list[Prompt]:
        options = {"limit": self.limit, "split": self.split, "column": self.column}
        return load_prompts(self.source, categories=self.categories, **options)  # type: ignore[arg-type]


class Strategy(Options):
    """A drafter or verifier by name, with its config. A plain name stands for ``{name: ...}``.

    In YAML and JSON the config stands beside the name: ``{name: draft-model, model: ..., gamma: 4}``.
    """

    name: Name = Field(min_length=1)
    label: Name = Field(default="", description="what tables call it instead of the name")
    config: dict[str, Any] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, dict):
            return value
        own = {key: value[key] for key in ("name", "label") if key in value}
        return own | {"config": {key: v for key, v in value.items() if key not in own}}

    @classmethod
    def parse(cls, text: str, where: str, options: Mapping[str, Any] | None = None) -> Strategy:
        """From a command line: a name, or a mapping as in recipes, ``{name: draft-model, gamma: 4}``; more ``options``.

        Raises UsageError, which begins with ``where``, for what is none.
        """
        given: Any = {"name": text}
        if text.lstrip().startswith("{"):
            given = yaml_value(text, lambda line: where)
            if "name" not in given:
                raise UsageError(f"{where} {text}: a mapping needs a name, as in {{name: draft-model, gamma: 4}}")
        try:
            return cls.model_validate({**given, **(options or {})})
        except ValidationError as error:
            problem = error.errors()[0]
            raise UsageError(f"{where}: key {'.'.join(map(str, problem['loc']))!r}: {fault(problem)}") from None

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.label or self.name

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"name": self.name, **({"label": self.label} if self.label else {}), **self.config}


class CellConfig(Options):
    """One cell, completely resolved. ``label`` apart, two cells with the same config are the same cell."""

    target: Name = Field(min_length=1)
    dtype: Name = "auto"
    device: Device = "auto"
    attn_implementation: Name | None = None
    prompts: PromptSpec = PromptSpec(name="builtin")
    max_new_tokens: int = Field(default=128, ge=1, le=MOST_TOKENS)
    batch_size: int = Field(default=1, ge=1, le=MOST_ROWS)
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    compile_verifier: bool = Field(default=False, description="compile the verify step")
    prefill_tokens: int = Field(
        default=PREFILL_TOKENS,
        ge=0,
        le=MOST_TOKENS,
        description="most tokens of a prefill pass that prompts share; 0 = each prompt by itself",
    )
    sampling: Sampling = Sampling.model_validate({})
    drafter: Strategy
    verifier: Strategy

    @property
    def is_baseline(self) -> bool:
        return self.drafter.name == BASELINE

    @property
    def hash(self) -> str:
        """12 hexadecimal digits, stable across machines and versions of Python."""
        return digest(self._unlabelled())

    @property
    def group(self) -> str:
        """The same for all cells that differ in drafter and verifier alone."""
        shared = self._unlabelled()
        del shared["drafter"], shared["verifier"]
        return digest(shared)

    def _unlabelled(self) -> dict[str, Any]:
        config = self.model_dump(mode="json")
        config["drafter"].pop("label", None)
        config["verifier"].pop("label", None)
        for name in ("compile_verifier", "prefill_tokens"):  # younger than the hashes of runs that are kept
            if config[name] == type(self).model_fields[name].default:
                del config[name]
        return config


class Recipe(Options):
    """What to compare; see the module's docstring. `crossdraft.load_recipe` reads one from a file."""

    name: str = Field(
        default="recipe", pattern=r"^[\w.-]+$", max_length=MOST_NAME, description="of the run; the file's by default"
    )
    description: str = Field(default="", description="what reports say about it")
    question: str = Field(default="", description="the question that the recipe answers")
    target: Name = Field(min_length=1, description="name, directory or Hub id of the model whose law is kept")
    prompts: PromptSpec = Field(default=PromptSpec(name="builtin"), description="a name, a file, or a mapping")
    limit: int | None = Field(default=None, ge=1, le=MOST_PROMPTS, description="use the first so many prompts")
    time: Duration | None = Field(
        default=None, description="time budget, 90s, 5m or 2h: as many blocks of prompts as fit, all pairs equally"
    )
    max_new_tokens: int = Field(default=128, ge=1, le=MOST_TOKENS, description="most tokens of an answer")
    batch_size: int = Field(default=1, ge=1, le=MOST_ROWS, description="rows that are decoded at once")
    seed: int = Field(default=0, ge=0, le=MOST_SEED, description="of all random numbers")
    dtype: Name = Field(default="auto", description="of target and draft models")
    device: Device = Field(
        default="auto", description="cpu, cuda, cuda:1, ..; spread, a device map or tp for targets larger than one"
    )
    attn_implementation: Name | None = Field(default=None, description="of the target; transformers' choice by default")
    compile_verifier: bool = Field(default=False, description="compile the verify step")
    prefill_tokens: int = Field(
        default=PREFILL_TOKENS,
        ge=0,
        le=MOST_TOKENS,
        description="most tokens of a prefill pass that prompts share; 0 = each prompt by itself",
    )
    sampling: Sampling = Field(default=Sampling.model_validate({}), description="temperature, top_k, top_p, min_p")
    drafters: list[Strategy] = Field(
        min_length=1, max_length=MOST_LISTED, description="names, or mappings of name, label and options"
    )
    verifiers: list[Strategy] = Field(min_length=1, max_length=MOST_LISTED, description="likewise")
    matrix: dict[str, list[Any]] = Field(default={}, description="lists of values; every combination is run")
    exclude: list[dict[str, Any]] = Field(
        default=[], max_length=MOST_EXCLUDED, description="leave out what matches an entry"
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
        # Here, because those of cells say what tells them apart and may be longer.
        if long := next((one.label for one in value if MOST_NAME.refusal(one.label)), None):
            raise ValueError(f"the label {quoted(long, 30)} is too long; {MOST_NAME.refusal(long)}")
        return value

    @property
    def selected_prompts(self) -> PromptSpec:
        """The prompts with the recipe's own limit, which goes before theirs."""
        limit = self.limit if self.limit is not None else self.prompts.limit
        return self.prompts.model_copy(update={"limit": limit})

    @property
    def places(self) -> Places:
        """Where each of its keys was written."""
        return self._places


def read_recipe(name: str | Path, overrides: Mapping[str, Any] | Iterable[str] = ()) -> Recipe:
    """Read a recipe whose names need not be installed here: its keys are checked, its cells are not."""
    path = _find(str(name))
    data, places = read_yaml(path)
    override(data, places, overrides)
    data.setdefault("name", re.sub(r"[^\w.-]", "-", path.stem)[:MOST_NAME])
    try:
        _beside(data, path)
    except UsageError as error:
        raise places.error(("prompts",), str(error)) from None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        models: Any = {(): Recipe, ("sampling",): Sampling, ("prompts",): PromptSpec}
        hints = dict.fromkeys(SAMPLING_KEYS, "; put it under sampling, or under matrix with a list of values")
        hints["trust_remote_code"] = "; a recipe cannot allow that, only you: crossdraft run --trust-remote-code MODEL"
        raise explain(error, places, models=models, hints=hints) from None
    recipe._places = places
    return recipe


def _find(name: str) -> Path:
    path, known = path_of(name), plugins.entries("recipes")
    kind = kind_of(path)
    if kind in ("file", "other"):
        return path
    if name in known:
        return plugins.get("recipes", name)
    if path.suffix in (".yaml", ".yml", ".json") or kind == "directory":
        what = "is a directory" if kind else "does not exist"
        names = ", ".join(sorted(known)) or "none"
        raise UsageError(f"the recipe file {printable(name)} {what}; recipes by name: {names}")
    raise UnknownNameError.among("recipe", name, known, "Or give the path of a YAML file.")


def _beside(data: dict[str, Any], recipe: Path) -> None:
    """A relative prompt file that is not here may lie beside the recipe."""
    prompts = data.get("prompts")
    spec = {"name": prompts} if isinstance(prompts, str) else prompts
    if not isinstance(spec, dict):
        return
    for key in ("name", "path"):
        source = spec.get(key)
        if not isinstance(source, str) or not source or source in plugins.entries("prompts"):
            continue
        beside = recipe.parent / source
        if not kind_of(source) and kind_of(beside):
            data["prompts"] = spec | {key: str(beside)}


def digest(value: Any) -> str:
    """12 hexadecimal digits of the SHA-256 of a plain value as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
