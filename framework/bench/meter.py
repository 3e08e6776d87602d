"""Display of a run's progress: a bar on a terminal, otherwise a line a minute, and estimates of the remaining time.

Printed after each piece of prompts, without a thread; the first estimate of a slow run is printed between two steps.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tqdm import tqdm

from ..runs.labels import counted, duration, verifier_title
from .events import (
    CellFailed,
    CellStarted,
    Event,
    GroupsFinished,
    GroupStarted,
    Message,
    PieceFinished,
    PromptsFinished,
    PromptsSkipped,
    StepFinished,
)
from .progress import Progress

#: Seconds between two lines without a bar.
LINE = 60.0
#: Seconds after which the first estimate is printed even if no piece of prompts is finished.
FIRST = 30.0
#: Factor by which the pace must change for a new estimate.
CHANGED = 1.5
_BAR = "{percentage:3.0f} %|{bar}| {n_fmt}/{total_fmt} prompts{postfix}"


class Meter:
    """Display of the progress and of the messages of a run.

    Args:
        progress: receives the events before this display.
        log: receives the lines.
        bar: show a bar on stderr if it is a terminal.
        clock: returns seconds; for tests.
        debug: log the tracebacks of failed cells.
    """

    def __init__(
        self,
        progress: Progress,
        log: Callable[[str], None],
        bar: bool = False,
        clock: Callable[[], float] = time.monotonic,
        debug: bool = False,
    ):
        self._progress, self._log, self._clock, self._debug = progress, log, clock, debug
        self._first, self._last_line = clock(), clock()
        self._last_pace: float | None = None  # pace of the last estimate
        self._last_estimate = 0.0  # time of the last estimate
        self._current = ""
        # None: tqdm disables the bar unless stderr is a terminal.
        off, total, (columns, rows) = None if bar else True, progress.total, _screen()
        self._bar = tqdm(total=total, miniters=1, leave=False, disable=off, ncols=columns, nrows=rows, bar_format=_BAR)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, event: Event) -> None:
        match event:
            case GroupStarted(group):
                action = f"{'reusing' if group.stored else 'running'} {counted(len(group.cells), 'cell')}"
                self._print(f"{group.title}: {action}{f', {group.reason}' if group.reason else ''}")
            case CellStarted(config):
                pair = "plain decoding" if config.is_baseline else f"{config.drafter.title} × {verifier_title(config)}"
                self._current = f"{pair}, batch size {config.batch_size}"
                self._show()
            case StepFinished():
                if self._last_pace is None and self._clock() - self._first >= FIRST:
                    self._estimate("estimated from the first steps")
            case PromptsFinished():
                self._show()
                if self._bar.disable and self._clock() - self._last_line >= LINE:
                    self._line(f"{100 * self._progress.share:.0f} %: {self._current}; {self._left()}")
            case PieceFinished():
                self._update_estimate()
            case CellFailed(result):
                pair = f"{result.config.drafter.title} × {verifier_title(result.config)}"
                self._print(f"failed: {pair}: {result.error}")
                if self._debug:
                    self._print(result.traceback.rstrip())
            case Message(text):
                self._print(text)
            case PromptsSkipped() | GroupsFinished():
                self._show()
            case _:
                pass

    def _print(self, line: str) -> None:
        """Print a line above the bar."""
        with hidden_bar():
            self._log(line)

    def _update_estimate(self) -> None:
        """Print the first estimate, or a new one if the pace has changed."""
        pace = self._progress.pace
        if pace is None or not self._progress.measured:
            return
        if self._last_pace is None:
            self._estimate("estimated from the first piece of prompts")
        elif self._clock() - self._last_estimate >= LINE and not 1 / CHANGED <= pace / self._last_pace <= CHANGED:
            faster = pace < self._last_pace
            factor = self._last_pace / pace if faster else pace / self._last_pace
            self._estimate(f"steps are {factor:.1f} times as {'fast' if faster else 'slow'} as at the last estimate")

    def _estimate(self, reason: str) -> None:
        """Print the remaining time, or the warning about the time budget."""
        pace = self._progress.pace
        if not pace or not self._left():
            return
        self._last_pace, self._last_estimate = pace, self._clock()
        text = self._progress.budget_warning(pace)
        self._line(f"{text} ({reason})" if text else f"{self._left()}, {reason}")

    def _left(self) -> str:
        seconds = self._progress.left
        return "" if not seconds else f"about {duration(seconds)} left"

    def _line(self, line: str) -> None:
        self._last_line = self._clock()
        self._print(line)

    def _show(self) -> None:
        if self._bar.disable:
            return
        self._bar.n = min(self._progress.done, self._progress.total)
        self._bar.set_postfix_str(", ".join(text for text in (self._left(), self._current) if text), refresh=False)
        self._bar.refresh()


def hidden_bar() -> AbstractContextManager[Any]:
    """Hide the bar while other output is printed."""
    return tqdm.external_write_mode()


def _screen() -> tuple[int, int]:
    """Columns and rows of the terminal on stderr; defaults if it does not report them."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return 100, 24
    return (size.columns or 101) - 1, size.lines or 24
