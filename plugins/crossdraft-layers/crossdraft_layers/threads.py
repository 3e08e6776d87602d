"""Number of CPU threads for decoding, and the OpenMP wait policy.

OpenMP threads synchronise after every matrix product. By default they spin for milliseconds until all have arrived;
beside a busy program they spin for a thread without a core. Two remedies: passive waiting (`choose_wait_policy`), which
OpenMP reads once, when PyTorch is loaded; and fewer threads (`ComparedThreads`), which can change at any time.

User settings are never changed: the environment variables in `NUMBER` and `POLICY`, and a number set by
`torch.set_num_threads` that differs from the numbers of cores and hardware threads.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from crossdraft.framework.models import distributed
from crossdraft.framework.models.device import lines_of
from crossdraft.framework.runs.threads import CHOSEN, DISTURBED, NUMBER, POLICY, restored, set_threads
from crossdraft.framework.util.contention import CpuWait

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Settings of passive waiting, of OpenMP and of libgomp.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
#: Minimum speed-up of a step with fewer threads.
GAIN = 1.15
#: Pairs of steps that another number must win to be kept, before it loses more than `LOSSES`.
WINS, LOSSES = 7, 1
#: Seconds between reads of the wait counters.
INTERVAL = 0.25
#: Minimum and maximum seconds between comparisons; they double with every comparison that changes nothing.
PATIENCE, MAX_PATIENCE = 5.0, 120.0


# -- the wait policy -----------------------------------------------------------------------------------------------


def choose_wait_policy(read: Callable[[], list[str]] = lambda: lines_of("/proc/stat"), seconds: float = 0.2) -> None:
    """Set OpenMP's wait policy to passive if other programs currently use this process's processors.

    Must be called before PyTorch is loaded. Does nothing after that, if a variable of `NUMBER` or `POLICY` is set, and
    on systems that do not report processor load.
    """
    if CHOSEN in os.environ:  # an outdated choice of the parent process
        for name in (CHOSEN, *PASSIVE):
            os.environ.pop(name, None)
    if "torch" in sys.modules or distributed.count() > 1 or any(name in os.environ for name in NUMBER + POLICY):
        return
    processors = _processors()
    previous = read()
    time.sleep(seconds)
    free = free_processors(previous, read(), processors)
    if free is None:
        return
    os.environ[CHOSEN] = f"{free:.1f}"
    if free < len(processors) - 0.5:
        os.environ.update(PASSIVE)


def free_processors(previous: Sequence[str], after: Sequence[str], among: Iterable[int]) -> float | None:
    """Number of the given processors that were idle between two reads of ``/proc/stat``; None if unknown."""
    free, names = 0.0, {f"cpu{i}" for i in among}
    old, new = _times(previous, names), _times(after, names)
    for name in old.keys() & new.keys():
        spent = [b - a for a, b in zip(old[name], new[name], strict=True)]
        if sum(spent) <= 0:
            return None
        free += (spent[3] + spent[4]) / sum(spent)  # idle and iowait
    return free if old else None


def _times(lines: Iterable[str], names: set[str]) -> dict[str, list[int]]:
    fields = (line.split() for line in lines)
    # Guest times, the last two, are part of user times.
    return {name: list(map(int, times[:8])) for name, *times in filter(None, fields) if name in names}


# -- the number of threads -----------------------------------------------------------------------------------------


@dataclass
class ThreadChoice:
    """Number of threads for steps of a model, shared by its decoders.

    Attributes:
        due: time of the earliest next comparison, in seconds of the clock.
        patience: seconds between the last comparison and `due`.
        fewer: True if the next comparison is with fewer threads, should both directions be possible.
    """

    number: int
    due: float = 0.0
    patience: float = PATIENCE
    fewer: bool = True


class ComparedThreads:
    """Number of threads of one decoder, compared on its own steps while other programs take processors.

    Nothing changes while threads do not wait for processors. If they do, pairs of consecutive steps are decoded with
    the current and with half the number, in random order; the half is kept if it is `GAIN` times as fast in `WINS`
    pairs before it is not in more than `LOSSES`. In the same way, but without `GAIN`, a larger number is compared later
    on. Of two equal numbers the other one wins with a probability of 9 / 256 at most.

    Args:
        numbers: numbers of threads, from PyTorch's down to one.
        choice: shared by all decoders of the model.
        waiting: wait counters.
        clock: seconds.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        choice: ThreadChoice,
        waiting: CpuWait,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._numbers, self._choice, self._waiting, self._clock = numbers, choice, waiting, clock
        self._other: int | None = None  # the number compared with the current one
        self._pair: list[int] = []  # numbers of the pair's steps that are left
        self._seconds: dict[int, float] = {}
        self._wins = self._losses = 0
        self._last_look = 0.0

    def applied(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield the items of ``steps``, each computed with the number for it; PyTorch has its own between items."""
        iterator = iter(steps)
        self._look(0.0)
        try:
            while True:
                with restored():
                    set_threads(self._next())
                    start = self._clock()
                    try:
                        item = next(iterator)
                    except StopIteration:
                        return
                    self._record(self._clock() - start)
                yield item
        finally:
            self._waiting.close()

    def _next(self) -> int:
        """Number of threads for the next step."""
        if self._other is None:
            passed = self._clock() - self._last_look
            if passed >= INTERVAL:
                self._look(passed)
        if self._other is not None and not self._pair:
            self._pair = random.sample([self._choice.number, self._other], 2)
        return self._pair[-1] if self._pair else self._choice.number

    def _look(self, passed: float) -> None:
        """Read the wait counters, and start a comparison if one is due."""
        waited = self._waiting.since()
        disturbed = passed > 0 and waited > DISTURBED * passed
        choice, now = self._choice, self._clock()
        position = self._numbers.index(choice.number)
        fewer, more = self._numbers[position + 1 :][:1] if disturbed else [], self._numbers[:position][-1:]
        if now >= choice.due and (fewer or more):
            (self._other,) = fewer if not more or (fewer and choice.fewer) else more
            self._wins = self._losses = 0
        self._waiting.start()  # include new threads
        self._last_look = self._clock()

    def _record(self, seconds: float) -> None:
        """Account for a step, and end the comparison when it is decided."""
        if self._other is None:
            return
        self._seconds[self._pair.pop()] = seconds
        if self._pair:
            return
        choice, other = self._choice, self._other
        gain = GAIN if other < choice.number else 1.0
        won = self._seconds[other] * gain < self._seconds[choice.number]
        self._wins, self._losses = self._wins + won, self._losses + (not won)
        if self._wins < WINS and self._losses <= LOSSES:
            return
        self._other = None
        choice.fewer = other < choice.number
        if self._wins < WINS:
            choice.fewer = not choice.fewer
            choice.patience = min(2 * choice.patience, MAX_PATIENCE)
        else:
            reason = "faster beside other programs" if other < choice.number else "faster again"
            logger.warning("crossdraft: decoding with %d of %d threads: %s", other, self._numbers[0], reason)
            choice.number, choice.patience = other, PATIENCE
        choice.due = self._clock() + choice.patience


def candidates(max_threads: int) -> list[int]:
    """Numbers of threads to compare: all, half, a quarter, .. and one."""
    numbers = [max_threads]
    while numbers[-1] > 1:
        numbers.append(numbers[-1] // 2)
    return numbers


@cache
def _choices() -> Any:
    """Choices by first weight: the decoders of a model have modules of their own, and share its weights."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def compared_threads(lm: Any) -> ComparedThreads | None:
    """`ComparedThreads` for a decoder of the slots ``lm``; None if the user or the device fixes the number."""
    import torch

    model, max_threads = getattr(lm, "model", None), torch.get_num_threads()
    if model is None or lm.device.type != "cpu" or max_threads == 1:
        return None
    if _set_by_user(max_threads) or distributed.count() > 1:
        return None
    numbers = candidates(max_threads)
    weights = next(model.parameters())
    choice = _choices().get(weights)
    if choice is None or choice.number not in numbers:  # or PyTorch had another number then
        choice = _choices()[weights] = ThreadChoice(max_threads)
    return ComparedThreads(numbers, choice, CpuWait(lm.device))


def _set_by_user(number: int) -> bool:
    """True if the number of threads is not PyTorch's default, or a variable sets it."""
    processors = _processors()
    siblings = {tuple(lines_of(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list")) for i in processors}
    return any(name in os.environ for name in NUMBER) or number not in (len(processors), len(siblings))


def _processors() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
