"""The ``crossdraft`` command.

Commands are registered through ``crossdraft_register_commands``; each has ``add_arguments(parser)`` and
``main(args) -> int`` and is imported only when it is run, so that ``--help`` and ``list`` start fast. A
`CrossdraftError` is printed as one line on standard error and sets the exit code: 2 for an invalid request, 1 for a
failed one. All other exceptions, including a plug-in's `SystemExit`, are caught here as well.
"""

import argparse
import errno
import os
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from tempfile import gettempdir

from .. import plugins
from ..errors import CrossdraftError, printable
from ..models.placement import process_count
from ..runs.interrupts import handled
from ..util.releases import release
from . import standard_streams
from .commands import HEADINGS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    standard_streams.open_closed()
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot encode must not raise
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # including bars of libraries; in a file each update would be a line
    with standard_streams.cleaned(), handled(signal.default_int_handler):  # SIGTERM and SIGHUP act like Ctrl-C
        return _main(argv, lead=process_count() > 1)


def _main(argv: list[str], lead: bool = False) -> int:
    args, debug = None, False
    try:
        gettempdir()  # without one PyTorch cannot be imported, and a list would call each plug-in unusable
        if lead:  # the other processes of torchrun, which follow
            return plugins.of_companion("tensor parallelism").lead(lambda: _main(argv))
        known, unknown = _parser(argv[0] if argv else "").parse_known_args(argv)
        if unknown:
            for name in (f"{argv[0]} {word.partition('=')[0]}" for word in unknown):
                if ("options", name) in plugins.COMPANIONS:
                    raise plugins.unknown("options", name)
            known.refuse(f"unrecognized arguments: {' '.join(unknown)}; a value follows its option: --target MODEL")
        args, debug = known, getattr(known, "debug", False)
        code = known.main(known)
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
    """The message of an error of the operating system, such as a full disk, or of a limit; empty for other errors."""
    if isinstance(error, MemoryError):
        return "not enough memory; use smaller inputs or batches, or raise the limit (ulimit -v)"
    if isinstance(error, RecursionError):
        return "an input is nested too deeply; --debug shows where"
    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return "an input contains a number with too many digits; --debug shows where"
    if isinstance(error, FileNotFoundError) and "No usable temporary" in str(error):  # of tempfile
        return "no temporary directory can be written to; set TMPDIR to one, or raise the limit on files (ulimit -f)"
    if not isinstance(error, OSError) or errno.errorcode.get(error.errno or 0) not in _SYSTEM:
        return ""
    place = printable(str(error.filename)) if error.filename is not None else "standard output or a file"
    return f"{place}: {error.strerror}"


def _bug_message(error: BaseException) -> str:
    """The type, message and location of an unexpected error."""
    message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{message}{place}; --debug shows the traceback; please report it"


def _parser(chosen: str) -> argparse.ArgumentParser:
    """The parser, with the arguments of the ``chosen`` command if there is one of that name.

    Raises:
        UsageError: no installed distribution provides the command.
        ContractError: it is unusable.
    """
    parser = argparse.ArgumentParser(
        prog="crossdraft",
        description="Compare speculative-decoding drafters and verifiers, and certify them lossless.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = release("crossdraft") if chosen == "--version" else ""  # looking it up takes time
    parser.add_argument(
        "--version", action="version", version=f"crossdraft {version}", help="show the version and exit"
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    if not chosen or chosen.startswith("-"):
        parser.usage, parser.epilog = "crossdraft [-h] [--version] COMMAND ...", _commands_by_heading()
        return parser
    entries = plugins.entries("commands")
    if chosen not in entries:
        raise plugins.unknown("commands", chosen, "crossdraft --help describes them.")
    command = plugins.get("commands", chosen)
    summary = entries[chosen].summary
    subparser = subparsers.add_parser(chosen, description=summary[:1].upper() + summary[1:] + "." * bool(summary))
    with plugins.guarded("commands", chosen, "add_arguments()"):
        command.add_arguments(subparser)
    if not any(action.dest == "debug" for action in subparser._actions):
        subparser.add_argument("--debug", action="store_true", default=False, help="show tracebacks of errors")
    subparser.set_defaults(main=command.main, refuse=subparser.error)
    return parser


def _commands_by_heading() -> str:
    """The commands with their summaries, by heading: those of `HEADINGS` first."""
    entries = plugins.entries("commands").values()
    width = max(len(entry.name) for entry in entries) + 2
    columns = shutil.get_terminal_size().columns
    parts = []
    for heading in dict.fromkeys([*HEADINGS, *sorted(entry.heading for entry in entries)]):
        lines = []
        for entry in entries:
            if entry.heading == heading:
                blank = " " * (4 + width)
                lines.append(
                    textwrap.fill(entry.summary, max(columns, 60), initial_indent=blank, subsequent_indent=blank)
                )
                lines[-1] = f"    {entry.name:{width}}{lines[-1].lstrip()}".rstrip()
        parts += ["\n".join([f"{heading.lower() if heading in HEADINGS else heading}:", *lines])] if lines else []
    return "\n\n".join([*parts, "crossdraft COMMAND --help describes a command."])
