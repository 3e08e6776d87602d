"""The time budget of a run: blocks of prompts, each measured by all groups, until no more of them fit.

Every group decodes a block before the next one begins, so all pairs have the same prompts whenever a table is made. The
budget is counted from when models are loaded and checked; it is no property of a cell, and enters no hash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import ceil

from ..models.placement import first_device
from ..recipe.durations import seconds_of
from ..recipe.prompts import Prompt
from .group import Group
from .progress import counted, duration

#: Seconds between two tables on a terminal.
TABLE = 20.0
#: Elsewhere: this share of the budget.
SHARE = 1 / 3
#: Shorter answers are not proposed.
LEAST_TOKENS = 8
#: Most slots of groups that stay open beside each other, on a CPU; on other devices only one group is open.
TOGETHER = 16


class Budget:
    """A duration that a run may measure for, and what fits it.

    Args:
        text: the duration as it was written.
        prompts: of the run; ``blocks``: their positions, block by block, see `blocks_of`.
        max_new_tokens: the recipe's, for advice.
        clock: seconds.

    Attributes:
        done: how many blocks all groups have finished.
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
        self._began, self._printed = clock(), None

    def left(self) -> float:
        """Seconds left; negative once it is exceeded."""
        return self._began + self.seconds - self._clock()

    def most(self, pace: float, cells: int) -> float:
        """Seconds that the run still takes at most: what is left, or what the first block takes longer."""
        first = 0.0 if self.done else pace * cells * self._turns([0])
        return self.left() + max(first - self.seconds, 0.0)

    def table_due(self, terminal: bool) -> bool:
        """Return True if a table is due: the first one at once, then at intervals. Count it as printed."""
        now, every = self._clock(), self.seconds * SHARE
        if self._printed is not None and now - self._printed < (min(every, TABLE) if terminal else every):
            return False
        self._printed: float | None = now
        return True

    def measure(self, groups: Sequence[Group], pace: Callable[[], float | None], more: Callable[[], None]) -> None:
        """Measure blocks in all groups while they fit. The first one is measured whatever it takes.

        Args:
            pace: seconds of a turn in a cell, as measured so far.
            more: called between two blocks, with `done` up to date.

        Raises:
            KeyboardInterrupt, Unwritable: as `Group.advance` does.
        """
        self._began, opening = self._clock(), 0.0
        while (until := self._next(groups, pace(), opening)) > self.done:
            if self.done:
                more()
            opening = 0.0
            for group in groups:
                _make_room(group, groups)
                before = self._clock()
                group.open(self._prompts, self._blocks)
                opening += self._clock() - before
                group.advance(until)
            self.done = min((group.blocks for group in groups if group.alive), default=len(self._blocks))

    def _next(self, groups: Sequence[Group], pace: float | None, opening: float) -> int:
        """The number of blocks to finish next; `done` if no more fit."""
        done, every = self.done, len(self._blocks)
        if not done or done == every:
            return max(done, 1)
        if pace is None:  # all of these were on disk
            return done + 1
        shared = all(group.is_open or not group.alive for group in groups)
        most = done + 1 if shared else min(2 * done, every)  # fewer visits, where each one opens the group again
        left = self.left() - (0.0 if shared else opening)
        cells, until = sum(group.alive for group in groups), done
        while until < most and (left := left - pace * cells * self._turns([until])) >= 0:
            until += 1
        return until

    def _turns(self, blocks: Iterable[int]) -> int:
        return sum(len(self._prompts[i].turns) for block in blocks for i in self._blocks[block])

    def verdict(self, pace: float, cells: int) -> str:
        """A sentence on the part of the run that fits the budget at this pace; empty if all of it does."""
        every = pace * cells * self._turns(range(len(self._blocks)))
        first = pace * cells * self._turns([0])
        if every <= self.seconds:
            return ""
        whole = f"all {counted(len(self._prompts), 'prompt')} take about {duration(every)}"
        longer = f"--time {ceil(every / 60) + 1}m" if every < 7200 else f"--time {ceil(every / 3600)}h"
        if first > self.seconds:
            block = len(self._blocks[0])
            table = (
                f"the first table ({counted(block, 'prompt')} in each of {cells} cells) takes about {duration(first)}"
            )
            cures = ["fewer drafters or verifiers", *self._fewer_tokens(first)]
            cures += ["--limit with fewer prompts"] if block > 1 else []
            sooner = f"for a sooner one: {', '.join(cures)}"
            return f"{table}, more than the time budget of {self.text}; {sooner}; {whole} ({longer})"
        fit = max(int(len(self._prompts) * self.seconds / every), 1)
        cures = ", ".join([f"--limit {fit}", *self._fewer_tokens(every)])
        fits = f"about {fit} within the time budget of {self.text}"
        return f"{whole}, {fits}; to measure all: {longer}; to plan less: {cures}"

    def _fewer_tokens(self, seconds: float) -> list[str]:
        """The setting that makes so many seconds fit, unless answers become too short to say anything."""
        tokens = int(self._max_new_tokens * self.seconds / seconds)
        return [f"--set max_new_tokens={tokens}"] if tokens >= LEAST_TOKENS else []


def _make_room(group: Group, groups: Sequence[Group]) -> None:
    """Close the other groups if their models or caches may not fit beside this one's."""
    configs = [one.configs[0] for one in groups]
    models = {(c.target, c.dtype, str(c.device), c.attn_implementation) for c in configs}
    on_cpu = first_device(configs[0].device).type == "cpu"
    if len(models) > 1 or not on_cpu or sum(c.batch_size for c in configs) > TOGETHER:
        for other in groups:
            if other is not group:
                other.close()
