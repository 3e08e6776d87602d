"""What a run tells while it measures: a bar on a terminal, a line a minute elsewhere, and how long it will take.

It is printed between pieces of work, without a thread; the first estimate of a slow run is printed between two steps.
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

#: Seconds between two lines where there is no bar.
LINE = 60.0
#: Seconds after which the first estimate is due, if no piece of prompts was finished before.
FIRST = 30.0
#: A new estimate is printed where the pace differs from the last one's by this factor.
CHANGED = 1.5
#: What a turn counts for the pace when another one is finished: the last few dozen decide.
DECAY = 0.97
_BAR = "{percentage:3.0f} %|{bar}| {n_fmt}/{total_fmt} prompts{postfix}"


class Meter:
    """How far the cells are that have to be measured, in prompts answered by a cell.

    Args:
        total: prompts of all these cells.
        say: where lines go.
        bar: show a bar on standard error, if it is a terminal.
        beat: told the share that is done, from 0 to 1, whenever it grows.
        clock: seconds, for tests.
        turns: turns of all these prompts; by default one each.
        most: seconds that the run may still take, given the seconds of a turn, if it has a time budget.
        judge: a sentence about the time budget, given the seconds of a turn; empty if everything fits.
    """

    def __init__(
        self,
        total: int,
        say: Callable[[str], None],
        bar: bool = False,
        beat: Callable[[float], None] = lambda share: None,
        clock: Callable[[], float] = time.monotonic,
        turns: int | None = None,
        most: Callable[[float], float] = lambda pace: math.inf,
        judge: Callable[[float], str] = lambda pace: "",
    ):
        self._total, self._say, self._beat, self._clock = total, say, beat, clock
        self._each = (turns if turns is not None else total) / max(total, 1)  # turns of a prompt
        self._most, self._judge = most, judge
        self._done = 0
        self._timed = self._seconds = 0.0  # turns that were measured, and what they took
        self._since: float | None = None  # when the cell at work began
        self._under_way = 0.0  # turns of it, so far
        self._warming = False
        self._warmed, self._warm_seconds = 0.0, 0.0
        self._first, self._said = clock(), clock()
        self._announced: float | None = None  # the pace of the last estimate
        self._estimated = 0.0  # when that was printed
        self._at = ""
        # None: no bar unless standard error is a terminal.
        off = None if bar else True
        columns, rows = _screen()
        self._bar = tqdm(total=total, miniters=1, leave=False, disable=off, ncols=columns, nrows=rows, bar_format=_BAR)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._bar.close()

    def say(self, line: str) -> None:
        """A line, above the bar."""
        with self.aside():
            self._say(line)

    def aside(self) -> AbstractContextManager[Any]:
        """While it is entered, the bar leaves room for what others print."""
        return tqdm.external_write_mode()

    def warming(self) -> None:
        """A cell is warmed up now."""
        self._since, self._under_way, self._warming = self._clock(), 0.0, True

    def at(self, config: CellConfig) -> None:
        """The cell that works now."""
        self._since, self._under_way, self._warming = self._clock(), 0.0, False
        pair = "plain decoding" if config.is_baseline else f"{config.drafter.title} × {verifier_title(config)}"
        self._at = f"{pair}, batch size {config.batch_size}"
        self._show()

    def step(self, turns: float) -> None:
        """A step is over, which made so many turns, if every row emits one token."""
        self._under_way += turns
        now = self._clock()
        if self._warming and self._since is not None:
            self._warm_seconds += now - self._since
            self._warmed += turns
            self._since = now
        if self._announced is None and now - self._first >= FIRST:
            self._estimate("judging by the first steps")

    def skip(self, prompts: int) -> None:
        """So many are done already: their time is not known."""
        self._done += prompts
        self._show()

    def advance(self, prompts: int, turns: int | None = None) -> None:
        """A cell has answered so many, of so many turns."""
        now = self._clock()
        self._done += prompts
        self._timed = DECAY * self._timed + (prompts if turns is None else turns)
        self._seconds = DECAY * self._seconds + now - (now if self._since is None else self._since)
        self._since, self._under_way = None, 0.0
        self._show()
        if self._bar.disable and self._clock() - self._said >= LINE:
            self._line(f"{100 * self.share:.0f} %: {self._at}; {self._left()}")
        self._beat(self.share)

    def piece(self, number: int, pieces: int) -> None:
        """A piece is finished by all cells of its group. After the first one it is known how long the run takes."""
        pace = self.pace
        if pace is None or not self._timed:
            return
        if self._announced is None:
            self._estimate("judging by the first piece of prompts")
        elif self._clock() - self._estimated >= LINE and not 1 / CHANGED <= pace / self._announced <= CHANGED:
            faster = pace < self._announced
            factor = self._announced / pace if faster else pace / self._announced
            self._estimate(f"steps are {factor:.1f} times as {'fast' if faster else 'slow'} as at the last estimate")

    def _estimate(self, why: str) -> None:
        """Print how long the rest takes, and what of it fits the time budget."""
        pace = self.pace
        if not pace or not self._left():
            return
        self._announced, self._estimated = pace, self._clock()
        text = self._judge(pace)
        self._line(f"{text} ({why})" if text else f"{self._left()}, {why}")

    def settle(self, done: int) -> None:
        """A group is over: so many prompts are done since the beginning, cells that failed included."""
        self._done = done
        self._show()
        self._beat(self.share)

    @property
    def pace(self) -> float | None:
        """Seconds of a turn in a cell, of the last ones; while there is none, of the steps so far."""
        turns, seconds = self._timed, self._seconds
        if not turns and self._since is not None and not self._warming and self._under_way:
            turns, seconds = self._under_way, self._clock() - self._since
        elif not turns:
            turns, seconds = self._warmed, self._warm_seconds
        return seconds / turns if turns else None

    @property
    def left(self) -> float | None:
        """Seconds that the rest will take at this pace, or that the time budget has left; None before any step."""
        pace = self.pace
        if pace is None:
            return None
        rest = max(self._total - self._done, 0) * self._each * pace
        most = self._most(pace)
        return min(rest, most) if most > 0 else rest

    @property
    def share(self) -> float:
        """What is done, from 0 to 1."""
        return min(self._done / self._total, 1.0) if self._total else 1.0

    def _left(self) -> str:
        left = self.left
        return "" if not left else f"about {duration(left)} left"

    def _line(self, line: str) -> None:
        self._said = self._clock()
        self.say(line)

    def _show(self) -> None:
        if self._bar.disable:
            return
        self._bar.n = min(self._done, self._total)
        self._bar.set_postfix_str(", ".join(text for text in (self._left(), self._at) if text), refresh=False)
        self._bar.refresh()


def _screen() -> tuple[int, int]:
    """Columns and rows of the terminal that standard error is; some do not know, and say 0."""
    try:
        found = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return 100, 24
    return (found.columns or 101) - 1, found.lines or 24


def counted(n: int, what: str) -> str:
    """A number with its noun, in the plural unless it is one."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds as people say them, to two places."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.0f} days"
