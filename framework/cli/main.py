"""The ``crossdraft`` command.

Each larger subcommand is a module with ``add_arguments(parser)`` and ``main(args) -> int``, imported only when it is
run, so that ``--help`` and ``list`` start fast. A `CrossdraftError` is printed as one line on standard error and sets
the exit code: 2 for an invalid request, 1 for a failed one. All other exceptions, including a plug-in's `SystemExit`,
are caught here as well.
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
from ..models import distributed
from ..models.cpu import threads
from ..plugins import KINDS
from ..runs.interrupts import interrupting
from . import standard_streams
from .list import list_names, list_plugins, show_environment

COMMANDS = {
    "run": "run a recipe: measure every cell of its matrix and write a report",
    "report": "write a Markdown or HTML report of finished runs",
    "runs": "list runs and their progress",
    "plot": "draw charts of finished runs",
    "table": "print a pivot table of finished runs as Markdown, LaTeX or CSV",
    "compare": "compare two runs on the same prompts, pair by pair, with confidence intervals",
    "gate": "fail if the acceptance length dropped since a baseline, and compute the prompts that takes",
    "certify": "check by exact enumeration that a drafter and a verifier preserve the target distribution",
    "power": "compute the bias that a task's score can show, and the draws that show it instead",
    "verify-engine": "check an engine's steps and text against replay and the target",
    "compare-texts": "check if greedy texts differ by rounding or are not the target's",
    "replay": "compute the block efficiency of drafters and verifiers on recorded responses, without decoding",
    "doctor": "diagnose a low acceptance rate by trying common mistakes one at a time",
    "train": "train a drafter for a target",
    "export-model": "write a trained drafter as a checkpoint that serving engines load",
    "cost": "measure the latency of forward passes and predict speed-ups",
    "advise": "recommend a drafter, verifier and draft length per batch size, and write engine settings",
    "simulate": "simulate draft lengths under traffic: latency, throughput and goodput of an engine or many replicas",
    "serve": "start an OpenAI-compatible server with a drafter and a verifier, for evaluation",
    "new": "create a plug-in package for a drafter, a verifier or prompts",
}
"""Subcommands in separate modules, by name, with a line of help."""
_PACKAGES = ("advise", "certify", "cost", "gate", "replay", "report", "run", "simulate", "verify_engine")
#: Commands that do not run models, for which OpenMP's wait policy is not set.
WITHOUT_MODELS = ("report", "runs", "plot", "table", "compare", "gate", "power", "new", "list", "plugins")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    standard_streams.open_closed()
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot encode must not raise
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # including bars of libraries; in a file each update would be a line
    if distributed.rank():  # torchrun's other processes follow rank 0
        from ..lm.tensor_parallel_lm import follow

        return follow()
    if argv and argv[0] in (*COMMANDS, "env") and argv[0] not in WITHOUT_MODELS:
        threads.choose_wait_policy()  # PyTorch is not loaded yet
    with interrupting(), distributed.lead_processes():  # SIGTERM and SIGHUP act like Ctrl-C
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
        standard_streams.print_error("crossdraft: error: " + "\n".join(map(printable, str(error).split("\n"))))
        if debug:
            traceback.print_exc()
        return error.exit_code
    except KeyboardInterrupt:
        standard_streams.print_error("crossdraft: interrupted")
        return 130
    except BrokenPipeError:
        standard_streams.discard()  # the reader closed the pipe, as in `crossdraft list | head`
        return 141
    except BaseException as error:  # a bug or a plug-in's SystemExit; --debug shows the traceback
        if args is None and isinstance(error, SystemExit):  # from argparse: --help, or invalid arguments
            raise
        try:
            sys.stdout.flush()
        except OSError:  # the disk is full: the interpreter would fail again at exit
            standard_streams.discard()
        standard_streams.print_error(f"crossdraft: error: {_system_message(error) or _bug_message(error)}")
        if debug:
            traceback.print_exc()
        return 1


#: Operating-system errors that are not bugs: full disk, no permission, unusable file name.
_SYSTEM = ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "EIO", "EMFILE", "ENFILE")
_SYSTEM += ("ENAMETOOLONG", "ELOOP", "ENOTDIR", "EISDIR")


def _system_message(error: BaseException) -> str:
    """The message of an operating-system error such as a full disk; empty for other errors."""
    if not isinstance(error, OSError) or errno.errorcode.get(error.errno or 0) not in _SYSTEM:
        return ""
    where = printable(str(error.filename)) if error.filename is not None else "standard output or a file"
    return f"{where}: {error.strerror}"


def _bug_message(error: BaseException) -> str:
    """The type, message and location of an unexpected error."""
    message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{message}{where}; --debug shows the traceback; please report it"


def _parser(chosen: str) -> argparse.ArgumentParser:
    """The parser: if ``chosen`` is one of `COMMANDS`, of that one, otherwise of all, without their arguments."""
    parser = argparse.ArgumentParser(
        prog="crossdraft",
        description="Compare speculative-decoding drafters and verifiers, and certify them lossless.",
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    if chosen in COMMANDS:
        summary = COMMANDS[chosen]
        command = commands.add_parser(chosen, help=summary, description=_sentence(summary))
        module = chosen.replace("-", "_")
        module += ".command" * (module in _PACKAGES)
        implementation = import_module(f".{module}", __package__)
        implementation.add_arguments(command)
        command.set_defaults(main=implementation.main)
        _add_debug(command)
        return parser
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, description=_sentence(summary))

    summary = "list installed drafters, verifiers, models, prompts and recipes"
    command = commands.add_parser("list", help=summary, description=_sentence(summary))
    command.add_argument("kind", nargs="?", choices=KINDS, help="only this kind")
    command.add_argument(
        "name", nargs="?", help="show the options of a drafter, verifier or launcher, or the file of a recipe"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(main=list_names)
    _add_debug(command)

    summary = "list plug-ins, what they provide, and why some were skipped"
    command = commands.add_parser("plugins", help=summary, description=_sentence(summary))
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(main=list_plugins)
    _add_debug(command)

    summary = "show versions, hardware and the defaults chosen for it"
    command = commands.add_parser("env", help=summary, description=_sentence(summary))
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(main=show_environment)
    _add_debug(command)
    return parser


def _add_debug(command: argparse.ArgumentParser) -> None:
    command.add_argument("--debug", action="store_true", help="show tracebacks of errors")


class _Version(argparse.Action):
    """``--version``, which looks up the version only if it is used, unlike argparse's own action."""

    def __init__(self, option_strings: Sequence[str], dest: str):
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print("crossdraft", version("crossdraft"))
        parser.exit()


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
