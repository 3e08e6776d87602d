"""Defensive reading of files: every problem raises an error with the file and the line.

Reading never blocks and never exceeds a limit: directories, devices, pipes and sockets are refused by their mode,
before and after opening, large files by their size.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ..errors import CrossdraftError, UsageError, printable, quoted
from .limits import MOST_DIGITS, MOST_NESTING, Limit

#: A number with too many digits.
_LONG = re.compile(rf"\d{{{MOST_DIGITS + 1}}}", re.ASCII)
_SPECIAL = "a device, a pipe or a socket"
Kind = Literal["file", "directory", "other", ""]
#: Characters that cannot be tokenized: NUL and halves of surrogate pairs.
BROKEN = re.compile("[\x00\ud800-\udfff]")
#: Characters not allowed in options: these and the other control characters, except tabs and line breaks.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")
#: Characters not allowed in names: control characters and line breaks.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def describe_forbidden_char(text: str, refused: re.Pattern[str]) -> str | None:
    """A description of the first character of ``text`` that matches ``refused``; None if there is no match."""
    match = refused.search(text)
    if match is None:
        return None
    code = ord(match[0])
    half = ", half of a surrogate pair" if 0xD800 <= code <= 0xDFFF else ""
    return f"the character U+{code:04X}{half}"


# -- paths -----------------------------------------------------------------------------------------------------


def path_of(name: str | Path) -> Path:
    """The path called ``name``, with ``~`` expanded. Raises UsageError if the home directory does not exist."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UsageError(
            f"{quoted(str(name))} is not a path: the home directory does not exist; give the full path"
        ) from None


def kind_of(name: str | Path) -> Kind:
    """The kind of a path: a file, a directory, something else (a device, a pipe), or ``""`` if it does not exist.

    Raises:
        UsageError: the path is invalid (it contains NUL, or is too long), or access is denied.
    """
    path = path_of(name)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        raise UsageError(f"{quoted(str(name))} is not a valid path: {_reason(error)}") from None
    return "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "other"


def refuse_special_files(directory: Path, *, below: bool = False, error: type[CrossdraftError] = UsageError) -> None:
    """Raise ``error`` if a directory contains a device, a pipe or a socket, or a link to one; a library reads it next.

    Args:
        below: also check its subdirectories.
    """
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            if kind_of(path) == "other":
                about = f"{printable(str(path))}: it is {_SPECIAL}, not a file"
                raise error(f"cannot read {about}; remove it, or give another directory")
        if not below:
            return


# -- text ------------------------------------------------------------------------------------------------------


def open_file(path: Path, maximum: Limit, *, subject: str = "", error: type[CrossdraftError] = UsageError) -> BinaryIO:
    """Open a regular file of at most ``maximum`` bytes for reading, without waiting for a writer.

    Args:
        subject: kind of file, for the message: "the recipe".
        error: raised if it is not a regular file, is too large or cannot be opened.
    """
    about = _about(path, subject)
    try:
        _check(path.stat(), maximum, about, error)
        # The file may have been replaced since: a pipe is opened without blocking, and checked again.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as reason:
        raise error(f"cannot read {about}: {_reason(reason)}") from None
    try:
        _check(os.fstat(descriptor), maximum, about, error)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, maximum: Limit, *, subject: str = "", error: type[CrossdraftError] = UsageError) -> bytes:
    """The bytes of a file; see `open_file`."""
    about = _about(path, subject)
    try:
        with open_file(path, maximum, subject=subject, error=error) as opened:
            # Not `read(most + 1)`, which takes the memory of the limit; files in /proc report no size.
            size = os.fstat(opened.fileno()).st_size
            data = opened.read(size + 1)
            while len(data) > size and len(data) <= maximum and (more := opened.read(2**20)):
                data += more
    except OSError as reason:
        raise error(f"cannot read {about}: {_reason(reason)}") from None
    except MemoryError:
        raise error(f"cannot read {about}: it does not fit into the memory that this process may use") from None
    if reason := maximum.violation(data):  # files in /proc report no size
        raise error(f"cannot read {about}: it has more bytes than its size; {reason}")
    return data


def read_text(
    path: Path,
    maximum: Limit,
    *,
    subject: str = "",
    error: type[CrossdraftError] = UsageError,
    surrogates: bool = False,
) -> str:
    """The text of a file, without a byte order mark.

    Args:
        maximum: limit on its bytes.
        subject: kind of file, for the message: "the recipe".
        error: raised if it cannot be read, is too large or is not UTF-8.
        surrogates: accept halves of surrogate pairs, which `replace_text` writes.
    """
    data = read_bytes(path, maximum, subject=subject, error=error)
    return _decoded(data, _about(path, subject), error, surrogates=surrogates)


def read_lines(
    path: Path, maximum: Limit, line: Limit, *, subject: str = "", surrogates: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file and their numbers, from 1, one at a time. Raises UsageError.

    Args:
        maximum, line: limits on the bytes of the file and of a line.
        surrogates: see `read_text`.
    """
    about = _about(path, subject)
    try:
        with open_file(path, maximum, subject=subject) as opened:
            number = 0
            while data := opened.readline(line + 1):
                number += 1
                if reason := line.violation(data):
                    raise UsageError(f"{about}:{number}: the line is too long (in bytes, {reason})")
                yield number, _decoded(data.rstrip(b"\r\n"), about, UsageError, number, surrogates)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {about}: {_reason(error)}") from None


def _about(path: Path, subject: str) -> str:
    return f"{subject} {printable(str(path))}".lstrip()


def _check(status: os.stat_result, maximum: Limit, about: str, error: type[CrossdraftError]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else _SPECIAL
        raise error(f"cannot read {about}: it is {kind}, not a file")
    if reason := maximum.violation(status.st_size):
        raise error(f"cannot read {about}: it has {status.st_size} bytes; {reason}")


def _decoded(data: bytes, about: str, error: type[CrossdraftError], line: int = 1, surrogates: bool = False) -> str:
    if line == 1 and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise error(f"cannot read {about}: it is not UTF-8 text but UTF-16; save it as UTF-8")
    try:
        errors = "surrogatepass" if surrogates else "strict"
        return data.decode("utf-8-sig" if line == 1 else "utf-8", errors)
    except UnicodeDecodeError as reason:
        line += data.count(b"\n", 0, reason.start)
        raise error(f"cannot read {about}: it is not UTF-8 text (line {line})") from None


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it contains NUL, or a character that file systems do not support"


# -- JSON ------------------------------------------------------------------------------------------------------


def read_json(
    path: Path,
    maximum: Limit,
    *,
    subject: str = "",
    error: type[CrossdraftError] = UsageError,
    surrogates: bool = False,
) -> dict[str, Any]:
    """The object in a JSON file, nested at most `MOST_NESTING` levels deep; see `read_text`."""
    text = read_text(path, maximum, subject=subject, error=error, surrogates=surrogates)
    root = parse_json(text, path, error=error)
    if not isinstance(root, dict):
        raise error(f"{_about(path, subject)}: it must hold a JSON object, not {_json_kind(root)}")
    if nested_too_deeply(root):
        raise error(f"{_about(path, subject)}: it is nested more than {MOST_NESTING} deep")
    return root


def nested_too_deeply(root: Any) -> bool:
    """True if a JSON value is nested more than `MOST_NESTING` levels deep, so that a recursive function may fail."""
    level: list[Any] = [root] if isinstance(root, dict | list) else []
    for _ in range(MOST_NESTING):
        level = [v for value in level for v in (value.values() if isinstance(value, dict) else value)]
        level = [value for value in level if isinstance(value, dict | list)]
    return bool(level)


def parse_json(
    text: str, file: Path | str, *, line: int = 1, error: type[CrossdraftError] = UsageError, nan: bool = True
) -> Any:
    """The JSON value in ``text``, which starts at ``line`` of a file.

    ``nan``: accept NaN, Infinity and -Infinity, which Python writes although they are not JSON.
    """
    try:
        # A hook for every number is slow, so it is used only if the text has a long one.
        return json.loads(
            text, parse_int=_integer if _LONG.search(text) else None, parse_constant=None if nan else _no_constant
        )
    except json.JSONDecodeError as reason:
        place = f"{printable(str(file))}:{line + reason.lineno - 1}"
        raise error(f"{place}: not JSON: {reason.msg} at column {reason.colno}") from None
    except RecursionError:
        raise error(f"{printable(str(file))}:{line}: cannot read this JSON: it is nested too deeply") from None
    except ValueError as reason:
        raise error(f"{printable(str(file))}:{line}: {reason}") from None


def _integer(digits: str) -> int:
    if reason := MOST_DIGITS.violation(digits.lstrip("-")):
        raise ValueError(f"the number {quoted(digits, 20)} has {len(digits)} digits; {reason}")
    return int(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value; send a number")


def _json_kind(value: Any) -> str:
    kinds: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
