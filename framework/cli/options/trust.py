"""Consent to foreign code: ``--trust-remote-code MODEL`` and ``--allow-program PROGRAM``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from ...contracts.command import Argument
from ...contracts.options import Options
from ...errors import UsageError, quoted


class TrustOptions(Options):
    """``--trust-remote-code``; an option of a command that inherits from this."""

    trust_remote_code: Annotated[tuple[str, ...], Argument("MODEL")] = Field(
        (), description="allow this model to run Python code from its directory; read the code first (repeatable)"
    )

    def trusted(self, models: Iterable[Any], drafters: Iterable[str] = ()) -> frozenset[str]:
        """The models that may run their own code.

        Args:
            models: those of the command; None items are skipped.
            drafters: names or mappings, whose models are added.

        Raises:
            UsageError: another model; a drafter that is not a name or a mapping.
        """
        if not self.trust_remote_code:
            return frozenset()
        from ...recipe.recipe import Strategy

        options = [Strategy.parse(text, "--drafter").config for text in drafters]
        return trusted(self, [*models, *strings_in(options)])


class ProgramOptions(Options):
    """``--allow-program``; an option of a command that inherits from this."""

    allow_program: Annotated[tuple[str, ...], Argument("PROGRAM")] = Field(
        (),
        description="allow the recipe to start this program of an engine, with its arguments and environment "
        "(repeatable)",
    )


def add_trust_argument(parser: Any) -> None:
    """Add the option to a parser or an argument group."""
    parser.add_argument(
        "--trust-remote-code",
        action="append",
        default=[],
        metavar="MODEL",
        help="allow this model to run Python code from its directory; read the code first (repeatable)",
    )


def add_program_argument(parser: Any) -> None:
    """Add ``--allow-program``."""
    parser.add_argument(
        "--allow-program",
        action="append",
        default=[],
        metavar="PROGRAM",
        help="allow the recipe to start this program of an engine, with its arguments and environment (repeatable)",
    )


def strings_in(options: Any) -> Iterator[str]:
    """All strings in a drafter's options, any of which may be a model."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, dict | list):
        for value in options.values() if isinstance(options, dict) else options:
            yield from strings_in(value)


def trusted_with_drafter(args: argparse.Namespace, target: str | Sequence[str] | None) -> frozenset[str]:
    """`trusted` for a target, or several, and the models of ``--drafter``.

    Raises:
        UsageError: see `trusted`; a drafter that is not a name or a mapping.
    """
    from ...recipe.recipe import Strategy

    if not args.trust_remote_code:
        return frozenset()
    drafters = [args.drafter] if isinstance(args.drafter, str) else args.drafter or []
    options = [Strategy.parse(text, "--drafter").config for text in drafters]
    targets = [target] if isinstance(target, str) else target or []
    return trusted(args, [*filter(None, targets), *strings_in(options)])


def trusted(args: argparse.Namespace | TrustOptions, models: Iterable[Any]) -> frozenset[str]:
    """The models that may run their own code.

    Raises:
        UsageError: a model that is not among the ``models`` of the command (None items are skipped).
    """
    known = sorted({name for name in models if isinstance(name, str)})
    for name in args.trust_remote_code:
        if name not in known:
            raise UsageError(
                f"--trust-remote-code {quoted(name)} is not a model of this command; its models: "
                f"{', '.join(map(quoted, known)) or 'none'}"
            )
    return frozenset(args.trust_remote_code)
