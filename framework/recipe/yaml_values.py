"""YAML with limits, for recipes, ``--set`` and other configuration files.

Values are strings, finite numbers, booleans, null, lists and mappings with string keys, built from PyYAML's nodes and
their marks. Nesting is limited before nodes are composed, the number of values (copies by aliases included) before
they are built. Other tags are rejected; dates are strings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from ..errors import UsageError, quoted
from ..util.input_files import CONTROL, describe_forbidden_char
from ..util.limits import MOST_DIGITS, MOST_NESTING, MOST_VALUES

_TAG = "tag:yaml.org,2002:"
_TEXT, _MERGE = f"{_TAG}str", f"{_TAG}merge"
#: Numbers with a surprising meaning in YAML 1.1: ``010`` is 8, ``1:30`` is 90.
_AMBIGUOUS = re.compile(r"[-+]?0[0-9_]+|.*:.*")
_TOO_DEEP = f"this is nested too deeply; {MOST_NESTING.violation(MOST_NESTING + 1)}"
#: Path to a value: keys of mappings and positions in lists.
KeyPath = tuple[str | int, ...]


class _NestingError(Exception):
    """Too much nesting; the argument is the line."""


class _Loader(yaml.SafeLoader):
    """Composer of nodes with a limit of nesting; plain scalars are never dates or ``=``."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if self._depth >= MOST_NESTING and isinstance(event, yaml.CollectionStartEvent):
            raise _NestingError(event.start_mark.line + 1)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (f"{_TAG}timestamp", f"{_TAG}value")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_CONVERT: dict[str, Callable[[Any, Any], Any]] = {
    f"{_TAG}int": yaml.SafeLoader.construct_yaml_int,
    f"{_TAG}float": yaml.SafeLoader.construct_yaml_float,
    f"{_TAG}bool": yaml.SafeLoader.construct_yaml_bool,
    f"{_TAG}null": yaml.SafeLoader.construct_yaml_null,
}


def yaml_value(text: str, at: Callable[[int], str], lines: dict[KeyPath, int] | None = None) -> Any:
    """Parse a YAML text with one document; None if it is empty.

    Args:
        at: returns the place of a line, counted from 1, for messages.
        lines: receives the line of each key and list item by its path, in order.

    Raises:
        UsageError: the text is not YAML, or contains values that options cannot have; with the place.
    """
    if reason := describe_forbidden_char(text, CONTROL):
        line = 1 + text.count("\n", 0, CONTROL.search(text).start())  # type: ignore[union-attr]
        raise UsageError(f"{at(line)}: {reason} is not allowed in YAML")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except _NestingError as error:
        raise UsageError(f"{at(error.args[0])}: {_TOO_DEEP}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem)
        if problem.startswith("but "):
            problem = f"{error.context}, {problem}"
        raise UsageError(f"{at(mark.line + 1 if mark else 1)}: this is not YAML: {problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{at(1)}: this is not YAML: {str(error).partition(chr(10))[0]}") from None
    return None if node is None else _Values(loader, at, {} if lines is None else lines).value(node, ())


class _Values:
    """Values of nodes."""

    def __init__(self, loader: Any, at: Callable[[int], str], lines: dict[KeyPath, int]):
        self.loader, self.at, self.lines = loader, at, lines
        self.count = 0
        #: Lists and mappings around the current value.
        self.around: list[Any] = []

    def error(self, node: Any, message: str) -> UsageError:
        return UsageError(f"{self.at(node.start_mark.line + 1)}: {message}")

    def value(self, node: Any, path: KeyPath) -> Any:
        """The value of a node; aliases are copied, so that later changes affect one place only."""
        self.count += 1
        if reason := MOST_VALUES.violation(self.count):
            raise self.error(node, f"{self.count} values, those repeated by aliases included; {reason}")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if any(other is node for other in self.around):
            raise self.error(node, "an alias of this value is used inside of its own anchor")
        if len(self.around) >= MOST_NESTING:
            raise self.error(node, _TOO_DEEP)
        is_list = isinstance(node, yaml.SequenceNode)
        if node.tag != f"{_TAG}{'seq' if is_list else 'map'}":
            raise self.tag_error(node)
        self.around.append(node)
        if is_list:
            value: Any = []
            for i, item in enumerate(node.value):
                self.lines[*path, i] = item.start_mark.line + 1
                value.append(self.value(item, (*path, i)))
        else:
            value = self.mapping(node, path)
        self.around.pop()
        return value

    def mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        """The mapping; explicit keys take precedence over those of ``<<``, and these over later ones."""
        merged: list[dict[str, Any]] = []
        for key, value in node.value:
            if key.tag == _MERGE:
                parts = self.value(value, path)
                merged += parts if isinstance(parts, list) else [parts]
                if not all(isinstance(part, dict) for part in merged):
                    raise self.error(value, "the value of '<<' must be a mapping or a list of mappings")
        result: dict[str, Any] = {}
        for key_node, value in node.value:
            if key_node.tag != _MERGE:
                key = self.key(key_node)
                if key in result:
                    raise self.error(key_node, f"the key {quoted(key)} is given twice; remove one of them")
                self.lines[*path, key] = key_node.start_mark.line + 1
                result[key] = self.value(value, (*path, key))
        for part in merged:
            result |= {key: value for key, value in part.items() if key not in result}
        return result

    def key(self, node: Any) -> str:
        if not isinstance(node, yaml.ScalarNode):
            kind = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
            raise self.error(node, f"a {kind} cannot be a key; a key must be a text")
        key = self.scalar(node)
        if not isinstance(key, str):
            raise self.error(node, f"the key {quoted(key)} is not a text; use quotes if it should be one")
        return key

    def scalar(self, node: Any) -> Any:
        convert, text = _CONVERT.get(node.tag), node.value
        if convert is None and node.tag not in (_TEXT, _MERGE):
            raise self.tag_error(node)
        if reason := describe_forbidden_char(text, CONTROL):
            raise self.error(node, f"{reason} is not allowed in an option: {quoted(text)}")
        if convert is None:
            return text
        if node.tag in (f"{_TAG}int", f"{_TAG}float"):
            if _AMBIGUOUS.fullmatch(text):
                raise self.error(node, f"{quoted(text)} is an ambiguous number; write a plain decimal number")
            if reason := MOST_DIGITS.violation(text):
                raise self.error(node, f"the number {quoted(text, 20)} has {len(text)} digits; {reason}")
        try:
            value = convert(self.loader, node)
        except (ValueError, KeyError, IndexError):
            kind = node.tag.removeprefix(_TAG)
            raise self.error(node, f"{quoted(text)} is not a valid value of type {kind!r}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(node, f"{quoted(text)} is not a finite number")
        return value

    def tag_error(self, node: Any) -> UsageError:
        short = node.tag.replace(_TAG, "!!")
        return self.error(
            node, f"the tag {quoted(short)} is not supported; a value must be a text, a number, a list or a mapping"
        )


def checked_value(value: Any, place: str) -> Any:
    """Return a value given in Python after the checks of `yaml_value`."""
    level, count = [value], 0
    for _ in range(MOST_NESTING + 1):
        for item in level:
            if isinstance(item, dict) and not all(isinstance(key, str) for key in item):
                raise UsageError(f"{place}: keys must be texts")
            if isinstance(item, str) and (reason := describe_forbidden_char(item, CONTROL)):
                raise UsageError(f"{place}: {reason} is not allowed in an option: {quoted(item)}")
            if isinstance(item, float) and not math.isfinite(item):
                raise UsageError(f"{place}: {item} is not a finite number")
            if not isinstance(item, dict | list | tuple | str | int | float | None):
                raise UsageError(f"{place}: {quoted(item)} is not a text, number, list or mapping")
        containers = [item for item in level if isinstance(item, dict | list | tuple)]
        level = [part for item in containers for part in ((*item, *item.values()) if isinstance(item, dict) else item)]
        count += len(level)
        if reason := MOST_VALUES.violation(count):
            raise UsageError(f"{place}: {count} values; {reason}")
        if not level:
            return value
    raise UsageError(f"{place}: {_TOO_DEEP}")
