"""Facts about engines that read heads: ``engine_keys.yaml``, and the keys of a head that one would misread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from crossdraft import Checkpoint
from crossdraft.commands import Options, read_yaml
from crossdraft.framework import plugins

#: Nested configs of a head's layers, or of the target that an MTP module is part of; their keys count as the head's.
_NESTED = ("transformer_layer_config", "text_config")


class Origin(Options):
    """The file that facts were seen in."""

    repository: str
    commit: str
    file: str


class Absence(Options):
    """A release that cannot load heads of some drafters."""

    version: str
    drafters: tuple[str, ...]
    where: str


class Fact(Options):
    """An engine's treatment of a key: it reads it, or computes with ``uses`` whatever the key is.

    ``ignored_at``: an earlier commit that did not read it; ``ids``: ids of layers are sorted first, or only those of
    inputs of layers are read.
    """

    where: str
    reads: bool = False
    uses: Any = None
    ignored_at: str = ""
    ids: Literal["", "sorted", "inputs"] = ""

    def used(self, value: Any, depth: int) -> Any:
        """The value that the engine computes with if a head for a target of ``depth`` layers has ``value``."""
        if not self.reads:
            return self.uses
        if isinstance(value, list) and self.ids:
            return sorted(value) if self.ids == "sorted" else [None if i == depth else i for i in value]
        return value

    @model_validator(mode="after")
    def _one_of_both(self) -> Fact:
        if self.reads == ("uses" in self.model_fields_set):
            raise ValueError("a fact has either reads: true or uses")
        return self


class KeyFacts(Options):
    """Facts about a key by engine; ``neutral``: the value of a head without the key; None = unknown."""

    neutral: Any = None
    engines: dict[str, Fact] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _by_engine(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {"neutral": values.get("neutral"), "engines": {k: v for k, v in values.items() if k != "neutral"}}


class EngineKeys(Options):
    """Contents of ``engine_keys.yaml``."""

    sources: dict[str, dict[str, Origin]]
    absent: dict[str, Absence]
    keys: dict[str, dict[str, KeyFacts]]

    @model_validator(mode="after")
    def _facts_have_sources(self) -> EngineKeys:
        for drafter, keys in self.keys.items():
            for key, facts in keys.items():
                for engine in facts.engines:
                    if drafter not in self.sources.get(engine, {}):
                        raise ValueError(f"{drafter}: {key}: {engine} has no source")
        return self


@dataclass(frozen=True)
class Reading:
    """An engine's reading of a key of one head."""

    key: str
    engine: str
    value: Any  # in the head; ``used``: by the engine
    used: Any
    origin: str  # file, commit and place of the fact
    # an earlier commit that did not read the key, although the head's value is not the neutral one
    ignored_at: str = ""

    @property
    def misread(self) -> bool:
        return bool(self.value != self.used)


@cache
def engine_keys() -> EngineKeys:
    return EngineKeys.model_validate(read_yaml(Path(__file__).with_name("engine_keys.yaml"), "table of engines")[0])


def value_of(heads: Checkpoint, key: str, neutral: Any) -> Any:
    """The value of a key in a head, ``neutral`` if the head does not have it."""
    if key.endswith(".weight"):
        return any(name.removeprefix("model.") == key for name in heads.tensors)
    for config in (heads.config, *(heads.config.get(name) for name in _NESTED)):
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return neutral


def readings(heads: Checkpoint, drafter: str, depth: int) -> Iterator[Reading]:
    """Yield each engine's reading of each key that the table has for ``drafter``; ``depth``: the target's layers."""
    table = engine_keys()
    for key, facts in table.keys.get(drafter, {}).items():
        value = value_of(heads, key, facts.neutral)
        for engine, fact in facts.engines.items():
            source = table.sources[engine][drafter]
            origin = f"{source.repository} {source.file}, commit {source.commit}: {fact.where}"
            used = fact.used(value, depth)
            earlier = fact.ignored_at if value != facts.neutral else ""
            yield Reading(key, engine, value, used, origin, earlier)


def further_keys(config: Mapping[str, Any], drafter: str) -> Iterator[tuple[str, Any]]:
    """Yield the other keys of a config that change what the head computes, and their values."""
    layout = getattr(plugins.get("drafters", drafter), "layout", None)
    if layout is not None:
        known = engine_keys().keys[drafter]
        for path, value in _read(config, layout.keys):
            if path.removeprefix(f"{_NESTED[0]}.") not in known:
                yield path, value


def _read(config: Mapping[str, Any], keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    from crossdraft.heads import Key

    for name, value in config.items():
        key = keys.get(name)
        if isinstance(key, Mapping) and isinstance(value, Mapping):
            yield from _read(value, key, f"{prefix}{name}.")
        elif isinstance(key, Key) and key.effect != "none" and value is not None:
            yield f"{prefix}{name}", value
