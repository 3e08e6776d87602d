"""A line about the current work of a training run, every ten seconds from its start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm

from crossdraft.runs import duration

#: Seconds between two lines.
INTERVAL = 10.0
_current: list[Callable[[], str]] = []


def doing(describe: Callable[[], str]) -> None:
    """Set the description of the current work, called for each line from another thread."""
    _current[:] = [describe]


@contextmanager
def heartbeat(interval: float = INTERVAL) -> Iterator[None]:
    """Print the elapsed time and the current work to stderr, every ``interval`` seconds until the end."""
    ended, start = Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(interval):
            for describe in _current[:]:
                tqdm.write(f"crossdraft: {duration(time.monotonic() - start)}: {describe()}", file=sys.stderr)

    Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _current.clear()
