"""``--trust-remote-code MODEL``: consent to the Python code of one model, the same option of every command."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from ..contracts.errors import UsageError, quoted


def add_consent(parser: Any) -> None:
    """Declare the option, for a parser or a group of one."""
    parser.add_argument(
        "--trust-remote-code",
        action="append",
        default=[],
        metavar="MODEL",
        help="let this model run Python code from its own directory, after you have read it; repeatable",
    )


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
