"""Time limit of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from ...errors import CrossdraftError, UsageError


class StepTimeout(CrossdraftError):
    """A step exceeded its time limit."""


class StepLimit:
    """Raise `StepTimeout` in a step that takes longer than ``seconds``; None = no limit.

    Raises:
        UsageError: a system or thread without timers.
    """

    def __init__(self, seconds: float | None):
        self.seconds = seconds
        if seconds is None:
            return
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "--step-limit needs a timer of the main thread, which is not available here; remove the option"
            )
        signal.signal(signal.SIGALRM, self._raise)

    def restart(self) -> None:
        """Restart the limit at the start of a step."""
        if self.seconds is not None:
            # Repeated, in case code of a plug-in swallows the first exception.
            signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds)

    def stop(self) -> None:
        """Stop the limit."""
        if self.seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        raise StepTimeout(f"a step exceeded the limit of {self.seconds:g} s (--step-limit)")
