"""Writing files: whole or not at all, and never over what is not ours.

A file is written under an unpredictable name beside its place, synced and renamed: at every moment, also after a power
cut, there is the old one or the whole new one. A file that a user names with ``--out`` is checked by `check_output`
before any work is done for it.
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

#: Ends the name of a temporary file.
PART = ".part"
#: Bytes at either end of a file in which `check_output` looks for the mark of its writer.
_ENDS = 8192
#: Characters of a file's name that the name of its temporary file begins with: names are at most 255 bytes long.
_NAMED = 40


@contextmanager
def temporary(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file beside ``path``, open for writing, and its path; it is removed if the block leaves it there.

    Its name is unpredictable, and it is created by this call: a file or link of that name is not opened.
    Raises OSError.
    """
    aside = path.with_name(f".{path.name[:_NAMED]}.{secrets.token_hex(8)}{PART}")
    try:
        with aside.open("xb") as file:  # O_CREAT | O_EXCL: follows no link
            yield file, aside
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` once it is whole and on the disk; after an error nothing does.

    Its directory is made. A link at ``path`` is replaced, not followed. Raises OSError if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary(path) as (file, aside):
        yield file
        file.flush()
        os.fsync(file.fileno())  # before the rename: the new name must not stand for an empty file
        aside.replace(path)


def replace_text(path: Path, text: str) -> None:
    """`replacing` with a text in UTF-8; halves of surrogate pairs, as undecodable names hold them, pass."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="surrogatepass"))


# -- files that a user names ---------------------------------------------------------------------------------------


def check_output(
    name: str | Path, option: str, *, inputs: Iterable[str | Path] = (), mark: bytes = b"", force: bool = False
) -> Path:
    """The path of a file to be written, if writing it destroys nothing; called before the work.

    Refused are a directory, a device, a pipe or a socket; a file that the command reads, under any name; and, without
    ``force``, an existing file without ``mark`` near one of its ends, for crossdraft did not write it.

    Args:
        option: that names it, for the message: ``--out``.
        inputs: files the command reads, and directories whose files it reads; what is not a path is ignored.
        mark: bytes that the command writes near one end of its files.

    Raises:
        UsageError: the file is refused, or its directory cannot be written to.
    """
    path = path_of(name)
    about, kind = f"{option} {printable(str(path))}", kind_of(path)
    if kind == "directory":
        raise UsageError(f"{about}: it is a directory; name a file in it")
    if kind == "other":
        raise UsageError(f"{about}: it is a device, a pipe or a socket; name a file")
    if not path.name or kind_of(path.parent) != "directory":
        raise UsageError(f"{about}: there is no directory {printable(str(path.parent))}; make it, or name another")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{about}: the directory {printable(str(path.parent))} cannot be written to; name another")
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


@contextmanager
def writing_output(path: Path, option: str) -> Iterator[BinaryIO]:
    """`replacing` for a file that `check_output` passed; errors of the disk are UsageErrors."""
    try:
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise UsageError(f"{option} {printable(str(path))}: cannot be written: {error.strerror or error}") from None


def _among(path: Path, inputs: Iterable[str | Path]) -> bool:
    """True if the file at ``path`` is one of the inputs, or in one of them, under whatever name."""
    own = _identity(path)
    for given in map(str, inputs):
        with suppress(UsageError):  # a source may be a URL or the name of a data set
            kind, place = kind_of(given), path_of(given)
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
    """True if ``mark`` stands near the beginning or the end of the regular file at ``path``."""
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
