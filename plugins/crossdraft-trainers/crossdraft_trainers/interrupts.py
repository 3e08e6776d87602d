"""Signals that end a training run after its current step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from crossdraft.framework.runs.interrupts import handled


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Set the event on the first signal, so that the current step can finish; raise KeyboardInterrupt on the second."""
    stop = threading.Event()

    def interrupt(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with handled(interrupt):
        yield stop
