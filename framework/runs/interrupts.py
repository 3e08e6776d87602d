"""Being told to stop: Ctrl-C, SIGTERM, and a terminal that hangs up."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]


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


class Interrupts:
    """While it is entered, the first one raises KeyboardInterrupt, the second is told to wait (a summary is being
    written), the third raises again.

    A KeyboardInterrupt that a plug-in raises by itself is no signal: `asked` tells them apart.
    """

    def __init__(self) -> None:
        self.count = 0
        self._handling = _handled(self._handle)

    def __enter__(self) -> Interrupts:
        global _active
        self._handling.__enter__()
        if threading.current_thread() is threading.main_thread():
            _active = self
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        self._handling.__exit__(None, None, None)
        _active = None

    def _handle(self, *_: object) -> None:
        self.count += 1
        if self.count != 2:
            raise KeyboardInterrupt
        print("crossdraft: saving partial results; press Ctrl-C again to quit now", file=sys.stderr, flush=True)


_active: Interrupts | None = None


def asked() -> bool:
    """Does a KeyboardInterrupt come from the user? Without an `Interrupts` around, it does."""
    return _active is None or _active.count > 0


@contextmanager
def _handled(handler: Callable[..., None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody handle signals
        yield
        return
    # What nohup or a shell in the background told us to ignore stays ignored; None is no handler of Python's.
    numbers = [number for number in _SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
