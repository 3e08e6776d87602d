"""Where each key of a recipe was written, so that an error can name the file and the line.

YAML is read once as a tree of nodes, which know their lines, and turned into plain data from there. A key set
from outside (``--set key=value``) replaces what the file says, and errors about it name that argument.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ..contracts.errors import CrossdraftError, UsageError

#: The way to a value: keys of mappings and positions in lists.
KeyPath = tuple[str | int, ...]


class Places:
    """The place of every key: ``recipe.yaml:12``, or the ``--set`` argument that set it."""

    def __init__(self, root: str = ""):
        self._at: dict[KeyPath, str] = {(): root} if root else {}

    def put(self, path: KeyPath, place: str) -> None:
        """`path` was written at `place`; what was known below it is gone."""
        for known in [p for p in self._at if p[: len(path)] == path and p != ()]:
            del self._at[known]
        self._at[path] = place

    def of(self, path: KeyPath) -> str:
        """The place of `path`, or of the nearest thing around it; empty for a recipe made in Python."""
        return next((self._at[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._at), "")

    def error(self, path: KeyPath, sentence: str, kind: type[CrossdraftError] = UsageError) -> Any:
        """An error about the value at `path`."""
        place = self.of(path)
        return kind(f"{place}: {sentence}" if place else sentence)


def dotted(path: KeyPath) -> str:
    """``("matrix", "gamma", 0)`` as ``matrix.gamma[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def read_yaml(path: Path) -> tuple[dict[str, Any], Places]:
    """The mapping in a YAML file, and the line of every key in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the recipe {path}: {reason}") from None
    places = Places(str(path))
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            _walk(node, (), str(path), places)
        data = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{line}: this is not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: this is not YAML: {str(error).partition(chr(10))[0]}") from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a recipe is a mapping of keys to values (target: ..., drafters: ...)")
    return data, places


def override(data: dict[str, Any], places: Places, settings: Mapping[str, Any] | Iterable[str]) -> None:
    """Set dotted keys of `data` in place: ``{"matrix.gamma": [2, 4]}`` or ``["matrix.gamma=[2, 4]"]``."""
    if isinstance(settings, Mapping):
        parsed = [(key, value, f"override {key}={value!r}") for key, value in settings.items()]
    else:
        parsed = [_parse(setting) for setting in settings]
    for key, value, place in parsed:
        parts: list[str | int] = [int(part) if part.isdecimal() else part for part in key.split(".")]
        _set(data, parts, value, place)
        places.put(tuple(parts), place)


def _parse(setting: str) -> tuple[str, Any, str]:
    key, equals, text = setting.partition("=")
    place = f"--set {setting}"
    if not equals or not all(key.strip().split(".")):
        raise UsageError(f"{place}: write --set key=value, as in --set matrix.batch_size=[1,4]")
    try:
        return key.strip(), yaml.safe_load(text), place
    except yaml.YAMLError:
        raise UsageError(f"{place}: the value is not YAML; the shell may need quotes around it") from None


def _set(data: Any, parts: list[str | int], value: Any, place: str) -> None:
    """Walk to the parent of the last part, making mappings on the way; a bare name becomes a mapping."""
    for i, part in enumerate(parts):
        at = dotted(tuple(parts[:i]))
        if isinstance(data, list):
            if not isinstance(part, int) or part >= len(data):
                raise UsageError(f"{place}: {at} is a list; {part!r} is not one of 0 to {len(data) - 1}")
        elif not isinstance(data, dict):
            raise UsageError(f"{place}: {at} is {data!r}, which has no key {part!r}")
        holder: Any = data
        if i == len(parts) - 1:
            holder[part] = value
            return
        child = holder.get(part) if isinstance(data, dict) else holder[part]
        if child is None or isinstance(child, str):
            child = {} if child is None else {"name": child}
        holder[part] = data = child


def _walk(node: yaml.Node, path: KeyPath, file: str, places: Places) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                raise UsageError(f"{file}:{line}: the key {key.value!r} is there twice")
            seen.add(key.value)
            places.put((*path, key.value), f"{file}:{line}")
            _walk(value, (*path, key.value), file, places)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            places.put((*path, i), f"{file}:{item.start_mark.line + 1}")
            _walk(item, (*path, i), file, places)


# -- sentences about what pydantic found ---------------------------------------------------------------------


def suggest(key: str, known: Iterable[str]) -> str:
    """The known key that is nearest to a wrong one, or all of them if none is near."""
    known = sorted(known)
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; known keys: {', '.join(known) or 'none'}"


def explain(
    error: ValidationError,
    places: Places,
    *,
    where: Mapping[KeyPath, KeyPath] | None = None,
    models: Mapping[KeyPath, type[BaseModel]] | None = None,
    hints: Mapping[str, str] | None = None,
    owner: str = "the recipe",
) -> UsageError:
    """What pydantic found wrong, a line each, with places.

    Args:
        where: paths of the validated model to paths of the recipe, where they differ.
        models: which model's keys are valid at a path, for suggestions.
        hints: what to say about an unknown key, instead of suggesting the nearest.
        owner: whose keys they are.
    """
    where, models, hints = where or {}, models or {}, hints or {}
    lines = []
    for problem in error.errors():
        loc: KeyPath = problem["loc"]
        known = next((k for k in (loc[:n] for n in range(len(loc), -1, -1)) if k in where), None)
        path = loc if known is None else (*where[known], *loc[len(known) :])
        lines.append(str(places.error(path, _sentence(problem, loc, path, models, hints, owner))))
    more = f"\n... and {len(lines) - 5} more" if len(lines) > 5 else ""
    return UsageError("\n".join(lines[:5]) + more)


def _sentence(
    problem: Any,
    loc: KeyPath,
    path: KeyPath,
    models: Mapping[KeyPath, type[BaseModel]],
    hints: Mapping[str, str],
    owner: str,
) -> str:
    kind, key, parent = problem["type"], str(loc[-1]) if loc else "", loc[:-1]
    if parent:
        owner = dotted(parent)
    if kind == "extra_forbidden":
        inside = "" if owner == "the recipe" else f" in {owner}"
        known = suggest(key, models[parent].model_fields) if parent in models else ""
        return f"unknown key {key!r}{inside}{hints.get(key, known) if not parent else known}"
    if kind == "missing":
        return f"{owner} needs the key {key!r}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "should")
    message = message.replace("a valid dictionary", "a mapping of keys to values")
    if kind == "model_type":
        message = "should be a name, or a mapping of keys to values"
    elif kind == "too_short":
        message = f"needs at least {problem['ctx']['min_length']} entry"
    shown = "" if kind in ("value_error", "too_short") else f", not {problem['input']!r}"
    return f"{dotted(path)}: {message}{shown}" if path else message
