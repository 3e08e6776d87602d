"""The directory of a training: one process at a time, files that are whole or not there, errors of the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import CrossdraftError, UsageError
from ..util.input_files import kind_of, path_of, refuse_special_files
from ..util.output_files import PART, replacing

#: Begins the name of a directory that is not whole yet.
_ASIDE = ".export-"


#: One of these lies in every directory that a training has written to.
_OWN = ("texts.jsonl", "texts.json", "checkpoint.pt", "training.json", "trials.json")


def check_directory(directory: Path, models: Iterable[str], texts: Iterable[Path], *, force: bool = False) -> None:
    """Refuse a directory in which training would overwrite what it reads, or what crossdraft train did not write.

    Args:
        models: names of what is read: the target, and what training starts from.
        texts: finished texts that are read, if others are written.
        force: accept a directory with other files.

    Raises:
        UsageError.
    """
    try:
        if not directory.is_dir():
            return  # `claimed` makes it, or refuses a file
    except (OSError, ValueError):
        return  # likewise
    refuse_special_files(directory)
    for name in models:
        if kind_of(name) == "directory" and path_of(name).samefile(directory):
            raise UsageError(f"--out {directory}: has the files of {name}, which would be replaced; name another")
    own = directory / "texts.jsonl"
    if own.exists() and any(file.samefile(own) for file in texts):
        raise UsageError(f"--out {directory}: its texts.jsonl, given as --texts, would be written to; name another")
    names = [entry.name for entry in directory.iterdir() if not entry.name.startswith(".")]
    if names and not force and not any(name in _OWN for name in names):
        raise UsageError(
            f"--out {directory}: holds files that crossdraft train did not write, {min(names)} for one; name an empty "
            "or new directory, or add --force to write beside them and replace those of the same name"
        )


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """A directory that this process alone trains in, made if it is not there, without what a killed run left half.

    Raises:
        UsageError: it cannot be made or written to, or another process trains in it.
    """
    from filelock import FileLock, Timeout

    try:
        if directory.exists() and not directory.is_dir():
            raise UsageError(f"--out {directory}: is a file; it must be a directory, which is made if it is not there")
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / ".lock", timeout=0)
        lock.acquire()
        try:
            tempfile.TemporaryFile(dir=directory).close()
        except OSError:
            lock.release()
            raise
    except Timeout:
        raise UsageError(
            f"--out {directory}: another crossdraft train is writing there; wait for it, or use another --out"
        ) from None
    except (OSError, ValueError, NotImplementedError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(f"--out {directory}: must be a directory that can be written to ({reason})") from None
    try:
        with writing(directory):
            for left in list(directory.iterdir()):
                if left.name.startswith(_ASIDE):
                    shutil.rmtree(left, ignore_errors=True)
                elif left.suffix == PART and left.is_file():
                    left.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise what a disk that is full or gone raises as one sentence.

    Raises:
        CrossdraftError: ``path`` could not be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch.save hides it
        if isinstance(cause, SafetensorError) and "I/O" not in str(cause):
            raise
        if not isinstance(cause, OSError | SafetensorError):
            raise
        reason = cause.strerror if isinstance(cause, OSError) else None
        raise CrossdraftError(
            f"cannot write {path}: {reason or str(cause).splitlines()[0]}; what was whole is kept: make room, and the "
            "same command goes on from there"
        ) from error


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file that is the old one or the whole new one at every moment, also if the machine goes down.

    Raises:
        CrossdraftError: it could not be written; the old one is kept.
    """
    with writing(path):
        with replacing(path) as file:
            write(file)
        _sync_names(path.parent)


def replace_text(path: Path, text: str) -> None:
    """`replace` with a text in UTF-8."""
    replace(path, lambda file: file.write(text.encode("utf-8")))


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A directory whose files take their place in ``directory`` when all of them are whole.

    Raises:
        CrossdraftError: they could not be written; those of before are kept.
    """
    with writing(directory):
        aside = Path(tempfile.mkdtemp(dir=directory, prefix=_ASIDE))
        try:
            yield aside
            for made in sorted(aside.iterdir()):
                place = directory / made.name
                if place.is_dir() and not place.is_symlink():
                    shutil.rmtree(place)
                made.replace(place)
            _sync_names(directory)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _sync_names(directory: Path) -> None:
    """Let a directory's new names reach the disk, where the system can be asked for that."""
    if os.name != "posix":
        return
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
