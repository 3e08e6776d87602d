"""Being told to stop: Ctrl-C, SIGTERM, and a terminal that hangs up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_KINDS = [kind for name in ("SIGINT", "SIGTERM", "SIGHUP") if (kind := getattr(signal, name, None)) is not None]


@contextmanager
def interrupting() -> Iterator[None]:
    """All of them raise KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with _handled(interrupt):
        yield


@contextmanager
def until_told() -> Iterator[threading.Event]:
    """The first one sets an event, so that a step can be finished; the second one raises KeyboardInterrupt."""
    told = threading.Event()

    def tell(*_: object) -> None:
        if told.is_set():
            raise KeyboardInterrupt
        told.set()

    with _handled(tell):
        yield told


@contextmanager
def _handled(handler: Callable[..., None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody handle signals
        yield
        return
    # What nohup or a shell in the background told us to ignore stays ignored; None is no handler of Python's.
    kinds = [kind for kind in _KINDS if signal.getsignal(kind) not in (signal.SIG_IGN, None)]
    before = [signal.signal(kind, handler) for kind in kinds]
    try:
        yield
    finally:
        for kind, old in zip(kinds, before, strict=True):
            signal.signal(kind, old)
