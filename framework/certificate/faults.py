"""Faults of a strategy that make its output depend on more than its inputs and the numbers of its `rng`.

A total variation measured on such a strategy means nothing, so these faults are looked for first: random numbers
outside of `rng`, state that is kept from one step to the next, a verdict that depends on other rows, modified inputs.
The certificate and the contract kit use the same functions.
"""

from __future__ import annotations

import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ..contracts.draft import Draft, Verdict
from ..contracts.rng import StepRng
from ..contracts.verifier import Verifier
from ..engine.validation import validate_verdict
from ..errors import ContractError, CrossdraftError, first_line
from .draft_rows import draft_row

#: Tensor fields of a draft.
FIELDS = ("tokens", "parents", "valid", "q", "q_index", "sequences")
#: Rows that are verified by themselves.
_ROWS = 16
_FRAMEWORK = str(Path(__file__).parents[1])


class FaultError(ContractError):
    """A strategy uses more than its inputs and its random numbers; its total variation is meaningless."""


# -- places -----------------------------------------------------------------------------------------------------


def files_of(*strategies: type[Any]) -> set[str]:
    """Source files of the packages of strategies, without those of the framework."""
    files = set()
    for cls in (base for strategy in strategies for base in strategy.__mro__):
        try:
            file = inspect.getfile(cls)
        except (TypeError, OSError):  # built-in, or defined in an interactive session
            continue
        if file.startswith(_FRAMEWORK):
            continue
        folder = Path(file).parent
        files |= {file, *(map(str, folder.glob("*.py")) if (folder / "__init__.py").exists() else ())}
    return files


def place_of(error: BaseException, files: set[str]) -> str:
    """Return the place of ``error`` as ``file:line in function``: the deepest frame in ``files``, or of all."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    frame = next((frame for frame in reversed(frames) if frame.filename in files), frames[-1])
    return f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"


def _short(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


def error_message(error: Exception, files: set[str]) -> str:
    """One line for an exception of a strategy: what was raised, where, and its notes (see `draft_note`)."""
    parts, frames = [first_line(error)], traceback.extract_tb(error.__traceback__)
    if not isinstance(error, CrossdraftError) or any(frame.filename in files for frame in frames):
        parts.append(f"at {place_of(error, files)}")
    return ", ".join([" ".join(parts), *getattr(error, "__notes__", ())])


def draft_note(draft: Draft, row: int) -> str:
    """The nodes of a row of a draft, for messages."""
    nodes = draft_row(draft, row)
    return f"draft tokens {nodes.tokens}, parents {nodes.parents}"


# -- random numbers outside of rng ------------------------------------------------------------------------------


class RandomWatch(TorchDispatchMode):
    """Record random numbers that are drawn while it is active, except those of `rng`.

    PyTorch's random operations are recognised by their tag, if they take a generator or change the global one, unlike
    attention without dropout; NumPy's and Python's global generators by a change of their state, line by line of
    ``files``.

    Attributes:
        sites: descriptions, ``torch.rand at file:line``.
    """

    def __init__(self, files: set[str]):
        super().__init__()
        self.sites: dict[str, None] = {}
        self._files, self._line = files, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        state = torch.get_rng_state()
        result = func(*args, **kwargs)
        drawn = kwargs.get("generator") is not None or not torch.equal(state, torch.get_rng_state())
        if drawn and (frame := self._own(sys._getframe(1))) is not None:
            name = str(func.overloadpacket).removeprefix("aten.").rstrip("_")
            self.sites[f"torch.{name} at {_at(frame)}"] = None
        return result

    def _own(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame in the strategy's files; the innermost outside of PyTorch without one."""
        first = None
        while frame is not None:
            name = frame.f_code.co_filename
            if name in self._files:
                return frame
            if first is None and not name.startswith(str(Path(torch.__file__).parent)) and name != __file__:
                first = frame
            frame = frame.f_back
        return first

    def __enter__(self) -> RandomWatch:
        self._trace, self._states = sys.gettrace(), _host_states()
        sys.settrace(self._called)
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        sys.settrace(self._trace)
        self._compare(self._line)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._traced if frame.f_code.co_filename in self._files else None

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._compare(self._line)
        self._line = _at(frame)
        return self._traced

    def _compare(self, line: str) -> None:
        for name, now in (states := _host_states()).items():
            if now != self._states[name]:
                self.sites[f"{name} at {line}" if line else name] = None
        self._states = states


def _at(frame: FrameType) -> str:
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def _host_states() -> dict[str, Any]:
    _, token_texts, position, *_ = np.random.get_state(legacy=True)
    return {
        "numpy.random": (int(position), int(token_texts[0]), int(token_texts[-1])),
        "random": hash(random.getstate()),
    }


def outside_of_rng(who: str, sites: Sequence[str] = ()) -> str:
    """The message about random numbers that a strategy draws by itself."""
    place = f": {'; '.join(sites)}" if sites else ": equal inputs and equal decisions of rng give different results"
    return (
        f"{who} takes random numbers outside of rng{place}. Take every random number from rng (rng.accept, rng.draw), "
        "which the certificate enumerates and a seed reproduces"
    )


# -- verifiers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verification:
    """A call of ``verify`` that can be repeated for some of its rows.

    Attributes:
        draft, p: its inputs.
        rng: returns the numbers of these rows, from the start of the step.
        restore: sets the state of a new verifier to that of these rows, after ``start``.
    """

    draft: Draft
    p: Tensor
    rng: Callable[[Sequence[int]], StepRng]
    restore: Callable[[Verifier, Sequence[int]], None] = lambda verifier, rows: None

    def repeat(self, verifier: Verifier, rows: Sequence[int], start: bool = True) -> list[tuple[int, int, list[int]]]:
        """Verify ``rows`` by ``verifier``: tau, token and path of each."""
        index = torch.tensor(list(rows), dtype=torch.long)
        draft = self.draft.map_rows(lambda tensor: tensor.index_select(0, index))
        if start:
            for row in range(len(rows)):
                verifier.start(row)
            self.restore(verifier, rows)
        p = self.p.index_select(0, index)
        with torch.inference_mode(), unmodified(name_of(verifier), draft, p):
            verdict = verifier.verify(draft, p, self.rng(rows))
        return outcomes(verdict)


def outcomes(verdict: Verdict) -> list[tuple[int, int, list[int]]]:
    """Tau, token and path of each row."""
    lengths, tokens = verdict.length.tolist(), verdict.token.tolist()
    paths = [[]] * len(lengths) if verdict.path is None else verdict.path.tolist()
    return [(tau, token, path[: max(tau, 0)]) for tau, token, path in zip(lengths, tokens, paths, strict=True)]


@contextmanager
def unmodified(who: str, draft: Draft, p: Tensor) -> Iterator[None]:
    """Raise FaultError if the draft or p is changed inside."""
    before = {f"draft.{name}": tensor.clone() for name in FIELDS if (tensor := getattr(draft, name)) is not None}
    before["p"] = p.clone()
    yield
    now = {name: p if name == "p" else getattr(draft, name.removeprefix("draft.")) for name in before}
    # NaN is equal to itself here.
    changed = [
        name
        for name, tensor in before.items()
        if not isinstance(after := now[name], Tensor)
        or (after.shape, after.dtype) != (tensor.shape, tensor.dtype)
        or (not torch.equal(after, tensor) and bool((after != tensor).logical_and(after == after).any()))
    ]
    if changed:
        raise FaultError(f"{who} writes into {', '.join(changed)}; its inputs are read-only, copy what you change")


def check_quickly(make: Callable[[], Verifier], verifier: Verifier, call: Verification) -> None:
    """Verify some rows by a new verifier, half of them in reverse order by a used one; `check_fully` if they differ.

    Args:
        verifier: a verifier that has observed a step.

    Raises:
        FaultError: the fault that `check_fully` found.
    """
    b, stateful = call.draft.batch_size, verifier.traits(verifier.config).stateful
    rows = list(range(max(b - _ROWS, 0), b))
    first = call.repeat(make(), rows)
    half = len(rows) // 2
    expected = first[half:][::-1]
    if call.repeat(make() if stateful else verifier, rows[half:][::-1], start=stateful) != expected:
        check_fully(make, call)
        raise FaultError(
            f"{name_of(verifier)}: rows share state, or it keeps state: a row has another verdict when it is verified "
            "again, in a batch of other rows, with equal random numbers"
        )


def check_fully(
    make: Callable[[], Verifier], call: Verification, vocab_size: int | None = None, padding: bool = False
) -> None:
    """Look for the faults of this module in a call of ``verify``.

    Args:
        make: makes a new verifier.
        vocab_size: also validate the structure of the verdict.
        padding: also add an invalid node to chains.

    Raises:
        FaultError: a fault.
        ContractError: the structure of a verdict is invalid.
    """
    rows = list(range(call.draft.batch_size))
    used, files = make(), files_of(type(make()))
    who, traits = name_of(used), used.traits(used.config)
    with RandomWatch(files) as watch:
        first = call.repeat(used, rows)
    second = call.repeat(make(), rows)
    if watch.sites or first != second:
        raise FaultError(outside_of_rng(who, list(watch.sites)))
    used.observe([tau for tau, *_ in first], call.draft.count.tolist())
    if call.repeat(used, rows, start=traits.stateful) != first:
        raise FaultError(
            f"{who} keeps state after start(row), which must reset it"
            if traits.stateful
            else f"{who} keeps state from one step to the next: the second step differs from the first for equal "
            "inputs and equal decisions of rng. Remove the state, or set stateful=True in its traits and reset it "
            "in start(row)"
        )
    _check_rows(make, who, call, first)
    if padding:
        _check_padding(make, who, call, first)
    if vocab_size is not None:
        for row in range(len(rows)):
            used.start(row)
        call.restore(used, rows)
        with torch.inference_mode():
            verdict = used.verify(call.draft, call.p, call.rng(rows))
        validate_verdict(call.draft, verdict, vocab_size, verifier=who)


def _check_rows(
    make: Callable[[], Verifier], who: str, call: Verification, batched: Sequence[tuple[int, int, list[int]]]
) -> None:
    """Raise FaultError if a row has another verdict by itself than in the batch."""
    b = len(batched)
    for row in range(0, b, -(-b // _ROWS)):
        log: list[list[tuple[str, int]]] = []

        def verify(
            rows: Sequence[int], log: list[list[tuple[str, int]]] = log
        ) -> tuple[list[tuple[int, int, list[int]]], list[tuple[str, int]]]:
            log.append([])
            logged = Verification(call.draft, call.p, lambda rows: LoggedRng(call.rng(rows), log[-1]), call.restore)
            return logged.repeat(make(), rows), log[-1]

        single, own = verify([row])
        if single[0] == batched[row]:
            continue
        copies, of_copies = verify([row] * 4)
        _, of_batch = verify(range(b))
        difference = (
            f"row {row} of {b} has verdict {_shown(batched[row])} in the batch and {_shown(single[0])} by itself"
        )
        if any(copy != copies[0] for copy in copies):
            factor, others = "the number of the row", of_copies
        elif copies[0] != single[0]:
            factor, others = "the number of rows of the batch", of_copies
        else:
            factor, others = "the other rows of the batch (such as the widest draft)", of_batch
        moved = [key for key in others if key not in own]
        if sorted(set(own)) != sorted(set(others)) and moved:
            missing = [key for key in own if key not in others]
            shown = f"by itself the row takes {_keys(missing or own)}, in the batch {_keys(moved)}"
            raise FaultError(
                f"{who} takes a random number whose index depends on {factor}: {shown}; {difference}. An index must "
                "depend only on the node or level that it is for"
            )
        raise FaultError(
            f"{who}: rows share state: the verdict on a row depends on {factor}: {difference}. Use only row b of the "
            "inputs, and random numbers with an index that does not depend on the batch, for row b"
        )


def _check_padding(
    make: Callable[[], Verifier], who: str, call: Verification, before: Sequence[tuple[int, int, list[int]]]
) -> None:
    """Raise FaultError if a chain has another verdict beside an invalid node, as in a batch with longer drafts."""
    draft, p = call.draft, call.p
    if not draft.is_chain or not draft.width or (draft.q is not None and draft.q.shape[1] != draft.width):
        return
    last = draft.width - 1
    wider = Draft.chain(
        functional.pad(draft.tokens, (0, 1)),
        draft.count,
        None if draft.q is None else torch.cat([draft.q, draft.q.new_full((len(p), 1, p.shape[2]), 1 / p.shape[2])], 1),
    )
    wider.kind = draft.kind
    padded = Verification(wider, torch.cat([p, p[:, last : last + 1].flip(2)], 1), call.rng, call.restore)
    after = padded.repeat(make(), range(len(before)))
    for row, (narrow, wide) in enumerate(zip(before, after, strict=True)):
        if narrow != wide:
            raise FaultError(
                f"{who} reads beyond the end of a row: {draft_note(draft, row)} has verdict {_shown(narrow)}, and "
                f"{_shown(wide)} if a longer draft is in the batch, which adds an invalid node. A row ends after "
                "draft.count nodes, as draft.valid marks; the bonus token is drawn from p[b, draft.count[b]]"
            )


class LoggedRng:
    """A `StepRng` that lists purpose and index of each number it returns."""

    def __init__(self, rng: StepRng, log: list[tuple[str, int]]):
        self._rng, self._log = rng, log

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        self._log += [(purpose, index + i) for i in range(h.shape[1])]
        return self._rng.accept(h, purpose, index)

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        self._log.append((purpose, index))
        return self._rng.draw(weights, purpose, index)


def _keys(keys: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"'{purpose}' {index}" for purpose, index in dict.fromkeys(keys)) or "none"


def _shown(outcome: tuple[int, int, list[int]]) -> str:
    tau, token, _ = outcome
    return f"({tau} accepted, token {token})"


def name_of(verifier: Verifier) -> str:
    return f"verifier '{getattr(verifier, 'name', type(verifier).__name__)}'"
