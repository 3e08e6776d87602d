"""Signals that interrupt a run: SIGINT (Ctrl-C), SIGTERM and SIGHUP."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]


#: Number of signals in the block of `saving_interrupts`; None outside of it.
_signals: int | None = None


@contextmanager
def saving_interrupts() -> Iterator[None]:
    """Let a run end on the first signal: it raises KeyboardInterrupt, so that partial results are saved.

    The second signal prints a message only, the third raises KeyboardInterrupt again. `user_interrupted`
    distinguishes signals from a KeyboardInterrupt raised by a plug-in.
    """
    global _signals

    def interrupt(*_: object) -> None:
        global _signals
        _signals = (_signals or 0) + 1
        if _signals != 2:
            raise KeyboardInterrupt
        print("crossdraft: saving partial results; press Ctrl-C again to quit now", file=sys.stderr, flush=True)

    def forget() -> None:
        global _signals
        _signals = (_signals or 1) - 1

    _signals = 0 if threading.current_thread() is threading.main_thread() else None
    try:
        with handled(interrupt, forget):
            yield
    finally:
        _signals = None


def user_interrupted() -> bool:
    """Return True if a KeyboardInterrupt comes from a signal. Always True outside of `saving_interrupts`."""
    return _signals != 0


def propagate_interrupt(error: BaseException) -> None:
    """Raise KeyboardInterrupt if a signal caused `error`: native code may have replaced it by an error of its own."""
    if _signals or (user_interrupted() and isinstance(error, KeyboardInterrupt)):
        raise KeyboardInterrupt from error


@contextmanager
def handled(handler: Callable[..., None], forget: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Call ``handler`` on each of the signals; again, after ``forget``, if its KeyboardInterrupt is ignored.

    Python ignores exceptions of finalisers, in which a signal may be handled.
    """
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only
        yield
        return
    # Signals ignored by the parent (nohup, a background job) stay ignored; None is a handler not set by Python.
    numbers = [number for number in _SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]

    # `interrupt_main` does not end a sleep or a wait, but Windows has nothing else.
    send = getattr(signal, "pthread_kill", lambda _, number: _thread.interrupt_main(number))
    old_handlers, old_hook = [signal.signal(number, handler) for number in numbers], sys.unraisablehook

    def hook(ignored: sys.UnraisableHookArgs) -> None:
        if not numbers or not issubclass(ignored.exc_type, KeyboardInterrupt):
            old_hook(ignored)
            return
        forget()
        # A signal now would be ignored again; starting a Timer waits, on a busy machine until it is over.
        _thread.start_new_thread(lambda: (time.sleep(0.01), send(threading.main_thread().ident, numbers[0])), ())

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = old_hook
        for number, old in zip(numbers, old_handlers, strict=True):
            signal.signal(number, old)
