"""Places of the keys of a YAML file, for errors with file and line.

A key set by ``--set key=value`` overrides the file; errors about it contain that argument.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from annotated_types import Le
from pydantic import BaseModel, ValidationError

from ..contracts.options import fault
from ..errors import CrossdraftError, ModelError, UsageError, printable, quoted
from ..util.input_files import read_text
from ..util.limits import MOST_NESTING, RECIPE_BYTES, Limit
from .yaml_values import KeyPath, checked_value, yaml_value


class Places:
    """Places of keys: ``recipe.yaml:12``, or the ``--set`` argument that set the key."""

    def __init__(self, places: Mapping[KeyPath, str] | None = None):
        self._places = dict(places or {})

    def put(self, path: KeyPath, place: str) -> None:
        """Set the place of `path`, and forget the places below it."""
        self._places = {key: text for key, text in self._places.items() if key[: len(path)] != path} | {path: place}

    def of(self, path: KeyPath) -> str:
        """Return the place of `path` or of its nearest known parent; empty for a recipe created in Python."""
        parents = (path[:n] for n in range(len(path), -1, -1))
        return next((self._places[parent] for parent in parents if parent in self._places), "")

    @contextmanager
    def at(self, path: KeyPath, kind: type[CrossdraftError] | None = None) -> Iterator[None]:
        """Add the place of `path` to errors of this ``kind``, by default to UsageError and ModelError."""
        try:
            yield
        except CrossdraftError as error:
            place = self.of(path)
            if not place or not isinstance(error, kind or UsageError | ModelError):
                raise
            raise type(error)(f"{place}: {error}") from error

    def error(self, path: KeyPath, message: str) -> UsageError:
        """Create an error about the value at `path`."""
        place = self.of(path)
        return UsageError(f"{place}: {message}" if place else message)


def dotted(path: KeyPath) -> str:
    """``("matrix", "gamma", 0)`` as ``matrix.gamma[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def read_yaml(
    path: Path, kind: str = "recipe", keys: str = "target: ..., drafters: ..."
) -> tuple[dict[str, Any], Places]:
    """Read the mapping in a YAML file, and the places of its keys.

    Args:
        kind, keys: kind of the file and its keys, for messages.

    Raises:
        UsageError: the file is not readable, is not YAML, or contains values rejected by `yaml_value`; with the line.
    """
    text, file = read_text(path, RECIPE_BYTES, subject=f"the {kind}"), printable(str(path))
    lines: dict[KeyPath, int] = {}
    data = yaml_value(text, lambda line: f"{file}:{line}", lines)
    if not isinstance(data, dict):
        raise UsageError(
            f"{file}: {'an' if kind[0] in 'aeiou' else 'a'} {kind} must be a mapping of keys to values ({keys})"
        )
    return data, Places({(): file} | {path: f"{file}:{line}" for path, line in lines.items()})


def override(data: dict[str, Any], places: Places, settings: Mapping[str, Any] | Iterable[str]) -> None:
    """Set dotted keys of `data` in place: ``{"matrix.gamma": [2, 4]}`` or ``["matrix.gamma=[2, 4]"]``."""
    if isinstance(settings, Mapping):
        parsed = [_parse_override(key, value) for key, value in settings.items()]
    else:
        parsed = [_parse(setting) for setting in settings]
    for key, value, place in parsed:
        parts = key.split(".")
        if reason := MOST_NESTING.violation(parts):
            raise UsageError(f"{place}: the key has {len(parts)} parts; {reason}")
        places.put(_set(data, parts, value, place, places), place)


def _parse_override(key: str, value: Any) -> tuple[str, Any, str]:
    place = f"override {key}={quoted(value)}"
    if not isinstance(key, str) or not all(key.split(".")):
        raise UsageError(f"{place}: a key must be a text, with dots between its parts")
    return key, checked_value(value, place), place


def _parse(setting: str) -> tuple[str, Any, str]:
    (key, equals, text), shown = setting.partition("="), printable(setting)
    key = key.strip()
    place = f"--set {shown if len(shown) <= 200 else f'{shown[:199]}…'}"
    if not equals or not all(key.split(".")):
        raise UsageError(f"{place}: write --set key=value, as in --set matrix.batch_size=[1,4]")
    checked_value(key, place)
    try:
        return key, yaml_value(text, lambda line: place), place
    except UsageError as error:
        why = str(error)
        if "this is not YAML" in why:
            why = why.replace("this is not YAML", "the value is not YAML") + "; it may need quotes for the shell"
        raise UsageError(why) from None


def _set(data: Any, parts: list[str], value: Any, place: str, places: Places) -> KeyPath:
    """Set the value at `parts`, creating mappings on the way; a plain name becomes a mapping.

    Returns the path, with positions in lists as integers.
    """
    path: KeyPath = ()
    for part in parts:
        if isinstance(data, list):
            step: str | int = int(part) if part.isascii() and part.isdecimal() and len(part) < 10 else part
            if not isinstance(step, int) or step >= len(data):
                problem = f"a list; {quoted(step)} is not one of 0 to {len(data) - 1}"
                empty = f"an empty list; set {dotted(path)}=[...] instead"
                raise UsageError(f"{place}: {dotted(path)} is {problem if data else empty}")
        elif isinstance(data, dict):
            step = part
        else:
            raise UsageError(f"{place}: {dotted(path)} is {quoted(data)}, which has no key {quoted(part)}")
        holder: Any = data
        path = (*path, step)
        if len(path) == len(parts):
            holder[step] = value
            break
        child = holder.get(step) if isinstance(data, dict) else holder[step]
        if child is None:
            child = {}
            places.put(path, place)
        elif isinstance(child, str):
            child = {"name": child}
        holder[step] = data = child
    return path


# -- messages for pydantic errors ----------------------------------------------------------------------------


def suggest(key: str, names: Iterable[str]) -> str:
    """Suggest the name most similar to a wrong key, or list all names."""
    names = sorted(names)
    nearest = difflib.get_close_matches(key[:100], names, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; known keys: {', '.join(names) or 'none'}"


def explain(
    error: ValidationError,
    places: Places,
    *,
    renamed: Mapping[KeyPath, KeyPath] | None = None,
    models: Mapping[KeyPath, type[BaseModel]] | None = None,
    hints: Mapping[str, str] | None = None,
    owner: str = "the recipe",
) -> UsageError:
    """Convert pydantic errors to a UsageError, one line each, with places.

    Args:
        renamed: paths of the validated model -> paths of the recipe, if they differ.
        models: models by path, for suggestions of keys.
        hints: messages for unknown keys, instead of suggestions.
        owner: owner of the keys, for messages.
    """
    renamed, models, hints = renamed or {}, models or {}, hints or {}
    lines, problems = [], error.errors()
    for problem in problems[:5]:
        loc: KeyPath = problem["loc"]
        prefix = next((k for k in (loc[:n] for n in range(len(loc), -1, -1)) if k in renamed), None)
        path = loc if prefix is None else (*renamed[prefix], *loc[len(prefix) :])
        lines.append(str(places.error(path, _message(problem, loc, path, models, hints, owner))))
    more = f"\n... and {len(problems) - 5} more" if len(problems) > 5 else ""
    return UsageError("\n".join(lines) + more)


def _message(
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
        location = "" if owner == "the recipe" else f" in {owner}"
        suggestion = suggest(key, models[parent].model_fields) if parent in models else ""
        return f"unknown key {quoted(key)}{location}{hints.get(key, suggestion) if not parent else suggestion}"
    if kind == "missing":
        return f"{owner} needs the key {key!r}"
    message = fault(problem)
    if kind == "model_type":
        message = "must be a name, or a mapping of keys to values"
    elif kind == "too_short":
        message = f"needs at least {problem['ctx']['min_length']} entry"
    elif kind == "too_long":
        message = f"has {problem['ctx']['actual_length']} entries; the maximum is {problem['ctx']['max_length']}"
    elif kind == "string_too_long":
        message = f"has {len(problem['input'])} characters; the maximum is {problem['ctx']['max_length']}"
    elif kind == "less_than_equal" and (reason := _limit_reason(models.get(parent), key)):
        message += f" ({reason})"
    given_value = "" if kind in ("value_error", "too_short", "too_long") else f", not {quoted(problem['input'])}"
    return f"{dotted(path)}: {message}{given_value}" if path else message


def _limit_reason(model: type[BaseModel] | None, key: str) -> str:
    """Reason of the `Limit` of a field; empty for a field without one."""
    field = model.model_fields.get(key) if model is not None else None
    limits = [bound.le for bound in field.metadata if isinstance(bound, Le)] if field is not None else []
    return next((limit.why for limit in limits if isinstance(limit, Limit)), "")
