"""The errors that crossdraft raises on purpose.

Each carries one sentence, written for the person who reads it: what is wrong and what to do. They hold
nothing but that sentence, so that they survive the trip from a worker process. The command line prints the
sentence without a traceback and leaves with ``exit_code``.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


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
        sentence = f"there is no {what} named {name!r}"
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
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
