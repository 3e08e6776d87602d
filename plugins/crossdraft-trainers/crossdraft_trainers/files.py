"""Output directory of a training: locking, atomic writes, disk errors."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from crossdraft import CrossdraftError, UsageError
from crossdraft.commands import kind_of, output_folder, path_of, replacing
from crossdraft.framework.models.configs import COMPACT_WEIGHTS, INDEX, SHARED
from crossdraft.framework.util.input_files import refuse_special_files
from crossdraft.framework.util.output_files import PART

#: Name prefix of a staging directory.
_ASIDE = ".export-"


#: Files of which every training directory contains at least one.
_OWN = ("texts.jsonl", "texts.json", "checkpoint.pt", "training.json", "trials.json")


def check_directory(directory: Path, models: Iterable[str], texts: Iterable[Path], *, force: bool = False) -> None:
    """Check that training does not overwrite its inputs or foreign files.

    Args:
        models: names of the target and the initial checkpoint.
        texts: input files of finished texts, if texts are written, too.
        force: accept a directory with other files.

    Raises:
        UsageError: the directory contains an input, or files not written by crossdraft train.
    """
    try:
        if not directory.is_dir():
            return  # `claim_directory` creates it, or rejects a file
    except (OSError, ValueError):
        return  # likewise
    refuse_special_files(directory)
    for name in models:
        if kind_of(name) == "directory" and path_of(name).samefile(directory):
            raise UsageError(f"--out {directory}: would overwrite the files of {name}; use another directory")
    texts_file = directory / "texts.jsonl"
    if texts_file.exists() and any(file.samefile(texts_file) for file in texts):
        raise UsageError(f"--out {directory}: would write to its texts.jsonl, given as --texts; use another directory")
    names = [entry.name for entry in directory.iterdir() if not entry.name.startswith(".")]
    if names and not force and not any(name in _OWN for name in names):
        raise UsageError(
            f"--out {directory}: contains files not written by crossdraft train, such as {min(names)}; use an empty or "
            "new directory, or add --force to replace files of the same name"
        )


@contextmanager
def claim_directory(directory: Path) -> Iterator[None]:
    """Lock a training directory, creating it if needed, and remove incomplete files of a killed run.

    Raises:
        UsageError: the directory cannot be created or written to, or is locked by another process.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(output_folder(directory) / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(
            f"--out {directory}: another crossdraft train is writing there; wait for it, or use another --out"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise UsageError(f"--out {directory}: cannot be locked ({error}); use another directory") from None
    try:
        with writing(directory):
            for entry in list(directory.iterdir()):
                if entry.name.startswith(_ASIDE):
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry.suffix == PART and entry.is_file():
                    entry.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert disk errors to CrossdraftError.

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
            f"cannot write {path}: {reason or str(cause).splitlines()[0]}; completed files are kept: free disk space "
            "and rerun the command to resume"
        ) from error


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file atomically and durably.

    Raises:
        CrossdraftError: it could not be written; the old file is kept.
    """
    with writing(path):
        with replacing(path) as file:
            write(file)
        _sync_names(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically by a text in UTF-8."""
    replace(path, lambda file: file.write(text.encode("utf-8")))


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Staging directory whose files are moved to ``directory`` when all are complete.

    Weights replace those of another layout, which a loader might prefer.

    Raises:
        CrossdraftError: they could not be written; earlier files are kept.
    """
    with writing(directory):
        staging = Path(tempfile.mkdtemp(dir=directory, prefix=_ASIDE))
        try:
            yield staging
            files = sorted(staging.iterdir())
            if any(file.suffix == ".safetensors" for file in files):
                for name in {"model.safetensors", COMPACT_WEIGHTS, INDEX, SHARED} - {file.name for file in files}:
                    (directory / name).unlink(missing_ok=True)
            for file in files:
                destination = directory / file.name
                if destination.is_dir() and not destination.is_symlink():
                    shutil.rmtree(destination)
                file.replace(destination)
            _sync_names(directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _sync_names(directory: Path) -> None:
    """Flush the directory entry to disk (POSIX only)."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
