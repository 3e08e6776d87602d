"""Ending a step that takes too long."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from ..errors import CrossdraftError, UsageError


class StepTimeout(CrossdraftError):
    """A step took longer than it may."""


class StepLimit:
    """Ends a step that takes longer than ``seconds``; None = no limit.

    Raises:
        UsageError: this system, or this thread, has no timer that could.
    """

    def __init__(self, seconds: float | None):
        self.seconds = seconds
        if seconds is None:
            return
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            raise UsageError("a limit for a step needs a timer of the main thread, which there is none of here")
        if not 0 < seconds < 1e6:
            raise UsageError(f"the limit for a step must be a number of seconds above 0, not {seconds:g}")
        signal.signal(signal.SIGALRM, self._over)

    def restart(self) -> None:
        """A step begins."""
        if self.seconds is not None:
            # Again and again: code that swallows the first one is told once more.
            signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds)

    def stop(self) -> None:
        """No step is running."""
        if self.seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _over(self, number: int, frame: FrameType | None) -> None:
        raise StepTimeout(f"a step took longer than {self.seconds:g} s, the limit (--step-limit)")
