"""Progress of the cells under measurement, counted in prompts finished by a cell, and its pace."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median_low

from .budget import Budget
from .events import (
    CellStarted,
    Event,
    GroupsFinished,
    PromptsFinished,
    PromptsSkipped,
    StepFinished,
    WarmUpStarted,
)

#: Factor of the exponential moving average of the pace, applied whenever a cell finishes prompts.
DECAY = 0.97
#: Steps of warm-ups before their pace counts: the first ones compile and allocate.
LEAST_STEPS = 3


class Progress:
    """Number of finished prompts and seconds per turn.

    Args:
        cells: number of cells to measure.
        prompts: number of prompts of each cell.
        turns: number of turns of each cell; by default one per prompt.
        clock: returns seconds; for tests.

    Attributes:
        total: number of prompts over all cells.
        done: number of finished prompts over all cells.
        measured: True if a cell has finished prompts.
        budget: time budget of the run, or None.
    """

    def __init__(
        self,
        cells: int,
        prompts: int,
        turns: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        budget: Budget | None = None,
    ):
        self.total, self.done, self.measured = cells * prompts, 0, False
        self._cells, self._prompts, self._clock, self.budget = cells, prompts, clock, budget
        self._turns_per_prompt = (prompts if turns is None else turns) / max(prompts, 1)
        self._finished = 0  # prompts of finished groups
        self._turns = self._seconds = 0.0  # moving averages of turns and their seconds
        self._started: float | None = None  # start of the current cell
        self._partial_turns = 0.0  # turns of the current cell so far
        self._in_warm_up = False
        self._warm_paces: list[float] = []  # seconds per turn of each step of a warm-up

    def __call__(self, event: Event) -> None:
        match event:
            case WarmUpStarted() | CellStarted():
                self._started, self._partial_turns = self._clock(), 0.0
                self._in_warm_up = isinstance(event, WarmUpStarted)
            case StepFinished(turns):
                self._partial_turns += turns
                if self._in_warm_up and self._started is not None:
                    now = self._clock()
                    if turns:
                        self._warm_paces.append((now - self._started) / turns)
                    self._started = now
            case PromptsFinished(prompts, turns):
                now = self._clock()
                self.done += prompts
                self._turns = DECAY * self._turns + turns
                self._seconds = DECAY * self._seconds + now - (now if self._started is None else self._started)
                self._started, self._partial_turns, self.measured = None, 0.0, True
            case PromptsSkipped(prompts):
                self.done += prompts
            case GroupsFinished(results=results):  # the prompts of failed cells count as finished
                self._finished += sum(r.prompts if r.planned else self._prompts for r in results if not r.reused)
                self.done = self._finished
            case _:
                pass

    @property
    def pace(self) -> float | None:
        """Seconds per turn of a cell: recent average, or from the steps so far; None before the first of them."""
        if self._turns:
            return self._seconds / self._turns
        if self._started is not None and not self._in_warm_up and self._partial_turns:
            return (self._clock() - self._started) / self._partial_turns
        return median_low(self._warm_paces) if len(self._warm_paces) >= LEAST_STEPS else None

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

    def budget_warning(self, pace: float) -> str:
        """Warning if the run does not fit its time budget at this pace, or empty."""
        return self.budget.warning(pace, self._cells) if self.budget else ""
