"""Tensor parallelism: the first process leads the slots of a split model, the others follow (`models.distributed`).

Each process holds its shard of every weight that the architecture's tensor-parallel plan splits, and the keys and
values of its heads. All processes get the same outputs, because every sum is one all-reduce.
"""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn

from ..errors import CrossdraftError, ModelError, first_line
from ..models import distributed
from ..models.load import load_model
from ..models.placement import input_device, is_split, split_of
from .forward_pass import ForwardPass
from .layer_subset import LayerFork
from .ragged_lm import RaggedLM
from .transformers_lm import check_model

#: Models that passed the trial.
_tried: WeakSet[Any] = WeakSet()


class SplitLM(RaggedLM):
    """Slots of a split model, in the process that leads; all processes run each of its passes.

    Every model goes through the trial once: few architectures are known to be split as their cache and attention
    expect.
    """

    def __init__(self, model: Any, batch_size: int, max_length: int):
        self._key, split = distributed.next_key(), split_of(model)
        sizes = batch_size, max_length, split not in _tried
        forward_pass = distributed.run_everywhere(
            lambda: _checked_pass(model, *sizes), "slots", split.key, self._key, *sizes
        )
        super().__init__(forward_pass, batch_size, max_length)
        _tried.add(split)
        finalize(self, distributed.release_everywhere, self._key)

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
        if distributed.has_failed():  # nothing is decoded after that; clean-up must not hide the error
            self.lengths[row] = 0
        else:
            self._all("free", super().free, row)

    def fork(self, layers: Sequence[int], **_: Any) -> LayerFork:
        raise ModelError(
            f"the target is split over {distributed.count()} processes (device {distributed.SPLIT}), which cannot run "
            "some of its layers; use a drafter that is not part of its target, or a target on one device"
        )

    def _all(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method in every process; tensors follow the other arguments."""
        values = [argument for argument in arguments if not isinstance(argument, Tensor)]
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        with distributed.collective():
            state = self._key, list(self.lengths), self.hidden_layers
            distributed.broadcast_operation("pass", *state, name, values, tensors=tensors)
            return method(*arguments)


def _checked_pass(model: Any, batch_size: int, max_length: int, untried: bool) -> ForwardPass:
    """The passes of new slots. The first process decides if the trial runs: models may be other objects elsewhere."""
    check_model(model, max_length, untried)
    return ForwardPass.of(model, batch_size, max_length)


class Tables:
    """The part of a target larger than one device that draft heads may read: embedding and head, on its input device.

    Of a split target only these and its config are available.
    """

    def __init__(self, model: Any):
        self.config, self.dtype, self.device = model.config, model.dtype, input_device(model)
        self._model, self._gathered = model, list[Tensor]()

    def get_input_embeddings(self) -> nn.Module:
        return nn.Embedding.from_pretrained(self._tables[0], freeze=True)

    def get_output_embeddings(self) -> nn.Linear:
        weight = self._tables[1]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._gathered)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not is_split(self._model):
            return getattr(self._model, name)
        raise ModelError(
            f"the drafter reads {name} of its target, but of a target that is split over {distributed.count()} "
            f"processes (device {distributed.SPLIT}) only embedding and head are available; use another drafter"
        )

    @property
    def _tables(self) -> list[Tensor]:
        if not self._gathered and is_split(self._model):
            with distributed.collective():
                distributed.broadcast_operation("tables", split_of(self._model).key)
                self._gathered = _tables(self._model)
        elif not self._gathered:
            self._gathered = [table.to(self.device) for table in _tables(self._model)]
        return self._gathered


@torch.no_grad()
def _tables(model: Any) -> list[Tensor]:
    """Embedding and head ``[V, H]``, whole; one tensor if they are tied."""
    owners = model.get_input_embeddings(), model.get_output_embeddings()
    if owners[0].weight is owners[1].weight:
        return [_whole(owners[0])] * 2
    return [_whole(owner) for owner in owners]


def _whole(owner: nn.Module) -> Tensor:
    weight: Any = owner.weight
    if hasattr(weight, "full_tensor"):
        return weight.full_tensor()
    if weight.device.type == "meta":  # offloaded
        from accelerate.utils import align_module_device

        with align_module_device(owner):
            return owner.weight.detach().clone()  # type: ignore[operator]
    return weight.detach()


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
    distributed.init_process_group()
    objects: dict[int, Any] = {}
    device = torch.device("cuda", distributed.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    while True:
        try:
            step, arguments, tensors, dropped = distributed.receive(device)
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
                process = f"process {distributed.rank() + 1} of {distributed.count()}"
                print(f"crossdraft: error: {process}: {first_line(error)}", file=sys.stderr)
            return 1


def _step(objects: dict[int, Any], step: str, arguments: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
    if step == "load":
        key, name, options = arguments
        objects[key] = load_model(name, device=distributed.SPLIT, **options).model
    elif step == "slots":
        model, key, batch_size, max_length, untried = arguments
        forward_pass = distributed.run_everywhere(
            lambda: _checked_pass(objects[model], batch_size, max_length, untried), step
        )
        objects[key] = RaggedLM(forward_pass, batch_size, max_length)
    elif step == "tables":
        _tables(objects[arguments[0]])
    else:
        key, lengths, layers, name, values = arguments
        lm = objects[key]
        lm.lengths, lm.hidden_layers = lengths, layers
        getattr(lm, name)(*values, *tensors)
