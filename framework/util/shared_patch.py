"""Reference-counted patches of process-wide state."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SharedPatch:
    """Context manager that applies a patch when the first thread enters and undoes it when the last one leaves.

    If each thread saved and restored the state by itself, a thread that enters second would save the patched state and
    restore it at the end.

    Args:
        apply: applies the patch and returns a function that undoes it.
    """

    def __init__(self, apply: Callable[[], Callable[[], None]]):
        self._apply = apply
        self._lock = threading.Lock()
        self._users = 0
        self._undo: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._undo = self._apply()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._undo is not None:
                self._undo()
                self._undo = None
