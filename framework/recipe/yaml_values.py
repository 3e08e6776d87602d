"""YAML parser with limits, for recipes, ``--set`` and other configuration files.

Builds values from parser events without recursion, so that input with too much nesting or too many values (copies by
aliases included) is rejected before it is built. Values are strings, finite numbers, booleans, null, lists and mappings
with string keys. Other tags are rejected; dates are strings.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..errors import UsageError, quoted
from ..util.input_files import CONTROL, flaw
from ..util.limits import MOST_DIGITS, MOST_NESTING, MOST_VALUES

_TAG = "tag:yaml.org,2002:"
_TEXT, _MERGE = f"{_TAG}str", f"{_TAG}merge"
#: Numbers with a surprising meaning in YAML 1.1: ``010`` is 8, ``1:30`` is 90.
_AMBIGUOUS = re.compile(r"[-+]?0[0-9_]+|.*:.*")
_TOO_DEEP = f"this is nested too deeply; {MOST_NESTING.refusal(MOST_NESTING + 1)}"
#: Maximum number of characters that libyaml reads ahead of its events: the maximum length of a simple key.
_LOOKAHEAD = 1024
#: States of a mapping that does not expect the value of a key: it expects a key, or the value of ``<<``.
_EXPECT_KEY, _MERGING = object(), object()
#: Path to a value: keys of mappings and positions in lists.
KeyPath = tuple[str | int, ...]


#: libyaml's parser, twenty times as fast, if PyYAML was built with it.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """Resolver of plain scalars, without dates and ``=``."""


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


def yaml_value(
    text: str, at: Callable[[int], str], put: Callable[[KeyPath, int], None] = lambda path, line: None
) -> Any:
    """Parse a YAML text with one document; None if it is empty.

    Args:
        at: returns the place of a line, counted from 1, for messages.
        put: called with the path and line of each key and list item, before its value.

    Raises:
        UsageError: the text is not YAML, or contains values that options cannot have; with the place.
    """
    if reason := flaw(text, CONTROL):
        line = 1 + text.count("\n", 0, CONTROL.search(text).start())  # type: ignore[union-attr]
        raise UsageError(f"{at(line)}: {reason} is not allowed in YAML")
    try:
        return _Document(_Loader(text), at, put).read()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark and (line := _too_deep_at(text[: mark.index])):
            raise UsageError(f"{at(line)}: {_TOO_DEEP}") from None
        raise UsageError(f"{at(mark.line + 1 if mark else 1)}: this is not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{at(1)}: this is not YAML: {str(error).partition(chr(10))[0]}") from None


def _too_deep_at(text: str) -> int | None:
    """Return the line where ``text``, cut at an error, exceeds `MOST_NESTING`, or None.

    libyaml reads `_LOOKAHEAD` characters ahead of its events, and since 0.2.6 raises its own error for 1000 open
    brackets among them. PyYAML's Python parser has no such limit, but is 20 times slower.
    """
    lookahead = text[-_LOOKAHEAD:]
    if lookahead.count("[") + lookahead.count("{") <= MOST_NESTING:
        return None
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_NESTING:
                return event.start_mark.line + 1
    except yaml.YAMLError:
        pass
    return None


@dataclass
class _Open:
    """A list or mapping under construction."""

    value: list[Any] | dict[str, Any]
    anchor: str | None
    line: int
    start_count: int
    path: KeyPath
    key: Any = None  # for a mapping: the key of the next value
    merged: list[Any] = field(default_factory=list)


class _Document:
    def __init__(self, loader: Any, at: Callable[[int], str], put: Callable[[KeyPath, int], None]):
        self.loader, self.at, self.put = loader, at, put
        self.open: list[_Open] = []
        #: Value of an anchor and its number of values; None until it is complete.
        self.anchors: dict[str, tuple[Any, int] | None] = {}
        self.count = 0
        self.root: Any = None

    def read(self) -> Any:
        documents = 0
        while self.loader.check_event():
            event = self.loader.get_event()
            line = event.start_mark.line + 1
            if isinstance(event, yaml.ScalarEvent):
                self.scalar(event, line)
            elif isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.error(line, "a second document starts here; only one is allowed")
            elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
                self.start(event, line)
            elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
                self.end()
            elif isinstance(event, yaml.AliasEvent):
                self.alias(event.anchor, line)
        return self.root

    def error(self, line: int, message: str) -> UsageError:
        return UsageError(f"{self.at(line)}: {message}")

    def counted(self, values: int, line: int) -> None:
        self.count += values
        if self.count > MOST_VALUES:
            reason = MOST_VALUES.refusal(self.count)
            raise self.error(line, f"{self.count} values, those repeated by aliases included; {reason}")

    # -- lists and mappings ------------------------------------------------------------------------------------

    def start(self, event: Any, line: int) -> None:
        kind = "list" if isinstance(event, yaml.SequenceStartEvent) else "mapping"
        if event.tag not in (None, "!", f"{_TAG}{'seq' if kind == 'list' else 'map'}"):
            raise self.tag(event.tag, line)
        if self.open and self.open[-1].key is _EXPECT_KEY:
            raise self.error(line, f"a {kind} cannot be a key; a key must be a text")
        if len(self.open) >= MOST_NESTING:
            raise self.error(line, _TOO_DEEP)
        path = self.place(line)
        if event.anchor:
            self.anchors[event.anchor] = None
        opened = _Open([] if kind == "list" else {}, event.anchor, line, self.count, path)
        opened.key = _EXPECT_KEY if kind == "mapping" else None
        self.counted(1, line)
        self.open.append(opened)

    def end(self) -> None:
        closed = self.open.pop()
        if isinstance(closed.value, dict):
            for merged_mapping in closed.merged:  # explicit keys take precedence, then earlier mappings
                closed.value |= {key: value for key, value in merged_mapping.items() if key not in closed.value}
        if closed.anchor:
            self.anchors[closed.anchor] = closed.value, self.count - closed.start_count
        self.take(closed.value, closed.line)

    def place(self, line: int) -> KeyPath:
        """Path of the next value."""
        if not self.open:
            return ()
        parent = self.open[-1]
        if isinstance(parent.value, dict):
            return parent.path if parent.key is _MERGING else (*parent.path, parent.key)
        path = (*parent.path, len(parent.value))
        self.put(path, line)
        return path

    def take(self, value: Any, line: int) -> None:
        """Add a complete value to its parent."""
        if not self.open:
            self.root = value
            return
        parent = self.open[-1]
        if isinstance(parent.value, list):
            parent.value.append(value)
        elif parent.key is _MERGING:
            mappings = value if isinstance(value, list) else [value]
            if not all(isinstance(mapping, dict) for mapping in mappings):
                raise self.error(line, "the value of '<<' must be a mapping or a list of mappings")
            parent.merged += mappings
            parent.key = _EXPECT_KEY
        else:
            parent.value[parent.key] = value
            parent.key = _EXPECT_KEY

    # -- scalars and aliases -----------------------------------------------------------------------------------

    def alias(self, anchor: str, line: int) -> None:
        if anchor not in self.anchors:
            raise self.error(line, f"the alias {quoted(anchor)} is not defined above")
        anchored = self.anchors[anchor]
        if anchored is None:
            raise self.error(line, f"the alias {quoted(anchor)} is used inside of its own anchor")
        value, size = anchored
        self.counted(size, line)
        if self.open and self.open[-1].key is _EXPECT_KEY:
            self.key(value, line)
            return
        self.place(line)
        self.take(copy.deepcopy(value), line)  # a copy, so that later changes affect one place only

    def scalar(self, event: Any, line: int) -> None:
        tag = event.tag
        if tag in (None, "!"):
            tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        is_key = bool(self.open) and self.open[-1].key is _EXPECT_KEY
        if tag == _MERGE:
            if is_key:
                self.open[-1].key = _MERGING
                return
            tag = _TEXT
        value = self.converted(tag, event, line)
        if event.anchor:
            self.anchors[event.anchor] = value, 1
        self.counted(1, line)
        if is_key:
            self.key(value, line)
            return
        self.place(line)
        self.take(value, line)

    def key(self, key: Any, line: int) -> None:
        parent = self.open[-1]
        if not isinstance(key, str):
            raise self.error(line, f"the key {quoted(key)} is not a text; use quotes if it should be one")
        if key in parent.value:
            raise self.error(line, f"the key {quoted(key)} is given twice; remove one of them")
        parent.key = key
        self.put((*parent.path, key), line)

    def converted(self, tag: str, event: Any, line: int) -> Any:
        convert, text = _CONVERT.get(tag), event.value
        if convert is None and tag != _TEXT:
            raise self.tag(tag, line)
        if reason := flaw(text, CONTROL):
            raise self.error(line, f"{reason} is not allowed in an option: {quoted(text)}")
        if convert is None:
            return text
        if tag in (f"{_TAG}int", f"{_TAG}float"):
            if _AMBIGUOUS.fullmatch(text):
                raise self.error(line, f"{quoted(text)} is an ambiguous number; write a plain decimal number")
            if reason := MOST_DIGITS.refusal(text):
                raise self.error(line, f"the number {quoted(text, 20)} has {len(text)} digits; {reason}")
        try:
            value = convert(self.loader, yaml.ScalarNode(tag, text))
        except (ValueError, KeyError, IndexError):
            raise self.error(line, f"{quoted(text)} is not a valid value of type {tag.removeprefix(_TAG)!r}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(line, f"{quoted(text)} is not a finite number")
        return value

    def tag(self, tag: str, line: int) -> UsageError:
        short = tag.replace(_TAG, "!!")
        return self.error(
            line, f"the tag {quoted(short)} is not supported; a value must be a text, a number, a list or a mapping"
        )


def checked_value(value: Any, place: str) -> Any:
    """Return a value given in Python after the checks of `yaml_value`."""
    level, count = [value], 0
    for _ in range(MOST_NESTING + 1):
        for item in level:
            if isinstance(item, dict) and not all(isinstance(key, str) for key in item):
                raise UsageError(f"{place}: keys must be texts")
            if isinstance(item, str) and (reason := flaw(item, CONTROL)):
                raise UsageError(f"{place}: {reason} is not allowed in an option: {quoted(item)}")
            if isinstance(item, float) and not math.isfinite(item):
                raise UsageError(f"{place}: {item} is not a finite number")
            if not isinstance(item, dict | list | tuple | str | int | float | None):
                raise UsageError(f"{place}: {quoted(item)} is not a text, number, list or mapping")
        containers = [item for item in level if isinstance(item, dict | list | tuple)]
        level = [part for item in containers for part in ((*item, *item.values()) if isinstance(item, dict) else item)]
        count += len(level)
        if reason := MOST_VALUES.refusal(count):
            raise UsageError(f"{place}: {count} values; {reason}")
        if not level:
            return value
    raise UsageError(f"{place}: {_TOO_DEEP}")
