"""The ``crossdraft`` command.

The larger subcommands are modules of their own with ``add_arguments(parser)`` and ``main(args) -> int``,
imported only when they were asked for, so that ``--help`` and ``list`` answer at once. Errors made for people
(`CrossdraftError`) become one line on standard error and the error's exit code: 2 for a wrong request, 1 for
one that failed. So does whatever else is raised, a plug-in's `sys.exit` included, here and nowhere else.
"""

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ..errors import CrossdraftError, printable
from ..models import distributed, threads
from ..plugins import KINDS
from ..runs.interrupts import interrupting
from . import standard_streams
from .list import list_names, list_plugins, show_environment

COMMANDS = {
    "run": "run a recipe: every cell of its matrix, and a report",
    "report": "write one page of results from the records of finished runs",
    "runs": "list runs, and how far each of them is",
    "plot": "draw charts of finished runs, for papers",
    "table": "show numbers of finished runs with rows and columns of your choice, as Markdown, LaTeX or CSV",
    "compare": "set two runs of the same prompts side by side, pair by pair, with intervals",
    "certify": "check by exact enumeration that a drafter and a verifier keep the target's distribution",
    "replay": "block efficiency of drafters and verifiers from recorded responses, without decoding",
    "doctor": "say why a drafter agrees so little with its target: usual mistakes, tried one at a time",
    "train": "train a drafter for a target",
    "cost": "measure what a pass costs, and predict speed-ups from it",
    "advise": "say which drafter, rule and draft length pays at each batch size, and write an engine's settings",
    "serve": "answer the OpenAI protocol with a pair, for evaluation",
    "new": "write a working package for a drafter, a verifier or prompts of your own",
}
"""Subcommands that live in modules of their own, by name, with a line of help."""
_PACKAGES = ("advise", "certify", "cost", "replay", "report", "run")
#: Those that never run a model, and do not choose how OpenMP's threads wait.
WITHOUT_MODELS = ("report", "runs", "plot", "table", "compare", "new", "list", "plugins")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    standard_streams.open_closed()
    for stream in (sys.stdout, sys.stderr):  # whatever the terminal can show of a name, a table is not lost to it
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries, too: elsewhere each step would be a line
    if distributed.rank():  # torchrun's others: what to do is told by the first
        from ..lm.tensor_parallel_lm import follow

        return follow()
    if argv and argv[0] in (*COMMANDS, "env") and argv[0] not in WITHOUT_MODELS:
        threads.choose_wait_policy()  # PyTorch is not loaded yet
    with (
        interrupting(),
        distributed.lead_processes(),
    ):  # SIGTERM and SIGHUP end a command as Ctrl-C does
        return _main(argv)


def _main(argv: list[str]) -> int:
    args, debug = None, False
    try:
        args = _parser(argv[0] if argv else "").parse_args(argv)
        debug = args.debug
        code = args.main(args)
        sys.stdout.flush()
        return code
    except CrossdraftError as error:
        standard_streams.complain("crossdraft: error: " + "\n".join(map(printable, str(error).split("\n"))))
        if debug:
            traceback.print_exc()
        return error.exit_code
    except KeyboardInterrupt:
        standard_streams.complain("crossdraft: interrupted")
        return 130
    except BrokenPipeError:
        standard_streams.discard()  # the reader has left, as in `crossdraft list | head`
        return 141
    except BaseException as error:  # a bug, ours or a plug-in's, told with its trace on request; SystemExit, too
        if args is None and isinstance(error, SystemExit):  # argparse's: --help, or arguments that are wrong
            raise
        try:
            sys.stdout.flush()
        except OSError:  # it is full: the interpreter would fail at it once more
            standard_streams.discard()
        standard_streams.complain(f"crossdraft: error: {_refused(error) or _unexpected(error)}")
        if debug:
            traceback.print_exc()
        return 1


#: Errors of the system that are not bugs: no room, no permission, a name or a file that cannot be used like this.
_SYSTEM = ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "EIO", "EMFILE", "ENFILE")
_SYSTEM += ("ENAMETOOLONG", "ELOOP", "ENOTDIR", "EISDIR")


def _refused(error: BaseException) -> str:
    """The message for what the system refused, a full disk for instance; empty for any other error."""
    if not isinstance(error, OSError) or errno.errorcode.get(error.errno or 0) not in _SYSTEM:
        return ""
    where = printable(str(error.filename)) if error.filename is not None else "standard output or a file"
    return f"{where}: {error.strerror}"


def _unexpected(error: BaseException) -> str:
    """What an error that nobody made for people says, and where it was raised."""
    what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{what}{where}; --debug shows where it came from, and a report is welcome"


def _parser(chosen: str) -> argparse.ArgumentParser:
    """The parser; of `COMMANDS`, only the `chosen` one declares its arguments."""
    parser = argparse.ArgumentParser(
        prog="crossdraft",
        description="Compare speculative-decoding drafters and verifiers, and certify them lossless.",
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=_sentence(summary))
        if name == chosen:
            implementation = import_module(f".{name}.command" if name in _PACKAGES else f".{name}", __package__)
            implementation.add_arguments(command)
            command.set_defaults(main=implementation.main)
            _add_debug(command)

    summary = "list the drafters, verifiers, models, prompts and recipes that are installed"
    command = commands.add_parser("list", help=summary, description=_sentence(summary))
    command.add_argument("kind", nargs="?", choices=KINDS, help="only this kind")
    command.add_argument(
        "name", nargs="?", help="of a drafter, verifier or launcher: its options; of a recipe: its file"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(main=list_names)
    _add_debug(command)

    summary = "show who provides what, and which plug-ins were skipped and why"
    command = commands.add_parser("plugins", help=summary, description=_sentence(summary))
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(main=list_plugins)
    _add_debug(command)

    summary = "show versions, the machine and the choices crossdraft makes on it"
    command = commands.add_parser("env", help=summary, description=_sentence(summary))
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(main=show_environment)
    _add_debug(command)
    return parser


def _add_debug(command: argparse.ArgumentParser) -> None:
    command.add_argument("--debug", action="store_true", help="show the traceback of what went wrong")


class _Version(argparse.Action):
    """``--version``; argparse's own wants the version before anybody asked."""

    def __init__(self, option_strings: Sequence[str], dest: str):
        super().__init__(option_strings, dest, nargs=0, help="show the version and leave")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print("crossdraft", version("crossdraft"))
        parser.exit()


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
