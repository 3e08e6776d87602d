"""Number of CPU threads for decoding: PyTorch's own, or that of a plug-in (``crossdraft_thread_count``)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from .. import plugins

T = TypeVar("T")

#: Environment variables of the number of threads, and of OpenMP's wait policy.
NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
POLICY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
#: Variable that marks a wait policy as chosen by a plug-in, for child processes; its value is the free processors.
CHOSEN = "CROSSDRAFT_FREE_PROCESSORS"
#: Share of time, summed over threads, above which waiting for processors counts as contention.
DISTURBED = 0.1


class ThreadCount:
    """Number of threads for decoding with a target: all of PyTorch's. Plug-ins return subclasses.

    Attributes:
        max_threads: PyTorch's number of threads.
        origin: the setting that determines the number, for ``crossdraft list env``.
    """

    def __init__(self) -> None:
        self.max_threads = _threads()
        self.origin = next((name for name in NUMBER if name in os.environ), "PyTorch")

    @property
    def number(self) -> int:
        """Threads to decode with."""
        return self.max_threads

    def choose(self, kept: int | None = None) -> None:
        """Select a number; ``kept``: the one that an earlier process selected, to be used again."""

    def applied(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield the items of ``steps``, each computed with this number of threads; it is reset between items."""
        yield from steps

    def describe(self) -> str:
        """The number for a small model on this machine now, and the reason."""
        return str(self.number)


def thread_count(lm: Any = None) -> ThreadCount:
    """`ThreadCount` of the slots of a target; without slots, that of no target in particular."""
    return plugins.notify("crossdraft_thread_count", lm=lm) or ThreadCount()


def wait_policy() -> str:
    """Wait policy: ``passive``, ``spin``, or the user's variables."""
    if CHOSEN in os.environ:
        return "passive" if "OMP_WAIT_POLICY" in os.environ else "spin"
    return " ".join(f"{name}={os.environ[name]}" for name in POLICY if name in os.environ) or "spin"


def settings() -> dict[str, Any]:
    """Maximum number of threads, wait policy and their origin, for ``crossdraft list env``."""
    return {
        "most": _threads(),
        "number": thread_count().origin,
        "wait_policy": wait_policy(),
        "free_processors": float(os.environ[CHOSEN]) if CHOSEN in os.environ else None,
    }


@contextmanager
def restored() -> Iterator[None]:
    """Restore PyTorch's number of threads on exit."""
    previous = _threads()
    try:
        yield
    finally:
        set_threads(previous)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, for models so tiny that more threads are slower."""
    with restored():
        set_threads(1)
        yield


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def set_threads(number: int) -> None:
    """Set PyTorch's number of threads if it differs."""
    import torch

    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


# -- the cells of a group ------------------------------------------------------------------------------------------


def choose_for_group(lm: Any, kept: Any) -> dict[str, Any]:
    """Set PyTorch's number of threads for all cells of a group; returns it with the wait policy.

    Args:
        kept: result of an earlier process for the group; its number is reused, so that cells compare.
    """
    count = thread_count(lm)
    previous = kept.get("number") if isinstance(kept, Mapping) else None
    count.choose(previous if isinstance(previous, int) and 1 <= previous <= count.max_threads else None)
    set_threads(count.number)
    return {"number": count.number, "most": count.max_threads, "wait_policy": wait_policy()}


def number_used(provenance: Mapping[str, Any]) -> int | None:
    """Number of threads that a cell was measured with; None if unknown or changed on resume."""
    used = provenance.get("decoding_threads")
    numbers = {group.get("number") for group in used if isinstance(group, dict)} if isinstance(used, list) else set()
    return next(iter(numbers or {provenance.get("threads")})) if len(numbers) <= 1 else None


def describe_threads(group: Mapping[str, Any]) -> str:
    """Format a result of `choose_for_group`; empty for anything else."""
    if not {"number", "most", "wait_policy"} <= group.keys():
        return ""
    return f"{group['number']} of {group['most']}, {group['wait_policy']}"


def disturbance(waited: float, seconds: float, number: int) -> str:
    """Warning for a group whose threads waited for processors; empty without contention.

    Args:
        waited: seconds of waiting during ``seconds`` of decoding.
    """
    if number == 1 or waited <= DISTURBED * seconds:
        return ""
    return (
        f"threads waited {waited / seconds:.0%} of the time for processors used by other programs; this group keeps "
        f"its {number} threads, so that its cells compare; interrupt and run again for passive waiting"
    )
