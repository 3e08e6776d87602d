"""Processes of ``torchrun`` that hold one tensor-parallel model: rank 0 leads, the others follow.

Rank 0 runs the command: sampling, drafting, files and output. It broadcasts each operation of the model, and all ranks
execute it collectively. Decisions are made in one process only; followers have no files, clock or drafter. This module
is the broadcast; the operations are defined in `split_lm`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from crossdraft import CrossdraftError, ModelError, first_line
from crossdraft.framework.models.placement import process_count

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

#: Timeout of collectives: followers block while a server waits for requests.
_TIMEOUT = timedelta(days=30)


@dataclass
class _State:
    initialized: bool = False
    in_collective: bool = False
    failed: bool = False
    released: list[int] = field(default_factory=list)


_state = _State()
_keys = itertools.count()


def rank() -> int:
    """Rank of this process; 0 leads."""
    return int(os.environ.get("RANK", "0")) if process_count() > 1 else 0


def local_rank() -> int:
    """Rank on this machine, which is the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0")) if process_count() > 1 else 0


def init_process_group() -> None:
    """Initialise the process group."""
    import torch
    from torch import distributed

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank())
    # Operations are broadcast by gloo, without waiting for devices.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_TIMEOUT)
    _state.initialized = True


@contextmanager
def lead_processes() -> Iterator[None]:
    """Lead the other processes, and end them on exit; does nothing with one process."""
    if process_count() == 1:
        yield
        return
    from torch import distributed

    init_process_group()
    try:
        yield
    finally:
        if not _state.failed:
            with suppress(RuntimeError):  # they were terminated
                broadcast_operation("end")
                distributed.destroy_process_group()


def broadcast_operation(operation: str, *arguments: Any, tensors: Sequence[Tensor] = ()) -> None:
    """Broadcast an operation; plain values are pickled, tensors go from device to device."""
    from torch import distributed

    released, _state.released = _state.released, []
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    _send([(operation, arguments, shapes, released)])
    for tensor in tensors:
        distributed.broadcast(tensor.contiguous(), 0)


def receive(device: torch.device) -> tuple[str, tuple[Any, ...], list[Tensor], list[int]]:
    """Receive the next operation, its arguments and tensors, and the keys of released models and slots."""
    import torch
    from torch import distributed

    operation, arguments, shapes, released = _send([None])
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    for tensor in tensors:
        distributed.broadcast(tensor, 0)
    return operation, arguments, tensors, released


def _send(message: list[Any]) -> Any:
    import torch
    from torch import distributed

    distributed.broadcast_object_list(message, 0, device=torch.device("cpu"))
    return message[0]


def next_key() -> int:
    """Return a key, equal in all processes, for a new model or slots."""
    return next(_keys)


def release_everywhere(key: int) -> None:
    """Release a model or slots in all processes with the next operation."""
    _state.released.append(key)


def run_everywhere(make: Callable[[], T], operation: str, *arguments: Any) -> T:
    """Call ``make()`` in every process; rank 0 broadcasts the operation ``step``, which calls this function.

    Raises the error of ``make`` in this process, or ModelError if it failed in another. All ranks stay in sync.
    """
    with collective() if rank() == 0 else nullcontext():
        if rank() == 0:
            broadcast_operation(operation, *arguments)
        result, error = _try(make)
        other_error = _first_error(error)
    if error is not None and rank() == 0:
        raise error
    if other_error:
        raise ModelError(other_error)
    return result  # type: ignore[return-value]  # set if no process failed


def _try(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def _first_error(error: Exception | None) -> str:
    """First error message over all processes, "" if all succeeded; a collective call."""
    from torch import distributed

    message = str(error) if isinstance(error, CrossdraftError) else "" if error is None else first_line(error)
    messages: list[Any] = [None] * process_count()
    distributed.all_gather_object(messages, message)
    return next((f"{text} (process {i + 1} of {process_count()})" for i, text in enumerate(messages) if text), "")


@contextmanager
def collective() -> Iterator[None]:
    """Context of a collective operation. After an error the state of other ranks is unknown, so later ones fail."""
    if _state.failed:
        raise ModelError(
            "the processes of the target are out of sync since an earlier pass failed; run the command again"
        )
    _state.in_collective = _state.failed = True
    try:
        yield
    finally:
        _state.in_collective = False
    _state.failed = False


def initialized() -> bool:
    """True if the processes are connected: in a command, not in a script."""
    return _state.initialized


def has_failed() -> bool:
    """True if an operation has failed."""
    return _state.failed


def in_collective() -> bool:
    """True inside of a collective operation."""
    return _state.in_collective
