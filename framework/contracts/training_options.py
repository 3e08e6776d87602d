"""Dataclass fields that are also command-line options, with their allowed values.

Values are checked when the dataclass is created, before anything is loaded; the error names the option, the value and
the allowed values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field
from typing import Any

from ..errors import UsageError


def integers(text: str) -> tuple[int, ...]:
    """``"0,1,29"`` -> (0, 1, 29)."""
    return tuple(int(part) for part in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    """``"1,0.5"`` -> (1.0, 0.5)."""
    return tuple(float(part) for part in text.split(","))


#: Maximum number of parts of a value.
MOST_PARTS = 256
#: Types of the parts, by option type.
_PARTS: dict[Any, type] = {integers: int, numbers: float}
_WORDS = {int: "a whole number", float: "a number", str: "text"}
_MANY = {int: "whole numbers with commas between them", float: "numbers with commas between them"}


@dataclass(frozen=True)
class Allowed:
    """Allowed values of an option; None = no bound.

    Attributes:
        kind: int, float or str, or a function that parses the text of the command line.
        choices: the allowed values; empty = any within the bounds.
    """

    kind: Any
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()

    def read(self, flag: str, text: str) -> Any:
        """Parse ``text``. Raises UsageError if it is not an allowed value."""
        try:
            value = self.kind(text)
        except (ValueError, TypeError, OverflowError):
            raise self._refused(flag, text) from None
        if not self._takes(value):
            raise self._refused(flag, text)
        return value

    def check(self, flag: str, value: Any) -> None:
        """Raise UsageError if ``value`` is not allowed."""
        if not self._takes(value):
            raise self._refused(flag, value)

    def _takes(self, value: Any) -> bool:
        if self.kind not in _PARTS:
            return self._admits(value, self.kind)
        part = _PARTS[self.kind]
        few = isinstance(value, tuple | list) and len(value) <= MOST_PARTS
        return few and all(self._admits(item, part) for item in value)

    def _admits(self, value: Any, kind: Any) -> bool:
        if self.choices:
            return value in self.choices
        if kind is str:
            return isinstance(value, str)
        if kind not in (int, float):
            return True  # checked by its parser
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
            return False
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def _refused(self, flag: str, value: Any) -> UsageError:
        return UsageError(f"{flag} {_shown(value)}: must be {self}")

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        part = _PARTS.get(self.kind, self.kind)
        many, words = self.kind in _PARTS, _WORDS.get(part, "something else")
        if many:
            words = f"{_MANY[part]} (at most {MOST_PARTS})"
        low = "" if self.at_least is None else f"at least {self.at_least}"
        low = low or ("" if self.above is None else f"above {self.above}")
        high = "" if self.at_most is None else f"at most {self.at_most}"
        high = high or ("" if self.below is None else f"below {self.below}")
        bounds = " and ".join(bound for bound in (low, high) if bound)
        return f"{words}, {'each ' * many}{bounds}" if bounds else words


def _shown(value: Any) -> str:
    """A value for an error message, truncated."""
    if isinstance(value, tuple | list):
        value = ",".join(map(_shown, value))
    try:
        text = str(value)
    except ValueError:  # an integer of thousands of digits
        return "with thousands of digits"
    if not text.strip():
        return repr(text)
    return text if len(text) <= 60 else f"{text[:60]}..."


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Iterable[Any] = (),
    **argparse: Any,
) -> Any:
    """A field of `Options` that is an option of the command line.

    Args:
        default: default value; its type is the type of the option.
        help: text for ``--help``.
        at_least, above, at_most, below: bounds of a number, or of each part.
        choices: the allowed values.
        argparse: other keywords of ``add_argument``; ``type``: parser of the text if it is not the default's type:
            `integers`, `numbers`, or a function that raises ValueError.
    """
    kind = argparse.pop("type", type(default))
    allowed = Allowed(kind, at_least, above, at_most, below, tuple(choices))
    return field(default=default, metadata={"help": help, "allowed": allowed, "argparse": argparse})


def flag(name: str) -> str:
    """``max_prompt`` -> ``--max-prompt``."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of dataclasses whose fields are options.

    Raises:
        UsageError: created with a value that is not allowed.
    """

    def __post_init__(self) -> None:
        for name, entry in self.__dataclass_fields__.items():
            if allowed := entry.metadata.get("allowed"):
                allowed.check(flag(name), getattr(self, name))

    @classmethod
    def options(cls) -> Iterable[tuple[str, Any, dict[str, Any]]]:
        """Name, default, and keyword arguments of ``add_argument`` for every option."""
        for name, entry in cls.__dataclass_fields__.items():
            if allowed := entry.metadata.get("allowed"):
                assert entry.default is not MISSING
                settings = {
                    "help": entry.metadata["help"],
                    "type": _reader(name, allowed),
                    **entry.metadata["argparse"],
                }
                if allowed.choices:
                    settings.setdefault("metavar", f"{{{','.join(map(str, allowed.choices))}}}")
                yield name, entry.default, settings


def _reader(name: str, allowed: Allowed) -> Callable[[str], Any]:
    return lambda text: allowed.read(flag(name), text)
