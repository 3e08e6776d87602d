"""Tensor parallelism: the first process leads the slots of a split model, the others follow (`processes`).

Each process holds its shard of every weight that the architecture's tensor-parallel plan splits, and the keys and
values of its heads. All processes get the same outputs, because every sum is one all-reduce.
"""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from crossdraft import CrossdraftError, Fork, ModelError, first_line, load_model
from crossdraft.framework.lm.tables import Tables
from crossdraft.framework.models.placement import SPLIT, process_count
from crossdraft.models import ForwardPass, RaggedLM, check_model

from . import processes


class SplitModel:
    """Key of a split model, shared with copies of its modules; its shards are released with it."""

    def __init__(self, key: int):
        self.key = key
        finalize(self, processes.release_everywhere, key)

    def slots(self, model: Any, batch_size: int, max_length: int) -> SplitLM:
        """Slots whose passes all processes run."""
        return SplitLM(model, self, batch_size, max_length)

    def tables(self, model: Any) -> SplitTables:
        """Embedding and head, for draft heads."""
        return SplitTables(model, self.key)


#: Models that passed the trial.
_tried: WeakSet[SplitModel] = WeakSet()


class SplitLM(RaggedLM):
    """Slots of a split model, in the process that leads; all processes run each of its passes.

    Every model goes through the trial once: few architectures are known to be split as their cache and attention
    expect.
    """

    def __init__(self, model: Any, split: SplitModel, batch_size: int, max_length: int):
        self._key = processes.next_key()
        sizes = batch_size, max_length, split not in _tried
        forward_pass = processes.run_everywhere(
            lambda: _checked_pass(model, *sizes), "slots", split.key, self._key, *sizes
        )
        super().__init__(forward_pass, batch_size, max_length)
        _tried.add(split)
        finalize(self, processes.release_everywhere, self._key)

    def start(self, row: int, prompt: Sequence[int], **inputs: Tensor) -> Tensor | None:
        return self._all("start", super().start, row, list(prompt))

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        self._all("prefill", super().prefill, {row: list(tokens) for row, tokens in prompts.items()})

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, resume_from: Any = None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self._all("forward", super().forward, *([tokens] if parents is None else [tokens, parents]))

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        self._all("commit", super().commit, list(counts), *([] if path is None else [path]))

    def free(self, row: int) -> None:
        if processes.has_failed():  # nothing is decoded after that; clean-up must not hide the error
            self.lengths[row] = 0
        else:
            self._all("free", super().free, row)

    def fork(self, layers: Sequence[int], **_: Any) -> Fork:
        raise ModelError(
            f"the target is split over {process_count()} processes (device {SPLIT}), which cannot run "
            "some of its layers; use a drafter that is not part of its target, or a target on one device"
        )

    def _all(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method in every process; tensors follow the other arguments."""
        values = [argument for argument in arguments if not isinstance(argument, Tensor)]
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        with processes.collective():
            state = self._key, list(self.lengths), self.hidden_layers
            processes.broadcast_operation("pass", *state, name, values, tensors=tensors)
            return method(*arguments)


def _checked_pass(model: Any, batch_size: int, max_length: int, untried: bool) -> ForwardPass:
    """The passes of new slots. The first process decides if the trial runs: models may be other objects elsewhere."""
    check_model(model, max_length, untried)
    return ForwardPass.of(model, batch_size, max_length)


class SplitTables(Tables):
    """Embedding and head of a split target; of the rest only its config is available."""

    def __init__(self, model: Any, key: int):
        super().__init__(model)
        self._key = key

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            return super().__getattr__(name)
        raise ModelError(
            f"the drafter reads {name} of its target, but of a target that is split over {process_count()} "
            f"processes (device {SPLIT}) only embedding and head are available; use another drafter"
        )

    def _gather(self) -> list[Tensor]:
        with processes.collective():
            processes.broadcast_operation("tables", self._key)
            return Tables.tables_of(self._model)


def follow() -> int:
    """Run the steps of the first process in every other process, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # there is nothing to clean up
        signal.signal(number, signal.SIG_DFL)
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("crossdraft").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    processes.init_process_group()
    objects: dict[int, Any] = {}
    device = torch.device("cuda", processes.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    while True:
        try:
            step, arguments, tensors, dropped = processes.receive(device)
        except RuntimeError:  # the first process has ended and reported the reason
            return 0
        for key in dropped:
            objects.pop(key, None)
        if step == "end":
            return 0
        try:
            _step(objects, step, arguments, tensors)
        except CrossdraftError:  # reported by the first process
            continue
        except Exception as error:
            if "closed by peer" not in str(error):
                process = f"process {processes.rank() + 1} of {process_count()}"
                print(f"crossdraft: error: {process}: {first_line(error)}", file=sys.stderr)
            return 1


def _step(objects: dict[int, Any], step: str, arguments: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
    if step == "load":
        key, name, options = arguments
        objects[key] = load_model(name, device=SPLIT, **options).model
    elif step == "slots":
        model, key, batch_size, max_length, untried = arguments
        forward_pass = processes.run_everywhere(
            lambda: _checked_pass(objects[model], batch_size, max_length, untried), step
        )
        objects[key] = RaggedLM(forward_pass, batch_size, max_length)
    elif step == "tables":
        Tables.tables_of(objects[arguments[0]])
    else:
        key, lengths, layers, name, values = arguments
        lm = objects[key]
        lm.lengths, lm.hidden_layers = lengths, layers
        getattr(lm, name)(*values, *tensors)
