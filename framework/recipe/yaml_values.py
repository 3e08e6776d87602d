"""From YAML to plain values, within bounds: what recipes, ``--set`` and other files for people are read with.

A parser's events are put together here, without recursion, so that nothing is built that is nested too deeply or holds
too many values, copies behind aliases counted. Only texts, numbers, truth values, null, lists and mappings from texts
are values: a tag for anything else is refused, and a date is the text that it is. Numbers are finite.
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
#: Numbers that YAML 1.1 reads in another way than people do: ``010`` is 8, ``1:30`` is 90.
_AMBIGUOUS = re.compile(r"[-+]?0[0-9_]+|.*:.*")
_TOO_DEEP = f"this is nested too deeply; {MOST_NESTING.refusal(MOST_NESTING + 1)}"
#: The characters that libyaml reads ahead of its events at most: a simple key is no longer than this.
_LOOKAHEAD = 1024
#: What a mapping waits for when it does not wait for the value of a key.
_NO_KEY, _MERGING = object(), object()
#: The way to a value: keys of mappings and positions in lists.
KeyPath = tuple[str | int, ...]


#: The parser of libyaml, twenty times as fast, where PyYAML was built with it.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """Tells what a plain scalar is; no dates, and ``=`` is a text."""


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
    """The value in a YAML text of one document; None if it is empty.

    Args:
        at: the place of a line, counted from 1, for sentences.
        put: told the line of every key and every position in a list, before its value.

    Raises:
        UsageError: no YAML, or YAML with what no option can be; a sentence with the place.
    """
    if reason := flaw(text, CONTROL):
        line = 1 + text.count("\n", 0, CONTROL.search(text).start())  # type: ignore[union-attr]
        raise UsageError(f"{at(line)}: {reason} cannot stand in YAML")
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
    """The line where ``text``, read up to an error, is nested deeper than `MOST_NESTING`; None if it is not.

    libyaml reads `_LOOKAHEAD` characters before it returns the event of the first, and since 0.2.6 it refuses 1000 open
    brackets among them with an error of its own. PyYAML's own parser has no such limit, but takes 20 times as long.
    """
    ahead = text[-_LOOKAHEAD:]
    if ahead.count("[") + ahead.count("{") <= MOST_NESTING:
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
    """A list or mapping that is being read."""

    value: list[Any] | dict[str, Any]
    anchor: str | None
    line: int
    before: int
    path: KeyPath
    key: Any = None  # of a mapping: the key whose value comes next
    merged: list[Any] = field(default_factory=list)


class _Document:
    def __init__(self, loader: Any, at: Callable[[int], str], put: Callable[[KeyPath, int], None]):
        self.loader, self.at, self.put = loader, at, put
        self.open: list[_Open] = []
        #: What an anchor names, and how many values it holds; None until it is complete.
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
                    raise self.error(line, "a second document begins here; write one")
            elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
                self.start(event, line)
            elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
                self.end()
            elif isinstance(event, yaml.AliasEvent):
                self.alias(event.anchor, line)
        return self.root

    def error(self, line: int, sentence: str) -> UsageError:
        return UsageError(f"{self.at(line)}: {sentence}")

    def counted(self, values: int, line: int) -> None:
        self.count += values
        if self.count > MOST_VALUES:
            reason = MOST_VALUES.refusal(self.count)
            raise self.error(line, f"there are {self.count} values, with those that aliases repeat; {reason}")

    # -- lists and mappings ------------------------------------------------------------------------------------

    def start(self, event: Any, line: int) -> None:
        kind = "list" if isinstance(event, yaml.SequenceStartEvent) else "mapping"
        if event.tag not in (None, "!", f"{_TAG}{'seq' if kind == 'list' else 'map'}"):
            raise self.tag(event.tag, line)
        if self.open and self.open[-1].key is _NO_KEY:
            raise self.error(line, f"a {kind} cannot be a key; a key is a text")
        if len(self.open) >= MOST_NESTING:
            raise self.error(line, _TOO_DEEP)
        path = self.place(line)
        if event.anchor:
            self.anchors[event.anchor] = None
        opened = _Open([] if kind == "list" else {}, event.anchor, line, self.count, path)
        opened.key = _NO_KEY if kind == "mapping" else None
        self.counted(1, line)
        self.open.append(opened)

    def end(self) -> None:
        done = self.open.pop()
        if isinstance(done.value, dict):
            for other in done.merged:  # what is written goes before what is merged, and the first before the next
                done.value |= {key: value for key, value in other.items() if key not in done.value}
        if done.anchor:
            self.anchors[done.anchor] = done.value, self.count - done.before
        self.take(done.value, done.line)

    def place(self, line: int) -> KeyPath:
        """The path of the value that comes next."""
        if not self.open:
            return ()
        above = self.open[-1]
        if isinstance(above.value, dict):
            return above.path if above.key is _MERGING else (*above.path, above.key)
        path = (*above.path, len(above.value))
        self.put(path, line)
        return path

    def take(self, value: Any, line: int) -> None:
        """Put a complete value where it belongs."""
        if not self.open:
            self.root = value
            return
        above = self.open[-1]
        if isinstance(above.value, list):
            above.value.append(value)
        elif above.key is _MERGING:
            found = value if isinstance(value, list) else [value]
            if not all(isinstance(one, dict) for one in found):
                raise self.error(line, "'<<' merges a mapping, or a list of mappings")
            above.merged += found
            above.key = _NO_KEY
        else:
            above.value[above.key] = value
            above.key = _NO_KEY

    # -- scalars and aliases -----------------------------------------------------------------------------------

    def alias(self, anchor: str, line: int) -> None:
        if anchor not in self.anchors:
            raise self.error(line, f"the alias {quoted(anchor)} names no anchor above it")
        known = self.anchors[anchor]
        if known is None:
            raise self.error(line, f"the alias {quoted(anchor)} stands inside of what it names")
        value, size = known
        self.counted(size, line)
        if self.open and self.open[-1].key is _NO_KEY:
            self.key(value, line)
            return
        self.place(line)
        self.take(copy.deepcopy(value), line)  # a copy: what is set in one place is not set in the other

    def scalar(self, event: Any, line: int) -> None:
        tag = event.tag
        if tag in (None, "!"):
            tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        is_key = bool(self.open) and self.open[-1].key is _NO_KEY
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
        above = self.open[-1]
        if not isinstance(key, str):
            raise self.error(line, f"the key {quoted(key)} is no text; put quotes around it if it is meant to be one")
        if key in above.value:
            raise self.error(line, f"the key {quoted(key)} is there twice")
        above.key = key
        self.put((*above.path, key), line)

    def converted(self, tag: str, event: Any, line: int) -> Any:
        convert, text = _CONVERT.get(tag), event.value
        if convert is None and tag != _TEXT:
            raise self.tag(tag, line)
        if reason := flaw(text, CONTROL):
            raise self.error(line, f"{reason} cannot stand in an option: {quoted(text)}")
        if convert is None:
            return text
        if tag in (f"{_TAG}int", f"{_TAG}float"):
            if _AMBIGUOUS.fullmatch(text):
                raise self.error(line, f"{quoted(text)} is a number that can be read in two ways; write a plain one")
            if reason := MOST_DIGITS.refusal(text):
                raise self.error(line, f"the number {quoted(text, 20)} has {len(text)} digits; {reason}")
        try:
            value = convert(self.loader, yaml.ScalarNode(tag, text))
        except (ValueError, KeyError, IndexError):
            raise self.error(line, f"{quoted(text)} is no value of the kind {tag.removeprefix(_TAG)!r}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(line, f"{quoted(text)} is no finite number")
        return value

    def tag(self, tag: str, line: int) -> UsageError:
        short = tag.replace(_TAG, "!!")
        return self.error(
            line, f"the tag {quoted(short)} is not known; a value is a text, a number, a list or a mapping"
        )


def checked_value(value: Any, place: str) -> Any:
    """A value that was given in Python, if YAML could have held it; see `yaml_value`."""
    level, count = [value], 0
    for _ in range(MOST_NESTING + 1):
        for one in level:
            if isinstance(one, dict) and not all(isinstance(key, str) for key in one):
                raise UsageError(f"{place}: keys are texts")
            if isinstance(one, str) and (reason := flaw(one, CONTROL)):
                raise UsageError(f"{place}: {reason} cannot stand in an option: {quoted(one)}")
            if isinstance(one, float) and not math.isfinite(one):
                raise UsageError(f"{place}: {one} is no finite number")
            if not isinstance(one, dict | list | tuple | str | int | float | None):
                raise UsageError(f"{place}: {quoted(one)} is no text, number, list or mapping")
        inner = [one for one in level if isinstance(one, dict | list | tuple)]
        level = [part for one in inner for part in ((*one, *one.values()) if isinstance(one, dict) else one)]
        count += len(level)
        if reason := MOST_VALUES.refusal(count):
            raise UsageError(f"{place}: there are {count} values; {reason}")
        if not level:
            return value
    raise UsageError(f"{place}: {_TOO_DEEP}")
