"""Progress of a run: a bar on a terminal, otherwise a line a minute, and estimates of the remaining time.

Printed after each piece of prompts, without a thread; the first estimate of a slow run is printed between two steps.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from tqdm import tqdm

from ..recipe.recipe import CellConfig
from ..runs.labels import verifier_title

#: Seconds between two lines without a bar.
LINE = 60.0
#: Seconds after which the first estimate is printed even if no piece of prompts is finished.
FIRST = 30.0
#: Factor by which the pace must change for a new estimate.
CHANGED = 1.5
#: Factor of the exponential moving average of the pace, applied whenever a cell finishes prompts.
DECAY = 0.97
_BAR = "{percentage:3.0f} %|{bar}| {n_fmt}/{total_fmt} prompts{postfix}"


class Meter:
    """Progress of the cells under measurement, counted in prompts finished by a cell.

    Args:
        total: number of prompts over all cells.
        log: receives the lines.
        bar: show a bar on stderr if it is a terminal.
        on_progress: called with the finished share, from 0 to 1, whenever it grows.
        clock: returns seconds; for tests.
        turns: number of turns of all prompts; by default one each.
        max_remaining: for a time budget: maximum remaining seconds of the run, given the seconds per turn.
        budget_warning: for a time budget: warning if the run does not fit, given the seconds per turn, or empty.
    """

    def __init__(
        self,
        total: int,
        log: Callable[[str], None],
        bar: bool = False,
        on_progress: Callable[[float], None] = lambda share: None,
        clock: Callable[[], float] = time.monotonic,
        turns: int | None = None,
        max_remaining: Callable[[float], float] = lambda pace: math.inf,
        budget_warning: Callable[[float], str] = lambda pace: "",
    ):
        self._total, self._log, self._on_progress, self._clock = total, log, on_progress, clock
        self._turns_per_prompt = (turns if turns is not None else total) / max(total, 1)
        self._max_remaining, self._budget_warning = max_remaining, budget_warning
        self._done = 0
        self._turns = self._seconds = 0.0  # moving averages of turns and their seconds
        self._started: float | None = None  # start of the current cell
        self._partial_turns = 0.0  # turns of the current cell so far
        self._in_warm_up = False
        self._warm_turns, self._warm_seconds = 0.0, 0.0
        self._first, self._last_line = clock(), clock()
        self._last_pace: float | None = None  # pace of the last estimate
        self._last_estimate = 0.0  # time of the last estimate
        self._current = ""
        # None: tqdm disables the bar unless stderr is a terminal.
        off = None if bar else True
        columns, rows = _screen()
        self._bar = tqdm(total=total, miniters=1, leave=False, disable=off, ncols=columns, nrows=rows, bar_format=_BAR)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._bar.close()

    def log(self, line: str) -> None:
        """Print a line above the bar."""
        with self.hidden_bar():
            self._log(line)

    def hidden_bar(self) -> AbstractContextManager[Any]:
        """Hide the bar while other output is printed."""
        return tqdm.external_write_mode()

    def warm_up_started(self) -> None:
        self._started, self._partial_turns, self._in_warm_up = self._clock(), 0.0, True

    def cell_started(self, config: CellConfig) -> None:
        self._started, self._partial_turns, self._in_warm_up = self._clock(), 0.0, False
        pair = "plain decoding" if config.is_baseline else f"{config.drafter.title} × {verifier_title(config)}"
        self._current = f"{pair}, batch size {config.batch_size}"
        self._show()

    def step_finished(self, turns: float) -> None:
        self._partial_turns += turns
        now = self._clock()
        if self._in_warm_up and self._started is not None:
            self._warm_seconds += now - self._started
            self._warm_turns += turns
            self._started = now
        if self._last_pace is None and now - self._first >= FIRST:
            self._estimate("estimated from the first steps")

    def prompts_skipped(self, prompts: int) -> None:
        self._done += prompts
        self._show()

    def prompts_finished(self, prompts: int, turns: int | None = None) -> None:
        now = self._clock()
        self._done += prompts
        self._turns = DECAY * self._turns + (prompts if turns is None else turns)
        self._seconds = DECAY * self._seconds + now - (now if self._started is None else self._started)
        self._started, self._partial_turns = None, 0.0
        self._show()
        if self._bar.disable and self._clock() - self._last_line >= LINE:
            self._line(f"{100 * self.share:.0f} %: {self._current}; {self._left()}")
        self._on_progress(self.share)

    def piece_finished(self, number: int, pieces: int) -> None:
        """Print the first estimate, or a new one if the pace has changed."""
        pace = self.pace
        if pace is None or not self._turns:
            return
        if self._last_pace is None:
            self._estimate("estimated from the first piece of prompts")
        elif self._clock() - self._last_estimate >= LINE and not 1 / CHANGED <= pace / self._last_pace <= CHANGED:
            faster = pace < self._last_pace
            factor = self._last_pace / pace if faster else pace / self._last_pace
            self._estimate(f"steps are {factor:.1f} times as {'fast' if faster else 'slow'} as at the last estimate")

    def _estimate(self, reason: str) -> None:
        """Print the remaining time, or the warning about the time budget."""
        pace = self.pace
        if not pace or not self._left():
            return
        self._last_pace, self._last_estimate = pace, self._clock()
        text = self._budget_warning(pace)
        self._line(f"{text} ({reason})" if text else f"{self._left()}, {reason}")

    def group_finished(self, done: int) -> None:
        """Set the number of prompts done since the start of the run; those of failed cells count as done."""
        self._done = done
        self._show()
        self._on_progress(self.share)

    @property
    def pace(self) -> float | None:
        """Seconds per turn of a cell: recent average, or from the steps so far; None before the first step."""
        turns, seconds = self._turns, self._seconds
        if not turns and self._started is not None and not self._in_warm_up and self._partial_turns:
            turns, seconds = self._partial_turns, self._clock() - self._started
        elif not turns:
            turns, seconds = self._warm_turns, self._warm_seconds
        return seconds / turns if turns else None

    @property
    def left(self) -> float | None:
        """Estimated remaining seconds, bounded by the time budget; None before the first step."""
        pace = self.pace
        if pace is None:
            return None
        estimate = max(self._total - self._done, 0) * self._turns_per_prompt * pace
        limit = self._max_remaining(pace)
        return min(estimate, limit) if limit > 0 else estimate

    @property
    def share(self) -> float:
        """Finished share, from 0 to 1."""
        return min(self._done / self._total, 1.0) if self._total else 1.0

    def _left(self) -> str:
        seconds = self.left
        return "" if not seconds else f"about {duration(seconds)} left"

    def _line(self, line: str) -> None:
        self._last_line = self._clock()
        self.log(line)

    def _show(self) -> None:
        if self._bar.disable:
            return
        self._bar.n = min(self._done, self._total)
        self._bar.set_postfix_str(", ".join(text for text in (self._left(), self._current) if text), refresh=False)
        self._bar.refresh()


def _screen() -> tuple[int, int]:
    """Columns and rows of the terminal on stderr; defaults if it does not report them."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return 100, 24
    return (size.columns or 101) - 1, size.lines or 24


def counted(n: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format seconds with two significant units or digits."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.0f} days"
