"""The errors that crossdraft raises on purpose.

Each carries one sentence, written for the person who reads it: what is wrong and what to do. They hold
nothing but that sentence, so that they survive the trip from a worker process. The command line prints the
sentence without a traceback and leaves with ``exit_code``.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

#: Most characters that a sentence repeats of what was given, and of what somebody else's error says.
_QUOTED, _REPEATED = 80, 300


class CrossdraftError(Exception):
    """Base of every error below; catching it catches nothing that is a bug."""

    exit_code = 1


class UsageError(CrossdraftError):
    """The request itself is wrong: a recipe, an option, a name."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that nothing installed provides."""

    @classmethod
    def among(cls, what: str, name: str, known: Iterable[str], hint: str = "") -> "UnknownNameError":
        """Say that `name` is no `what`, which known name is nearest, and what is installed."""
        known = sorted(known)
        sentence = f"there is no {what} named {quoted(name)}"
        nearest = difflib.get_close_matches(name[:_REPEATED], known, n=1, cutoff=0.5)
        sentence += f"; did you mean {nearest[0]!r}?" if nearest else "."
        sentence += f" Installed: {', '.join(known) or 'none'}."
        return cls(f"{sentence} {hint}".rstrip())


class ContractError(CrossdraftError):
    """A plug-in, or an object it registered, does not keep its contract."""


class NumericalError(CrossdraftError):
    """Numbers that cannot be right: NaN, a law that does not sum to one, a drawn token of mass zero.

    ``responses``: where `crossdraft.generate` raises it, what it made of all inputs, the finished ones whole.
    """

    responses: Sequence[Any] = ()


class ModelError(CrossdraftError):
    """A model that cannot be found, fetched or loaded as it is."""


def quoted(value: Any, most: int = _QUOTED) -> str:
    """`repr` for a sentence: on one line, cut, and whatever ``value`` is."""
    try:
        text = printable(repr(value))
    except Exception:  # an integer of more digits than Python prints, somebody's own __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def printable(text: str) -> str:
    """``text`` with control characters and halves of surrogate pairs as escapes, so that it can be printed anywhere."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, after the name of its class if it is not one of ours.

    And the second, if the first one announces it with a colon.
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
