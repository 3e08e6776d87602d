"""Time budget of a run: all groups measure a block of prompts before the next block starts, until no block fits.

All cells therefore have the same prompts whenever a table is printed. The budget starts after models are loaded and
checked. It is not part of a cell and does not enter its hash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import ceil

from ..models.placement import first_device
from ..recipe.durations import seconds_of
from ..recipe.prompts import Prompt
from ..recipe.recipe import CellConfig
from ..runs.labels import counted, duration

#: Seconds between two tables on a terminal.
TABLE = 20.0
#: Share of the budget between two tables if stderr is not a terminal.
SHARE = 1 / 3
#: Smallest max_new_tokens that is suggested.
LEAST_TOKENS = 8
#: Maximum total slots of the groups kept open at once on a CPU; on other devices only one group is open.
MAX_OPEN_SLOTS = 16


class Budget:
    """Time budget of a run.

    Args:
        text: the duration as written in the recipe.
        prompts: prompts of the run.
        blocks: positions of the prompts of each block, see `blocks_of`.
        max_new_tokens: value of the recipe, for suggestions.
        clock: returns seconds.

    Attributes:
        done: number of blocks finished by all groups.
    """

    def __init__(
        self,
        text: str,
        prompts: Sequence[Prompt],
        blocks: Sequence[Sequence[int]],
        max_new_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.text, self.seconds, self.done = text, seconds_of(text), 0
        self._prompts, self._blocks, self._max_new_tokens, self._clock = prompts, blocks, max_new_tokens, clock
        self._start, self._printed = clock(), None

    def left(self) -> float:
        """Seconds left; negative if the budget is exceeded."""
        return self._start + self.seconds - self._clock()

    def max_remaining(self, pace: float, cells: int) -> float:
        """Maximum seconds that the run still takes: the budget left, or more if the first block exceeds it."""
        first = 0.0 if self.done else pace * cells * self._turns([0])
        return self.left() + max(first - self.seconds, 0.0)

    def table_due(self, terminal: bool) -> bool:
        """Return True if a table is due, and restart the interval. The first table is due immediately."""
        now, interval = self._clock(), self.seconds * SHARE
        if self._printed is not None and now - self._printed < (min(interval, TABLE) if terminal else interval):
            return False
        self._printed: float | None = now
        return True

    def restart(self) -> None:
        """Start the budget now."""
        self._start = self._clock()

    def next(self, cells: int, pace: float | None, opening: float, all_open: bool) -> int:
        """Number of blocks to finish next; `done` if no more fit. The first block is always measured.

        Args:
            cells: number of cells that have not failed.
            pace: seconds per turn of a cell measured so far, or None.
            opening: seconds that opening the groups took the last time.
            all_open: True if all groups are open, so that no time is lost by alternating between them.
        """
        done, total = self.done, len(self._blocks)
        if not done or done == total:
            return max(done, 1)
        if pace is None:  # all blocks so far were read from disk
            return done + 1
        max_until, until = done + 1 if all_open else min(2 * done, total), done
        seconds_left = self.left() - (0.0 if all_open else opening)
        while until < max_until and (seconds_left := seconds_left - pace * cells * self._turns([until])) >= 0:
            until += 1
        return until

    def _turns(self, blocks: Iterable[int]) -> int:
        return sum(len(self._prompts[i].turns) for block in blocks for i in self._blocks[block])

    def warning(self, pace: float, cells: int) -> str:
        """Warning if the run does not fit the budget at this pace, with suggestions; empty if it fits."""
        total = pace * cells * self._turns(range(len(self._blocks)))
        first_block = pace * cells * self._turns([0])
        if total <= self.seconds:
            return ""
        everything = f"all {counted(len(self._prompts), 'prompt')} take about {duration(total)}"
        longer_budget = f"--time {ceil(total / 60) + 1}m" if total < 7200 else f"--time {ceil(total / 3600)}h"
        if first_block > self.seconds:
            block = len(self._blocks[0])
            size = f"{counted(block, 'prompt')} in each of {cells} cells"
            table = f"the first tables ({size}) take about {duration(first_block)}"
            options = ["fewer drafters or verifiers", *self._fewer_tokens(first_block)]
            options += ["--limit with fewer prompts"] if block > 1 else []
            hint = f"to get it sooner: {', '.join(options)}"
            return f"{table}, more than the time budget of {self.text}; {hint}; {everything} ({longer_budget})"
        affordable = max(int(len(self._prompts) * self.seconds / total), 1)
        options = ", ".join([f"--limit {affordable}", *self._fewer_tokens(total)])
        share = f"about {affordable} within the time budget of {self.text}"
        return f"{everything}, {share}; to measure all: {longer_budget}; to plan less: {options}"

    def _fewer_tokens(self, seconds: float) -> list[str]:
        """Suggested --set option that makes ``seconds`` fit, unless responses become shorter than `LEAST_TOKENS`."""
        tokens = int(self._max_new_tokens * self.seconds / seconds)
        return [f"--set max_new_tokens={tokens}"] if tokens >= LEAST_TOKENS else []


def fit_memory(configs: Sequence[CellConfig]) -> bool:
    """Return True if several groups with these settings may be open at once, with their models and caches."""
    if any(c.engine is not None for c in configs):  # servers of engines hold the memory of the device
        return False
    models = {(c.target, c.dtype, str(c.device), c.attn_implementation) for c in configs}
    on_cpu = first_device(configs[0].device).type == "cpu"
    return len(models) == 1 and on_cpu and sum(c.batch_size for c in configs) <= MAX_OPEN_SLOTS
