"""Atomic writing of files, and checks that no foreign file is overwritten.

A file is written under an unpredictable name in the same directory, synced and renamed, so that at every moment, even
after a power failure, either the old or the complete new file exists. `check_output` checks the path of ``--out``
before any work is done.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import UsageError, printable
from .input_files import kind_of, path_of

#: Suffix of temporary files.
PART = ".part"
#: Bytes at either end of a file that `check_output` searches for a mark.
_ENDS = 8192
#: Characters of a file's name in the name of its temporary file: names are at most 255 bytes long.
_NAMED = 40


@contextmanager
def temporary(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Open a new file in the directory of ``path`` for writing; yield it and its path; remove it at the end.

    Its name is unpredictable, and existing files or links are never opened. Raises OSError.
    """
    aside = path.with_name(f".{path.name[:_NAMED]}.{secrets.token_hex(8)}{PART}")
    try:
        with aside.open("xb") as file:  # O_CREAT | O_EXCL: follows no link
            yield file, aside
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` once it is complete and synced; after an error ``path`` is unchanged.

    Creates the directory. A link at ``path`` is replaced, not followed. Raises OSError if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary(path) as (file, aside):
        yield file
        file.flush()
        os.fsync(file.fileno())  # before the rename: otherwise a crash may leave an empty file
        aside.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 with `replacing`; halves of surrogate pairs (from undecodable names) are allowed."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="surrogatepass"))


# -- output files of commands ---------------------------------------------------------------------------------------


def check_output(
    name: str | Path, option: str, *, inputs: Iterable[str | Path] = (), mark: bytes = b"", force: bool = False
) -> Path:
    """The path of an output file, checked before any work is done.

    Refused are directories, devices, pipes and sockets; files that the command reads, under any name; and, without
    ``force``, existing files without ``mark`` near one of their ends, since crossdraft did not write them.

    Args:
        option: the option for the message: ``--out``.
        inputs: files that the command reads, and directories whose files it reads; anything else is ignored.
        mark: bytes that the command writes near one end of its files.

    Raises:
        UsageError: the file is refused, or its directory is not writable.
    """
    path = path_of(name)
    about, kind = f"{option} {printable(str(path))}", kind_of(path)
    if kind == "directory":
        raise UsageError(f"{about}: it is a directory; name a file in it")
    if kind == "other":
        raise UsageError(f"{about}: it is a device, a pipe or a socket; name a file")
    if not path.name or kind_of(path.parent) != "directory":
        raise UsageError(
            f"{about}: the directory {printable(str(path.parent))} does not exist; create it, or name another"
        )
    check_writable(path.parent, about)
    if not kind and not path.is_symlink():
        return path
    if _among(path, inputs):
        raise UsageError(f"{about}: this command reads that file; name another")
    if not force and not (mark and _bears(path, mark)):
        raise UsageError(
            f"{about}: the file exists, and it was not written by this command; name another, or add --force to "
            "replace it"
        )
    return path


def check_writable(directory: Path, about: str) -> None:
    """Check that a file of a byte can be written to a directory.

    Raises:
        UsageError: the disk is full or read-only, files are limited (``ulimit -f``), or access is denied. ``about`` is
            the start of the message.
    """
    try:
        with temporary(directory / "check") as (file, _):
            file.write(b"\n")
            file.flush()
    except OSError as error:
        place = printable(str(directory))
        raise UsageError(
            f"{about}: the directory {place} cannot be written to: {error.strerror or error}; name another"
        ) from None


@contextmanager
def writing_output(path: Path, option: str) -> Iterator[BinaryIO]:
    """`replacing` for a path from `check_output`; raises UsageError instead of OSError."""
    try:
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise UsageError(f"{option} {printable(str(path))}: cannot be written: {error.strerror or error}") from None


def _among(path: Path, inputs: Iterable[str | Path]) -> bool:
    """True if the file at ``path`` is one of the inputs, or inside of one, under any name."""
    own = _identity(path)
    for name in map(str, inputs):
        with suppress(UsageError):  # a source may be a URL or the name of a data set
            kind, place = kind_of(name), path_of(name)
            if kind == "file" and _identity(place) == own:
                return True
            if kind == "directory":
                files = (Path(folder, name) for folder, _, names in os.walk(place) for name in names)
                if any(_identity(file) == own for file in files):
                    return True
    return False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _bears(path: Path, mark: bytes) -> bool:
    """True if ``mark`` occurs near the start or the end of the regular file at ``path``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return False
        first = file.read(_ENDS)
        file.seek(max(0, status.st_size - _ENDS))
        return mark in first or mark in file.read(_ENDS)


def cache_dir() -> Path:
    """Directory of fetched models: ``$CROSSDRAFT_CACHE``, else the platform's cache directory."""
    if chosen := os.environ.get("CROSSDRAFT_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "crossdraft"
