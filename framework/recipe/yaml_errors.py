"""Where each key of a recipe was written, so that an error can name the file and the line.

YAML is read once as a tree of nodes, which know their lines, and turned into plain data from there. A key set
from outside (``--set key=value``) replaces what the file says, and errors about it name that argument.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from annotated_types import Le
from pydantic import BaseModel, ValidationError

from ..contracts.options import fault
from ..errors import CrossdraftError, UsageError, printable, quoted
from ..util.input_files import read_text
from ..util.limits import MOST_NESTING, RECIPE_BYTES, Limit
from .yaml_values import KeyPath, checked_value, yaml_value


class _Place:
    """Where something was written, and what is known of the things in it."""

    __slots__ = ("inside", "text")

    def __init__(self, text: str = ""):
        self.text = text
        self.inside: dict[str | int, _Place] = {}


class Places:
    """The place of every key: ``recipe.yaml:12``, or the ``--set`` argument that set it."""

    def __init__(self, root: str = ""):
        self._root = _Place(root)

    def put(self, path: KeyPath, place: str) -> None:
        """`path` was written at `place`; what was known below it is gone."""
        at = self._root
        for part in path[:-1]:
            at = at.inside.setdefault(part, _Place())
        at.inside[path[-1]] = _Place(place)

    def of(self, path: KeyPath) -> str:
        """The place of `path`, or of the nearest thing around it; empty for a recipe made in Python."""
        at, found = self._root, self._root.text
        for part in path:
            if part not in at.inside:
                break
            at = at.inside[part]
            found = at.text or found
        return found

    def error(self, path: KeyPath, sentence: str, kind: type[CrossdraftError] = UsageError) -> Any:
        """An error about the value at `path`."""
        place = self.of(path)
        return kind(f"{place}: {sentence}" if place else sentence)


def dotted(path: KeyPath) -> str:
    """``("matrix", "gamma", 0)`` as ``matrix.gamma[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def read_yaml(
    path: Path, what: str = "recipe", keys: str = "target: ..., drafters: ..."
) -> tuple[dict[str, Any], Places]:
    """The mapping in a YAML file, and the line of every key in it.

    ``what`` the file is, and which ``keys`` it has, are for sentences.

    Raises UsageError, with the line, for a file that cannot be read, is no YAML, or holds what `yaml_value` refuses.
    """
    text, file = read_text(path, RECIPE_BYTES, what=f"the {what}"), printable(str(path))
    places = Places(file)
    data = yaml_value(text, lambda line: f"{file}:{line}", lambda path, line: places.put(path, f"{file}:{line}"))
    if not isinstance(data, dict):
        raise UsageError(
            f"{file}: {'an' if what[0] in 'aeiou' else 'a'} {what} is a mapping of keys to values ({keys})"
        )
    return data, places


def override(data: dict[str, Any], places: Places, settings: Mapping[str, Any] | Iterable[str]) -> None:
    """Set dotted keys of `data` in place: ``{"matrix.gamma": [2, 4]}`` or ``["matrix.gamma=[2, 4]"]``."""
    if isinstance(settings, Mapping):
        parsed = [_given(key, value) for key, value in settings.items()]
    else:
        parsed = [_parse(setting) for setting in settings]
    for key, value, place in parsed:
        parts = key.split(".")
        if reason := MOST_NESTING.refusal(parts):
            raise UsageError(f"{place}: the key has {len(parts)} parts; {reason}")
        places.put(_set(data, parts, value, place, places), place)


def _given(key: str, value: Any) -> tuple[str, Any, str]:
    place = f"override {key}={quoted(value)}"
    if not isinstance(key, str) or not all(key.split(".")):
        raise UsageError(f"{place}: a key is a text, with dots between its parts")
    return key, checked_value(value, place), place


def _parse(setting: str) -> tuple[str, Any, str]:
    key, equals, text = setting.partition("=")
    key = key.strip()
    place = f"--set {_short(setting)}"
    if not equals or not all(key.split(".")):
        raise UsageError(f"{place}: write --set key=value, as in --set matrix.batch_size=[1,4]")
    checked_value(key, place)
    try:
        return key, yaml_value(text, lambda line: place), place
    except UsageError as error:
        if "this is not YAML" in str(error):
            raise UsageError(f"{place}: the value is not YAML; the shell may need quotes around it") from None
        raise


def _short(setting: str) -> str:
    text = printable(setting)
    return text if len(text) <= 200 else f"{text[:199]}…"


def _set(data: Any, parts: list[str], value: Any, place: str, places: Places) -> KeyPath:
    """Walk to the parent of the last part, making mappings on the way, and set it; a bare name becomes a mapping.

    Returns the path: parts that are positions in lists as numbers.
    """
    path: KeyPath = ()
    for part in parts:
        at, last = dotted(path), len(path) == len(parts) - 1
        if isinstance(data, list):
            step: str | int = int(part) if part.isascii() and part.isdecimal() and len(part) < 10 else part
            if not isinstance(step, int) or step >= len(data):
                raise UsageError(f"{place}: {at} is a list; {quoted(step)} is not one of 0 to {len(data) - 1}")
        elif isinstance(data, dict):
            step = part
        else:
            raise UsageError(f"{place}: {at} is {quoted(data)}, which has no key {quoted(part)}")
        holder: Any = data
        path = (*path, step)
        if last:
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


# -- sentences about what pydantic found ---------------------------------------------------------------------


def suggest(key: str, known: Iterable[str]) -> str:
    """The known key that is nearest to a wrong one, or all of them if none is near."""
    known = sorted(known)
    nearest = difflib.get_close_matches(key[:100], known, n=1, cutoff=0.6)
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
    lines, problems = [], error.errors()
    for problem in problems[:5]:
        loc: KeyPath = problem["loc"]
        known = next((k for k in (loc[:n] for n in range(len(loc), -1, -1)) if k in where), None)
        path = loc if known is None else (*where[known], *loc[len(known) :])
        lines.append(str(places.error(path, _sentence(problem, loc, path, models, hints, owner))))
    more = f"\n... and {len(problems) - 5} more" if len(problems) > 5 else ""
    return UsageError("\n".join(lines) + more)


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
        return f"unknown key {quoted(key)}{inside}{hints.get(key, known) if not parent else known}"
    if kind == "missing":
        return f"{owner} needs the key {key!r}"
    message = fault(problem)
    if kind == "model_type":
        message = "should be a name, or a mapping of keys to values"
    elif kind == "too_short":
        message = f"needs at least {problem['ctx']['min_length']} entry"
    elif kind == "too_long":
        message = f"has {problem['ctx']['actual_length']} entries; the most is {problem['ctx']['max_length']}"
    elif kind == "string_too_long":
        message = f"has {len(problem['input'])} characters; the most is {problem['ctx']['max_length']}"
    elif kind == "less_than_equal" and (why := _why(models.get(parent), key)):
        message += f" ({why})"
    shown = "" if kind in ("value_error", "too_short", "too_long") else f", not {quoted(problem['input'])}"
    return f"{dotted(path)}: {message}{shown}" if path else message


def _why(model: type[BaseModel] | None, key: str) -> str:
    """What more of a field than its `Limit` would cost; empty for one without."""
    field = model.model_fields.get(key) if model is not None else None
    limits = [bound.le for bound in field.metadata if isinstance(bound, Le)] if field is not None else []
    return next((limit.why for limit in limits if isinstance(limit, Limit)), "")
