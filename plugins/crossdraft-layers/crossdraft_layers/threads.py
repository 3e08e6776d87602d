"""Number of CPU threads for decoding, and the OpenMP wait policy.

OpenMP threads synchronise after every matrix product. By default they spin for milliseconds until all have arrived;
beside a busy program they spin for a thread without a core. Two remedies: passive waiting (`choose_wait_policy`), which
OpenMP reads once, when PyTorch is loaded; and fewer threads (`MeasuredThreads`), which can change at any time.

User settings are never changed: the environment variables in `NUMBER` and `POLICY`, and a number set by
`torch.set_num_threads` that differs from the numbers of cores and hardware threads.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from crossdraft.framework.models import distributed
from crossdraft.framework.models.device import lines_of, pick_device, pick_dtype
from crossdraft.framework.models.threads import CHOSEN, DISTURBED, NUMBER, POLICY, ThreadCount, restored, set_threads
from crossdraft.framework.util.contention import CpuWait

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Settings of passive waiting, of OpenMP and of libgomp.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
#: Minimum speed-up for another number of threads.
GAIN = 1.15
#: Seconds of a measurement after `LEAST` repetitions of every number, and maximum repetitions.
BUDGET, LEAST, MOST = 0.4, 3, 9
#: Slow-down relative to the best at which a number of threads is no longer measured.
HOPELESS = 3
#: Bytes of weights read by a measurement.
SAMPLE = 64 << 20
#: Seconds between reads of the wait counters.
INTERVAL = 0.5
#: Minimum and maximum seconds between measurements of a target; the interval doubles while nothing changes.
PATIENCE, MOST_PATIENCE = 5.0, 120.0


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
    """A number of threads, the time of its measurement (or None), and seconds until the next one."""

    number: int
    measured: float | None = None
    patience: float = PATIENCE


class MeasuredThreads(ThreadCount):
    """Number of threads for decoding with one target, measured on first use and again under contention.

    Args:
        max_threads: PyTorch's number of threads.
        measure: returns seconds of repetitions of the same work, by number of threads; None fixes the number.
        waiting: wait counters; see `CpuWait`.
        choice: shared by all users of the target.
        clock: seconds.
    """

    def __init__(
        self,
        max_threads: int,
        measure: Callable[[Sequence[int]], Mapping[int, Sequence[float]]] | None = None,
        waiting: CpuWait | None = None,
        choice: ThreadChoice | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self.max_threads, self.choice = max_threads, choice or ThreadChoice(max_threads)
        self._measure, self._waiting, self._clock = measure, waiting, clock
        if self.origin not in NUMBER:
            self.origin = "torch.set_num_threads" if _set_by_user(max_threads) else "measured before decoding"
        self._last_look = 0.0

    @property
    def number(self) -> int:
        return self.choice.number

    @property
    def fixed(self) -> bool:
        """True if the number is fixed by the user or the system."""
        return self._measure is None or self.max_threads == 1

    def choose(self, kept: int | None = None) -> None:
        """Measure and select the fastest number of threads, unless one was ``kept``."""
        if self._measure is None or self.fixed:
            return
        if kept is not None:
            self.choice.number = kept
            return
        choice, previous = self.choice, self.number
        choice.number = fastest(self._measure(candidates(self.max_threads)), previous)
        unchanged = choice.number == previous and choice.measured is not None
        choice.patience = min(2 * choice.patience, MOST_PATIENCE) if unchanged else PATIENCE
        choice.measured = self._clock()
        if choice.number != previous:
            reason = "faster beside other programs" if choice.number < previous else "faster again"
            logger.warning("crossdraft: decoding with %d of %d threads: %s", choice.number, self.max_threads, reason)

    def start(self) -> None:
        """Start reading the wait counters, until `stop`."""
        if self.fixed:
            return
        if self.choice.measured is None:
            self.choose()
        self._look()

    def stop(self) -> None:
        if self._waiting is not None:
            self._waiting.close()

    def step(self) -> None:
        """Measure again if threads waited for processors, or are fewer than `maximum`; called after each step."""
        if self.fixed or (passed := self._clock() - self._last_look) < INTERVAL:
            return
        waited = self._waiting.since() if self._waiting is not None else 0.0
        measured = self.choice.measured
        due = measured is None or self._clock() - measured >= self.choice.patience
        if due and (waited > DISTURBED * passed or self.number < self.max_threads):
            self.choose()
        self._look()

    def _look(self) -> None:
        if self._waiting is not None:
            self._waiting.start()  # include new threads
        self._last_look = self._clock()

    def applied(self, steps: Iterable[T]) -> Iterator[T]:
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

    def describe(self) -> str:
        import torch

        device = pick_device("auto")
        if device.type != "cpu" or self.max_threads == 1 or self.origin != "measured before decoding":
            return str(self.max_threads)
        dtype = pick_dtype("auto", device)
        layers = [torch.nn.Linear(1024, 1024, bias=False, dtype=dtype) for _ in range(32)]
        seconds = measure_threads(layers, candidates(self.max_threads))
        medians = ", ".join(f"{number}: {median(times) * 1e3:.1f} ms" for number, times in seconds.items())
        return f"{fastest(seconds, self.max_threads)} ({medians})"


def candidates(max_threads: int) -> list[int]:
    """Numbers of threads to compare: all, half, a quarter, .. and one."""
    numbers = [max_threads]
    while numbers[-1] > 1:
        numbers.append(numbers[-1] // 2)
    return numbers


def fastest(seconds: Mapping[int, Sequence[float]], current: int) -> int:
    """Number of threads with the smallest median, if it is `GAIN` times as fast as ``current``, else ``current``."""
    if not seconds:
        return current
    medians = {number: median(times) for number, times in seconds.items()}
    best = min(medians, key=lambda number: (medians[number], number))
    return best if current not in medians or medians[best] * GAIN < medians[current] else current


_choices: dict[tuple[Any, ...], ThreadChoice] = {}


def thread_count(lm: Any) -> MeasuredThreads:
    """`MeasuredThreads` of a target; targets with equal layers share their choice."""
    import torch

    max_threads = torch.get_num_threads()
    layers = [] if max_threads == 1 or _set_by_user(max_threads) or distributed.count() > 1 else sampled_layers(lm)
    if not layers:
        return MeasuredThreads(max_threads)
    key = (max_threads, *((tuple(layer.weight.shape), layer.weight.dtype) for layer in layers))
    choice = _choices.setdefault(key, ThreadChoice(max_threads))
    return MeasuredThreads(max_threads, lambda numbers: measure_threads(layers, numbers), CpuWait(lm.device), choice)


def sampled_layers(lm: Any) -> list[nn.Linear]:
    """First linear layers of a target on the CPU, up to `SAMPLE` bytes of weights; empty for other targets."""
    from torch import nn

    model = getattr(lm, "model", None)
    if lm is None or lm.device.type != "cpu" or not isinstance(model, nn.Module):
        return []
    layers, size = [], 0
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.device.type == "cpu" and layer.weight.is_floating_point():
            if size >= SAMPLE:
                break
            layers.append(layer)
            size += layer.weight.numel() * layer.weight.element_size()
    return layers


def measure_threads(layers: Sequence[nn.Linear], numbers: Sequence[int]) -> dict[int, list[float]]:
    """Seconds of a pass of one token through ``layers``, for each number of threads in turn."""
    import torch

    seconds: dict[int, list[float]] = {number: [] for number in numbers}
    start = time.perf_counter()
    with torch.inference_mode(), restored():
        inputs = [torch.ones(1, layer.in_features, dtype=layer.weight.dtype) for layer in layers]
        for repeat in range(MOST):
            if repeat >= LEAST and time.perf_counter() - start > BUDGET:
                break
            for number in numbers:
                if is_hopeless(seconds, number):
                    continue
                set_threads(number)
                layers[0](inputs[0])  # start the threads
                layer_start = time.perf_counter()
                for layer, x in zip(layers, inputs, strict=True):
                    layer(x)
                seconds[number].append(time.perf_counter() - layer_start)
    return seconds


def is_hopeless(seconds: Mapping[int, Sequence[float]], number: int) -> bool:
    """True if all times of ``number`` exceed `HOPELESS` times the best one."""
    best = min((min(times) for times in seconds.values() if times), default=0.0)
    return bool(seconds[number]) and min(seconds[number]) > HOPELESS * best


def _set_by_user(number: int) -> bool:
    """True if the number of threads is not PyTorch's default, or a variable sets it."""
    processors = _processors()
    siblings = {tuple(lines_of(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list")) for i in processors}
    return any(name in os.environ for name in NUMBER) or number not in (len(processors), len(siblings))


def _processors() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
