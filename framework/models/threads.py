"""The number of CPU threads that decode, and how they wait for each other.

OpenMP's threads meet after every matrix product. By default they spin until all have arrived, for milliseconds; beside
a busy program they spin for a thread that has no core. Two remedies: passive waiting (`choose_wait_policy`), which
OpenMP reads once, when PyTorch is loaded; and fewer threads (`ThreadCount`), which may change at any time.

Settings of the user are never changed: the environment variables in `NUMBER` and `POLICY`, and a number set by
`torch.set_num_threads` that is neither that of the cores nor that of their hardware threads.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from . import distributed
from .cpu_contention import Waiting
from .device import lines_of, pick_device, pick_dtype

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Environment variables by which users choose the number of threads, and how threads wait.
NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
POLICY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
#: What makes threads wait passively: of libgomp, and of any OpenMP.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
#: Marks a wait policy as chosen by crossdraft, for processes that this one starts; holds the processors that were free.
CHOSEN = "CROSSDRAFT_FREE_PROCESSORS"
#: Another number of threads is chosen only if it is so many times as fast.
GAIN = 1.15
#: A measurement ends after so many seconds, once every number was measured `LEAST` times, at most `MOST` times.
BUDGET, LEAST, MOST = 0.4, 3, 9
#: A number of threads is not measured any further if it takes so many times as long as the best.
HOPELESS = 3
#: Bytes of weights that a measurement reads.
SAMPLE = 64 << 20
#: Seconds between two looks at the wait counters.
INTERVAL = 0.5
#: Threads are disturbed if they waited for processors for more than this share of the time, all threads added up.
DISTURBED = 0.1
#: Least and most seconds between two measurements of the same target; they double while nothing changes.
PATIENCE, MOST_PATIENCE = 5.0, 120.0


# -- the wait policy -----------------------------------------------------------------------------------------------


def choose_wait_policy(read: Callable[[], list[str]] = lambda: lines_of("/proc/stat"), seconds: float = 0.2) -> None:
    """Let OpenMP's threads wait passively if other programs use this process's processors at the moment.

    Must be called before PyTorch is loaded; does nothing after that, if the user has set a variable of `NUMBER` or
    `POLICY`, and where the system does not report the load of processors.
    """
    if CHOSEN in os.environ:  # chosen by the process that started this one, at another time
        for name in (CHOSEN, *PASSIVE):
            os.environ.pop(name, None)
    if "torch" in sys.modules or distributed.count() > 1 or any(name in os.environ for name in NUMBER + POLICY):
        return
    mine = _processors()
    before = read()
    time.sleep(seconds)
    free = free_processors(before, read(), mine)
    if free is None:
        return
    os.environ[CHOSEN] = f"{free:.1f}"
    if free < len(mine) - 0.5:
        os.environ.update(PASSIVE)


def free_processors(before: Sequence[str], after: Sequence[str], among: Iterable[int]) -> float | None:
    """Number of processors ``among`` these that were idle between two readings of ``/proc/stat``; None if unknown."""
    free, names = 0.0, {f"cpu{i}" for i in among}
    old, new = _times(before, names), _times(after, names)
    for name in old.keys() & new.keys():
        spent = [b - a for a, b in zip(old[name], new[name], strict=True)]
        if sum(spent) <= 0:
            return None
        free += (spent[3] + spent[4]) / sum(spent)  # idle, and idle until a disk answers
    return free if old else None


def _times(lines: Iterable[str], names: set[str]) -> dict[str, list[int]]:
    fields = (line.split() for line in lines)
    # Times of guests, the last two, are counted among those of users.
    return {name: list(map(int, times[:8])) for name, *times in filter(None, fields) if name in names}


def wait_policy() -> str:
    """The wait policy: ``passive``, ``spin``, or what the user's variables are."""
    if CHOSEN in os.environ:
        return "passive" if "OMP_WAIT_POLICY" in os.environ else "spin"
    return " ".join(f"{name}={os.environ[name]}" for name in POLICY if name in os.environ) or "spin"


def settings() -> dict[str, Any]:
    """Most threads, the wait policy, and who decides: part of what ``crossdraft env`` prints."""
    most, number = _threads(), next((name for name in NUMBER if name in os.environ), None)
    chosen = CHOSEN in os.environ
    return {
        "most": most,
        "number": number or ("torch.set_num_threads" if _set_by_user(most) else "measured before decoding"),
        "wait_policy": wait_policy(),
        "free_processors": float(os.environ[CHOSEN]) if chosen else None,
    }


# -- the number of threads -----------------------------------------------------------------------------------------


@dataclass
class Choice:
    """A number of threads, when it was measured (None: not yet), and how long it is not measured again."""

    number: int
    measured: float | None = None
    patience: float = PATIENCE


class ThreadCount:
    """The number of threads that decode with one target: measured when it is first used, and again when it should be.

    Args:
        most: the number of threads that PyTorch has.
        measure: return seconds of repetitions of the same work, by number of threads; None leaves nothing to choose.
        waiting: wait counters; see `Waiting`.
        choice: shared by all users of the target.
        clock: seconds.
    """

    def __init__(
        self,
        most: int,
        measure: Callable[[Sequence[int]], Mapping[int, Sequence[float]]] | None = None,
        waiting: Waiting | None = None,
        choice: Choice | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.most, self.choice = most, choice or Choice(most)
        self._measure, self._waiting, self._clock = measure, waiting, clock
        self._looked = 0.0

    @property
    def number(self) -> int:
        """Threads to decode with."""
        return self.choice.number

    @property
    def fixed(self) -> bool:
        """True if the user or the system leaves nothing to choose."""
        return self._measure is None or self.most == 1

    def choose(self) -> None:
        """Measure, and take the fastest number of threads."""
        if self._measure is None or self.fixed:
            return
        choice, before = self.choice, self.number
        choice.number = fastest(self._measure(candidates(self.most)), before)
        unchanged = choice.number == before and choice.measured is not None
        choice.patience = min(2 * choice.patience, MOST_PATIENCE) if unchanged else PATIENCE
        choice.measured = self._clock()
        if choice.number != before:
            why = "fewer are faster beside what else runs" if choice.number < before else "more are faster again"
            logger.warning("crossdraft: decoding with %d of %d threads: %s", choice.number, self.most, why)

    def start(self) -> None:
        """Begin to watch the wait counters; `stop` ends that."""
        if self.fixed:
            return
        if self.choice.measured is None:
            self.choose()
        self._look()

    def stop(self) -> None:
        if self._waiting is not None:
            self._waiting.close()

    def step(self) -> None:
        """Measure again if threads waited for processors, or are fewer than there may be; called after each step."""
        if self.fixed or (passed := self._clock() - self._looked) < INTERVAL:
            return
        waited = self._waiting.since() if self._waiting is not None else 0.0
        measured = self.choice.measured
        due = measured is None or self._clock() - measured >= self.choice.patience
        if due and (waited > DISTURBED * passed or self.number < self.most):
            self.choose()
        self._look()

    def _look(self) -> None:
        if self._waiting is not None:
            self._waiting.start()  # threads that have begun since are counted
        self._looked = self._clock()

    def applied(self, steps: Iterable[T]) -> Iterator[T]:
        """The items of ``steps``, each made with this number of threads; between them PyTorch has its own number."""
        if self.fixed:
            yield from steps
            return
        iterator = iter(steps)
        try:
            with restored():
                self.start()
            while True:
                with restored():
                    set_threads(self.number)
                    try:
                        item = next(iterator)
                    except StopIteration:
                        return
                    self.step()
                yield item
        finally:
            self.stop()


def candidates(most: int) -> list[int]:
    """Numbers of threads to compare: all, a half, a quarter, .. and one."""
    found = [most]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


def fastest(seconds: Mapping[int, Sequence[float]], current: int) -> int:
    """The number of threads with the least median; ``current`` unless that is `GAIN` times as fast."""
    if not seconds:
        return current
    medians = {number: median(found) for number, found in seconds.items()}
    best = min(medians, key=lambda number: (medians[number], number))
    return best if current not in medians or medians[best] * GAIN < medians[current] else current


_choices: dict[tuple[Any, ...], Choice] = {}


def thread_count(lm: Any) -> ThreadCount:
    """The one of a target; targets with equal layers share their choice, so that not every call measures anew."""
    most = _threads()
    layers = [] if most == 1 or _set_by_user(most) or distributed.count() > 1 else sampled_layers(lm)
    if not layers:
        return ThreadCount(most)
    key = (most, *((tuple(layer.weight.shape), layer.weight.dtype) for layer in layers))
    choice = _choices.setdefault(key, Choice(most))
    return ThreadCount(most, lambda numbers: measured(layers, numbers), Waiting(lm.device), choice)


def sampled_layers(lm: Any) -> list[nn.Linear]:
    """The first linear layers of a target on the CPU, up to `SAMPLE` bytes of weights; none of any other target."""
    from torch import nn

    model = getattr(lm, "model", None)
    if lm.device.type != "cpu" or not isinstance(model, nn.Module):
        return []
    found, size = [], 0
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.device.type == "cpu" and layer.weight.is_floating_point():
            if size >= SAMPLE:
                break
            found.append(layer)
            size += layer.weight.numel() * layer.weight.element_size()
    return found


def measured(layers: Sequence[nn.Linear], numbers: Sequence[int]) -> dict[int, list[float]]:
    """Seconds of a pass of one token through ``layers``, for each number of threads in turn."""
    import torch

    seconds: dict[int, list[float]] = {number: [] for number in numbers}
    began = time.perf_counter()
    with torch.inference_mode(), restored():
        inputs = [torch.ones(1, layer.in_features, dtype=layer.weight.dtype) for layer in layers]
        for repeat in range(MOST):
            if repeat >= LEAST and time.perf_counter() - began > BUDGET:
                break
            for number in numbers:
                if hopeless(seconds, number):
                    continue
                set_threads(number)
                layers[0](inputs[0])  # its threads are there now
                started = time.perf_counter()
                for layer, one in zip(layers, inputs, strict=True):
                    layer(one)
                seconds[number].append(time.perf_counter() - started)
    return seconds


def hopeless(seconds: Mapping[int, Sequence[float]], number: int) -> bool:
    """True if all times of ``number`` are more than `HOPELESS` times the best one: not measured any further."""
    best = min((min(found) for found in seconds.values() if found), default=0.0)
    return bool(seconds[number]) and min(seconds[number]) > HOPELESS * best


def example() -> str:
    """The number of threads for a small model on this machine at the moment, with what was measured."""
    import torch

    device = pick_device("auto")
    settled = settings()
    if device.type != "cpu" or settled["most"] == 1 or settled["number"] != "measured before decoding":
        return str(settled["most"])
    dtype = pick_dtype("auto", device)
    layers = [torch.nn.Linear(1024, 1024, bias=False, dtype=dtype) for _ in range(32)]
    seconds = measured(layers, candidates(settled["most"]))
    each = ", ".join(f"{number}: {median(found) * 1e3:.1f} ms" for number, found in seconds.items())
    return f"{fastest(seconds, settled['most'])} ({each})"


@contextmanager
def restored() -> Iterator[None]:
    """Give PyTorch its number of threads back at the end."""
    before = _threads()
    try:
        yield
    finally:
        set_threads(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread, for models so tiny that more threads cost more than they gain."""
    with restored():
        set_threads(1)
        yield


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def set_threads(number: int) -> None:
    """Set PyTorch's number of threads, if it is another one."""
    import torch

    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def _set_by_user(number: int) -> bool:
    """True if the number of threads is not the one that PyTorch takes by itself, or a variable sets it."""
    processors = _processors()
    siblings = {tuple(lines_of(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list")) for i in processors}
    return any(name in os.environ for name in NUMBER) or number not in (len(processors), len(siblings))


def _processors() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


# -- the cells of a group ------------------------------------------------------------------------------------------


def choose_for_group(lm: Any, kept: Any) -> dict[str, Any]:
    """Set PyTorch's number of threads for all cells of a group, and return it with the wait policy.

    Args:
        kept: what an earlier process returned for the group; its number is taken again, for the cells' comparison.
    """
    count = thread_count(lm)
    before = kept.get("number") if isinstance(kept, Mapping) else None
    if isinstance(before, int) and not count.fixed and 1 <= before <= count.most:
        count.choice.number = before
    else:
        count.choose()
    set_threads(count.number)
    return {"number": count.number, "most": count.most, "wait_policy": wait_policy()}


def number_used(provenance: Mapping[str, Any]) -> int | None:
    """The number of threads that a cell was measured with; None if unknown, or if it was resumed with another."""
    used = provenance.get("decoding_threads")
    numbers = {one.get("number") for one in used if isinstance(one, dict)} if isinstance(used, list) else set()
    return next(iter(numbers or {provenance.get("threads")})) if len(numbers) <= 1 else None


def described(group: Mapping[str, Any]) -> str:
    """Text for a result of `choose_for_group`; empty for anything else."""
    if not {"number", "most", "wait_policy"} <= group.keys():
        return ""
    return f"{group['number']} of {group['most']}, {group['wait_policy']}"


def disturbance(waited: float, seconds: float, number: int) -> str:
    """A sentence for a group whose threads wait for processors; empty if they do not.

    Args:
        waited: seconds that threads waited, of ``seconds`` of decoding.
    """
    if number == 1 or waited <= DISTURBED * seconds:
        return ""
    return (
        f"threads waited {waited / seconds:.0%} of the time for processors that other programs use; this group keeps "
        f"its {number} threads, so that its cells compare; interrupt and run again to wait passively"
    )
