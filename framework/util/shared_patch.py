"""Changes to the whole process that last for a while, and leave nothing behind whatever threads overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SharedPatch:
    """A context manager that many threads may be inside of at once: the first makes a change, the last takes it back.

    If every thread saved what it found and put that back, one that came second would find the change of the first, and
    leave it behind for good.

    Args:
        change: makes the change and returns what takes it back.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]):
        self._change = change
        self._lock = threading.Lock()
        self._inside = 0
        self._take_back: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._take_back = self._change()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._take_back is not None:
                self._take_back()
                self._take_back = None
