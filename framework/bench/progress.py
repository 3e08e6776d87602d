"""Progress of a run: messages, a bar on a terminal, otherwise a line a minute, and estimates of the remaining time.

Progress is counted in prompts finished by a cell. It is printed after each piece of prompts; only the first estimate of
a slow run comes earlier, from the timings of the steps so far.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from tqdm import tqdm

from ..api.cell_runner import CellRunner
from ..runs.labels import counted, duration, pair_title
from ..runs.records import CellResult
from .budget import Budget
from .plan import PlannedGroup

#: Factor of the exponential moving average of the pace, applied whenever a cell finishes prompts.
DECAY = 0.97
#: Seconds between two lines without a bar.
LINE = 60.0
#: Seconds after which the first estimate is printed even if no piece of prompts is finished.
FIRST = 30.0
#: Factor by which the pace must change for a new estimate.
CHANGED = 1.5
_BAR = "{percentage:3.0f} %|{bar}| {n_fmt}/{total_fmt} prompts{postfix}"


class Progress:
    """Number of finished prompts, seconds per turn, and their display.

    Args:
        cells: number of cells to measure.
        prompts: number of prompts of each cell.
        turns: number of turns of each cell.
        message: receives the lines.
        bar: show a bar on stderr if it is a terminal.
        clock: returns seconds; for tests.
        budget: time budget of the run, or None.

    Attributes:
        total, done: number of prompts over all cells, and of finished ones.
        bar: the bar; to be closed at the end.
    """

    def __init__(
        self,
        cells: int,
        prompts: int,
        turns: int,
        message: Callable[[str], None],
        *,
        bar: bool = False,
        clock: Callable[[], float] = time.monotonic,
        budget: Budget | None = None,
    ):
        self.total, self.done, self.budget = cells * prompts, 0, budget
        self._cells, self._prompts, self._message, self._clock = cells, prompts, message, clock
        self._turns_per_prompt = turns / max(prompts, 1)
        self._finished = 0  # prompts of finished groups
        self._turns = self._seconds = 0.0  # moving averages of turns and their seconds
        self._runner: CellRunner | None = None
        self._begin = self._started = self._last_line = clock()
        self._current = ""  # title of the current cell
        self._last_pace: float | None = None  # pace of the last estimate
        self._last_estimate = 0.0  # time of the last estimate
        # None: tqdm disables the bar unless stderr is a terminal.
        off, total, (columns, rows) = None if bar else True, self.total, _screen()
        self.bar = tqdm(total=total, miniters=1, leave=False, disable=off, ncols=columns, nrows=rows, bar_format=_BAR)

    # -- what happens ---------------------------------------------------------------------------------------

    def message(self, line: str) -> None:
        """Print a line above the bar."""
        self._last_line = self._clock()
        with tqdm.external_write_mode():
            self._message(line)

    def start_group(self, group: PlannedGroup) -> None:
        action = f"{'reusing' if group.stored else 'running'} {counted(len(group.cells), 'cell')}"
        self.message(f"{group.title}: {action}{f', {group.reason}' if group.reason else ''}")

    def start_cell(self, cell: CellResult, runner: CellRunner) -> None:
        """Start the warm-up or a piece of a cell."""
        pair = "plain decoding" if cell.config.is_baseline else pair_title(cell)
        self._runner, self._started = runner, self._clock()
        self._current = f"{pair}, batch size {cell.config.batch_size}"
        self._show()

    def finish_cell(self, prompts: int, turns: int) -> None:
        """Count the prompts of a piece that a cell has finished."""
        self.done += prompts
        self._turns = DECAY * self._turns + turns
        self._seconds = DECAY * self._seconds + self._clock() - self._started
        self._show()
        if self.bar.disable and self._clock() - self._last_line >= LINE:
            self.message(f"{100 * self.share:.0f} %: {self._current}; {self._left()}")

    def finish_piece(self) -> None:
        """Print the first estimate, or a new one if the pace has changed."""
        pace = self.pace
        if pace is None or not self._turns:
            return
        if self._last_pace is None:
            self._estimate(pace, "estimated from the first piece of prompts")
        elif self._clock() - self._last_estimate >= LINE and not 1 / CHANGED <= pace / self._last_pace <= CHANGED:
            faster = pace < self._last_pace
            factor = self._last_pace / pace if faster else pace / self._last_pace
            reason = f"steps are {factor:.1f} times as {'fast' if faster else 'slow'} as at the last estimate"
            self._estimate(pace, reason)

    def skip(self, prompts: int) -> None:
        """Count prompts, over all cells, whose pieces were read from disk."""
        self.done += prompts
        self._show()

    def finish_groups(self, results: Sequence[CellResult]) -> None:
        """Count the prompts of groups; those of failed cells count as finished."""
        self._finished += sum(r.prompts if r.planned else self._prompts for r in results if not r.reused)
        self.done = self._finished
        self._show()

    # -- numbers ----------------------------------------------------------------------------------------------

    @property
    def pace(self) -> float | None:
        """Seconds per turn of a cell: recent average, or from the steps so far; None before the first of them."""
        if self._turns:
            return self._seconds / self._turns
        return self._runner.pace if self._runner is not None else None

    @property
    def left(self) -> float | None:
        """Estimated remaining seconds, bounded by the time budget; None before the first step."""
        pace = self.pace
        if pace is None:
            return None
        estimate = max(self.total - self.done, 0) * self._turns_per_prompt * pace
        limit = self.budget.max_remaining(pace, self._cells) if self.budget else 0.0
        return min(estimate, limit) if limit > 0 else estimate

    @property
    def share(self) -> float:
        """Finished share, from 0 to 1."""
        return min(self.done / self.total, 1.0) if self.total else 1.0

    # -- display ----------------------------------------------------------------------------------------------

    def estimate_early(self) -> None:
        """Print an estimate from the first steps if none was printed for `FIRST` seconds; called before every step."""
        if self._last_pace is None and self._clock() - self._begin >= FIRST and (pace := self.pace) is not None:
            self._estimate(pace, "estimated from the first steps")

    def _estimate(self, pace: float, reason: str) -> None:
        """Print the remaining time, or the warning about the time budget."""
        if not pace or not self._left():
            return
        self._last_pace, self._last_estimate = pace, self._clock()
        text = self.budget.warning(pace, self._cells) if self.budget else ""
        self.message(f"{text} ({reason})" if text else f"{self._left()}, {reason}")

    def _left(self) -> str:
        seconds = self.left
        return "" if not seconds else f"about {duration(seconds)} left"

    def _show(self) -> None:
        if self.bar.disable:
            return
        self.bar.n = min(self.done, self.total)
        self.bar.set_postfix_str(", ".join(text for text in (self._left(), self._current) if text), refresh=False)
        self.bar.refresh()


def _screen() -> tuple[int, int]:
    """Columns and rows of the terminal on stderr; defaults if it does not report them."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return 100, 24
    return (size.columns or 101) - 1, size.lines or 24
