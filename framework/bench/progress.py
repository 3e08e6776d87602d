"""What a run tells while it measures: a bar on a terminal, a line a minute elsewhere, and how long it will take.

All of it is told between pieces of work, never while a clock runs, and without a thread.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

from ..runs.recipe import CellConfig
from ..runs.titles import verifier_title

#: Seconds between two lines where there is no bar.
LINE = 60.0
_BAR = "{percentage:3.0f} %|{bar}| {n_fmt}/{total_fmt} prompts{postfix}"


class Meter:
    """How far the cells are that have to be measured, in prompts answered by a cell.

    Args:
        total: prompts of all these cells.
        say: where lines go.
        bar: show a bar on standard error, if it is a terminal.
        beat: told the share that is done, from 0 to 1, whenever it grows.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        total: int,
        say: Callable[[str], None],
        bar: bool = False,
        beat: Callable[[float], None] = lambda share: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._say, self._beat, self._clock = total, say, beat, clock
        self._done = self._timed = 0
        self._began: float | None = None
        self._told, self._said = False, clock()
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
        with tqdm.external_write_mode():
            self._say(line)

    def at(self, config: CellConfig) -> None:
        """The cell that works now."""
        if self._began is None:
            self._began = self._clock()
        pair = "plain decoding" if config.is_baseline else f"{config.drafter.title} × {verifier_title(config)}"
        self._at = f"{pair}, batch size {config.batch_size}"
        self._show()

    def skip(self, prompts: int) -> None:
        """So many are done already: their time is not known."""
        self._done += prompts
        self._show()

    def advance(self, prompts: int) -> None:
        """A cell has answered so many."""
        self._done += prompts
        self._timed += prompts
        self._show()
        if self._bar.disable and self._clock() - self._said >= LINE:
            self._line(f"{100 * self.share:.0f} %: {self._at}; {self._left()}")
        self._beat(self.share)

    def piece(self, number: int, pieces: int) -> None:
        """A piece is finished by all cells of its group. After the first one it is known how long the run takes."""
        if not self._told and self._timed and self.left is not None and self.left > 0:
            self._told = True
            self._line(f"{self._left()}, judging by the first piece of prompts")

    def settle(self, done: int) -> None:
        """A group is over: so many prompts are done since the beginning, cells that failed included."""
        self._done = done
        self._show()
        self._beat(self.share)

    @property
    def left(self) -> float | None:
        """Seconds that the rest will take at the pace so far; None before anything was measured."""
        if self._began is None or not self._timed:
            return None
        return (self._clock() - self._began) / self._timed * max(self._total - self._done, 0)

    @property
    def share(self) -> float:
        """What is done, from 0 to 1."""
        return min(self._done / self._total, 1.0) if self._total else 1.0

    def _left(self) -> str:
        left = self.left
        return "" if left is None else f"about {duration(left)} left"

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


def duration(seconds: float) -> str:
    """Seconds as people say them, to two places."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.0f} days"
