"""Exceptions raised by crossdraft.

Each message states the problem and the fix. Exceptions hold only their message, so that they can be pickled between
processes. The command line prints the message without a traceback and exits with ``exit_code``.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

#: Maximum characters quoted from an input, and from a foreign error message.
_QUOTED, _REPEATED = 80, 300


class CrossdraftError(Exception):
    """Base class of all errors of crossdraft, bugs excluded."""

    exit_code = 1


class UsageError(CrossdraftError):
    """An invalid request: a recipe, an option, a name."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that no installed package provides."""

    @classmethod
    def among(cls, subject: str, name: str, known: Iterable[str], hint: str = "") -> "UnknownNameError":
        """Return the error for an unknown name, with the nearest known name and a list of the installed ones."""
        known = sorted(known)
        sentence = f"there is no {subject} named {quoted(name)}"
        nearest = difflib.get_close_matches(name[:_REPEATED], known, n=1, cutoff=0.5)
        sentence += f"; did you mean {nearest[0]!r}?" if nearest else "."
        sentence += f" Installed: {', '.join(known) or 'none'}."
        return cls(f"{sentence} {hint}".rstrip())


class ContractError(CrossdraftError):
    """A plug-in, or an object it registered, violates its contract."""


class NumericalError(CrossdraftError):
    """Invalid numbers: NaN, a distribution that does not sum to 1, a drawn token of probability 0.

    ``responses``: if raised by `crossdraft.generate`, the responses to all inputs, including finished ones.
    """

    responses: Sequence[Any] = ()


class ModelError(CrossdraftError):
    """A model that cannot be found, downloaded or loaded."""


def message_of(error: BaseException) -> str:
    """The message of an error of crossdraft; the first line of a foreign one, with its type."""
    return str(error) if isinstance(error, CrossdraftError) else first_line(error).rstrip(": ")


def quoted(value: Any, maximum: int = _QUOTED) -> str:
    """Single-line `repr`, truncated to ``maximum`` characters; never raises."""
    try:
        text = printable(repr(value))
    except Exception:  # an integer with too many digits to print, or a failing __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= maximum else f"{text[: maximum - 1]}…"


def printable(text: str) -> str:
    """``text`` with control characters and halves of surrogate pairs as escapes, so that it can be printed anywhere."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """First line of an error message, prefixed with the class name for foreign errors.

    If the first line ends with a colon, the second line is appended.
    """
    try:
        text, _, rest = str(error).strip().partition("\n")
        text += f" {rest.strip().partition(chr(10))[0]}" if text.endswith(":") else ""
    except Exception:  # its own __str__ fails
        text = ""
    if isinstance(error, CrossdraftError):
        return text
    text = printable(text)
    text = text if len(text) <= _REPEATED else f"{text[: _REPEATED - 1]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
