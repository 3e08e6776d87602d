"""Directories from which stored code is loaded: PyTorch's and Numba's caches, jobs of a cluster.

Loading a shared library or a pickle executes it, so whoever can write the file runs programs as this user. The names of
such files do not protect them: they follow from public inputs. `own_path` and `own_directory` are the one check, for
every cache: code is loaded only if no other user than root can write the file or replace a directory above it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import CrossdraftError, printable

#: Permissions of a directory for code.
_PRIVATE = 0o700


class ForeignCodeError(CrossdraftError):
    """Another user can write the directory that code would be loaded from."""


def own_directory(path: Path, variable: str) -> Path:
    """Create a directory for code, with all missing parents for this user only, and return `own_path` of it.

    Raises:
        ForeignCodeError: see `own_path`.
        OSError: it cannot be created.
    """
    missing = [one for one in (path, *path.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=_PRIVATE, exist_ok=True)  # if another process was faster, the check below is on its directory
    return own_path(path, variable)


def own_path(path: Path, variable: str) -> Path:
    """Return a path without links from which code may be loaded; load it from there, not from ``path``.

    The file and every directory above it, up to the root and along links, must belong to this user or root, and neither
    group nor others may write to them. A sticky directory such as ``/tmp`` may be above: there, only the owner of an
    entry can replace it. As others cannot change such a path, the answer still holds when the file is opened.

    On Windows, which has no such owners, every path is returned; caches are in the user's profile there.

    Args:
        variable: environment variable that names the cache, for the message.

    Raises:
        ForeignCodeError: another user can write there; the message has the path, the cause and the cure.
        OSError: the path does not exist.
    """
    resolved = path.resolve(strict=True)
    if not hasattr(os, "getuid"):
        return resolved
    for part in dict.fromkeys([*_upwards(path.absolute()), *_upwards(resolved)]):
        status = part.lstat()
        if status.st_uid not in (0, os.getuid()):
            cause = f"belongs to another user (uid {status.st_uid})"
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not _is_harmless(status.st_mode, part == resolved):
            cause = f"can be written by {'others' if status.st_mode & stat.S_IWOTH else 'its group'}"
        else:
            continue
        above = part not in (path, path.absolute(), resolved)
        cure = f"set {variable} to a directory that only you can write"
        if status.st_uid == os.getuid():
            trust = "" if above else " if you trust what is in it, remove it otherwise"
            cure = f"chmod go-w {printable(str(part))}{trust}, or {cure}"
        place = printable(str(part)) + (f", above {printable(str(path))}," if above else "")
        raise ForeignCodeError(f"code is not loaded from {place} because it {cause}; {cure}")
    return resolved


def _upwards(path: Path) -> Iterator[Path]:
    yield path
    yield from path.parents


def _is_harmless(mode: int, is_last: bool) -> bool:
    """True for a link, whose permissions have no meaning, and for a sticky directory above."""
    return stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and bool(mode & stat.S_ISVTX) and not is_last)
