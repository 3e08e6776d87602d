"""Ending a run from outside: Ctrl-C, SIGTERM and a round that takes too long."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from ..contracts.errors import CrossdraftError, UsageError

#: What ends a run like Ctrl-C, where the system has it.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupts:
    """While it is entered, the first signal raises KeyboardInterrupt, the second is told to wait (a summary is being
    written), the third raises again.

    A KeyboardInterrupt that a plug-in raises by itself is no signal: `asked` tells them apart.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[Any, Any] = {}

    def __enter__(self) -> Interrupts:
        global _active
        if threading.current_thread() is threading.main_thread():
            # What is ignored stays ignored: a run under nohup outlives its terminal.
            wanted = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in wanted}
            _active = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        global _active
        for number, handler in self._before.items():
            signal.signal(number, handler)
        _active = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 2:
            print("crossdraft: writing what there is; once more ends at once", file=sys.stderr, flush=True)
        else:
            raise KeyboardInterrupt


_active: Interrupts | None = None


def asked() -> bool:
    """Does a KeyboardInterrupt come from the user? Without an `Interrupts` around, it does."""
    return _active is None or _active.count > 0


class RoundTimeout(CrossdraftError):
    """A round took longer than it may."""


class RoundLimit:
    """Ends a round that takes longer than ``seconds``; None = no limit.

    Raises:
        UsageError: this system, or this thread, has no timer that could.
    """

    def __init__(self, seconds: float | None):
        self.seconds = seconds
        if seconds is None:
            return
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            raise UsageError("a limit for a round needs a timer of the main thread, which there is none of here")
        if not 0 < seconds < 1e6:
            raise UsageError(f"the limit for a round must be a number of seconds above 0, not {seconds:g}")
        signal.signal(signal.SIGALRM, self._over)

    def restart(self) -> None:
        """A round begins."""
        if self.seconds is not None:
            # Again and again: code that swallows the first one is told once more.
            signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds)

    def stop(self) -> None:
        """No round is running."""
        if self.seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _over(self, number: int, frame: FrameType | None) -> None:
        raise RoundTimeout(f"a round took longer than {self.seconds:g} s, the limit (--round-limit)")
