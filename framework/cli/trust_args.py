"""``--trust-remote-code MODEL``: consent to the Python code of one model, the same option of every command."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import UsageError, quoted


def add_consent(parser: Any) -> None:
    """Declare the option, for a parser or a group of one."""
    parser.add_argument(
        "--trust-remote-code",
        action="append",
        default=[],
        metavar="MODEL",
        help="let this model run Python code from its own directory, after you have read it; repeatable",
    )


def texts_in(options: Any) -> Iterator[str]:
    """Every text in a drafter's options: which of them are models, the drafter alone knows."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, dict | list):
        for one in options.values() if isinstance(options, dict) else options:
            yield from texts_in(one)


def trusted_beside(args: argparse.Namespace, target: str | None) -> frozenset[str]:
    """`trusted`, among a target and what ``--drafter`` names.

    Raises:
        UsageError: see `trusted`; a drafter that is no name or mapping.
    """
    from ..recipe.recipe import Strategy

    if not args.trust_remote_code:
        return frozenset()
    drafters = [args.drafter] if isinstance(args.drafter, str) else args.drafter or []
    options = [Strategy.parse(text, "--drafter").config for text in drafters]
    return trusted(args, [target or None, *texts_in(options)])


def trusted(args: argparse.Namespace, models: Iterable[Any]) -> frozenset[str]:
    """The models that may run code of their own.

    Raises:
        UsageError: one that is not among the ``models`` (None: there is no such model) of the command.
    """
    known = sorted({name for name in models if isinstance(name, str)})
    for name in args.trust_remote_code:
        if name not in known:
            raise UsageError(
                f"--trust-remote-code {quoted(name)} names no model of this command, whose models are: "
                f"{', '.join(map(quoted, known)) or 'none'}"
            )
    return frozenset(args.trust_remote_code)
