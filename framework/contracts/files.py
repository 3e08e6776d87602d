"""Files that hold the old text or the whole new one at every moment, also if the machine goes down."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

#: Ends the name of what is written aside, before it is whole.
PART = ".part"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` once it is whole and on the disk; on errors nothing does.

    Its directory is made. Raises OSError where it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a new name must not stand on old nothing
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """`replacing` with a text in UTF-8; halves of surrogate pairs, as undecodable names hold them, pass."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="surrogatepass"))


def cache_dir() -> Path:
    """Where fetched models are kept: ``$CROSSDRAFT_CACHE``, else the platform's cache directory."""
    if chosen := os.environ.get("CROSSDRAFT_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "crossdraft"
