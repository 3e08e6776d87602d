"""The processes of ``torchrun`` that hold one model between them, tensor-parallel: the first leads, the others follow.

The first process runs the command: it decides, draws, drafts, writes and speaks. It tells the others each step that
the model makes, and all of them make it together. So nothing can be decided in two ways, and a follower has no files,
no clock and no drafter. This module is the telling; what the steps are is in `lm.tensor_parallel_lm`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import CrossdraftError, ModelError, UsageError, first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

#: The device of a model that all processes hold together.
SPLIT = "tp"
#: How long a process waits for the next step; nobody is asked anything while a request is awaited.
_PATIENCE = timedelta(days=30)


@dataclass
class _State:
    joined: bool = False
    inside: bool = False
    broken: bool = False
    dropped: list[int] = field(default_factory=list)


_state = _State()
_numbers = itertools.count()


def count() -> int:
    """Processes that ``torchrun`` started together; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """Which of them this is; 0 leads."""
    return int(os.environ.get("RANK", "0")) if count() > 1 else 0


def local_rank() -> int:
    """Which of those on this machine it is, and so which of its GPUs it takes."""
    return int(os.environ.get("LOCAL_RANK", "0")) if count() > 1 else 0


def check(device: Any) -> None:
    """Raise UsageError where a target's ``device`` and the processes that were started do not fit each other."""
    if device == SPLIT and count() == 1:
        raise UsageError(
            f"device {SPLIT} splits a model over several processes, and there is one; start them with "
            "torchrun --nproc-per-node N -m crossdraft ..."
        )
    if device == SPLIT and not _state.joined:
        raise UsageError(f"device {SPLIT} is for the crossdraft command, not for scripts of your own")
    if isinstance(device, str) and device != SPLIT and count() > 1:
        raise UsageError(
            f"torchrun started {count()} processes, but device {device} is one of them alone; give device {SPLIT} to "
            "split the target over them, or start one process"
        )


def join() -> None:
    """Meet the other processes."""
    import torch
    from torch import distributed

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank())
    # What is told goes through gloo, so that telling waits for no device.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_PATIENCE)
    _state.joined = True


@contextmanager
def leading() -> Iterator[None]:
    """The first process, while it runs a command; afterwards the others may go. Without others, nothing."""
    if count() == 1:
        yield
        return
    from torch import distributed

    join()
    try:
        yield
    finally:
        if not _state.broken:
            with suppress(RuntimeError):  # they have been ended
                tell("end")
                distributed.destroy_process_group()


def tell(step: str, *arguments: Any, tensors: Sequence[Tensor] = ()) -> None:
    """Let the other processes make a step. Plain values are told as they are, tensors from device to device."""
    from torch import distributed

    dropped, _state.dropped = _state.dropped, []
    shapes = [(tuple(one.shape), one.dtype) for one in tensors]
    _send([(step, arguments, shapes, dropped)])
    for one in tensors:
        distributed.broadcast(one.contiguous(), 0)


def hear(device: torch.device) -> tuple[str, tuple[Any, ...], list[Tensor], list[int]]:
    """The next step, its arguments and its tensors, and which models and slots are not needed any more."""
    import torch
    from torch import distributed

    step, arguments, shapes, dropped = _send([None])
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    for one in tensors:
        distributed.broadcast(one, 0)
    return step, arguments, tensors, dropped


def _send(message: list[Any]) -> Any:
    import torch
    from torch import distributed

    distributed.broadcast_object_list(message, 0, device=torch.device("cpu"))
    return message[0]


def number() -> int:
    """By which all processes call a model, or slots, that they are about to make."""
    return next(_numbers)


def drop(key: int) -> None:
    """Tell with the next step that a model, or slots, are not needed any more."""
    _state.dropped.append(key)


def everywhere(make: Callable[[], T], step: str, *arguments: Any) -> T:
    """``make()`` in every process: the first tells the others to make the ``step`` that calls this, too.

    Raises what ``make`` raises here, or a ModelError if it failed elsewhere. All are in step afterwards.
    """
    with together() if rank() == 0 else nullcontext():
        if rank() == 0:
            tell(step, *arguments)
        made, mine = _tried(make)
        others = _first_of_all(mine)
    if mine is not None and rank() == 0:
        raise mine
    if others:
        raise ModelError(others)
    return made  # type: ignore[return-value]  # made, where nobody has anything against it


def _tried(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def _first_of_all(error: Exception | None) -> str:
    """The first sentence that any process has against a step, "" = all could make it. All have to ask."""
    from torch import distributed

    said = "" if error is None else str(error) if isinstance(error, CrossdraftError) else first_line(error)
    found: list[Any] = [None] * count()
    distributed.all_gather_object(found, said)
    return next((f"{one} (process {i + 1} of {count()})" for i, one in enumerate(found) if one), "")


@contextmanager
def together() -> Iterator[None]:
    """A step of all processes. If it fails here, where the others stand is not known, and there is no further one."""
    if _state.broken:
        raise ModelError(
            "the processes that hold the target fell out of step when an earlier pass failed; run the command again"
        )
    _state.inside = _state.broken = True
    try:
        yield
    finally:
        _state.inside = False
    _state.broken = False


def broken() -> bool:
    """Has a step failed?"""
    return _state.broken


def inside() -> bool:
    """Is this process making a step that the others make, too?"""
    return _state.inside
