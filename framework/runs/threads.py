"""PyTorch's number of CPU threads, and OpenMP's wait policy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

#: Environment variables of the number of threads, and of OpenMP's wait policy.
NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
POLICY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
#: What `sleep_between_products` has set.
_own: dict[str, str] = {}
#: Share of time, summed over threads, above which waiting for processors counts as contention.
DISTURBED = 0.1


def wait_policy() -> str:
    """Wait policy: ``spin``, or the user's variables."""
    return " ".join(f"{name}={os.environ[name]}" for name in POLICY if name in os.environ) or "spin"


def sleep_between_products() -> None:
    """Let OpenMP's threads sleep instead of spin, unless the user has a policy; as long as PyTorch is not loaded."""
    if "torch" not in sys.modules and wait_policy() == "spin":
        _own.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
        os.environ.update(_own)


def environment_of_others() -> dict[str, str]:
    """The environment for programs that compute by themselves: without what `sleep_between_products` has set."""
    return {name: value for name, value in os.environ.items() if name not in _own}


def settings() -> dict[str, Any]:
    """Number of threads, wait policy and their origin, for ``crossdraft list env``."""
    used, set_by = threads_in_use(), next((name for name in NUMBER if name in os.environ), "PyTorch")
    return {"number": used["number"], "set_by": set_by, "wait_policy": used["wait_policy"]}


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, for models so tiny that more threads are slower; restores the number on exit."""
    import torch

    previous = torch.get_num_threads()
    if previous != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != previous:
            torch.set_num_threads(previous)


# -- the cells of a group ------------------------------------------------------------------------------------------


def threads_in_use() -> dict[str, Any]:
    """PyTorch's number of threads and the wait policy, as a group records them."""
    import torch

    return {"number": torch.get_num_threads(), "wait_policy": wait_policy()}


def describe_threads(group: Mapping[str, Any]) -> str:
    """Format a result of `threads_in_use`; empty for anything else."""
    return f"{group['number']}, {group['wait_policy']}" if {"number", "wait_policy"} <= group.keys() else ""


def disturbance(waited: float, seconds: float) -> str:
    """Warning for a group whose threads waited for processors; empty without contention.

    Args:
        waited: seconds of waiting during ``seconds`` of decoding.
    """
    used = threads_in_use()
    if used["number"] == 1 or waited <= DISTURBED * seconds:
        return ""
    way = "with OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0" if used["wait_policy"] == "spin" else "when those have ended"
    waiting = f"threads waited {waited / seconds:.0%} of the time for processors used by other programs"
    return f"{waiting}; interrupt and run again {way}"
