"""A model that several processes hold together: the first leads its slots, the others follow (`models.distributed`).

Each process has its part of every weight that transformers' plan of the architecture splits, and the keys and values
of its part of the heads. What a pass says is the same tensor in all of them: sums are made by one all-reduce, whose
result every process takes.
"""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
        finalize(self, distributed.release, self._key)

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
        if distributed.has_failed():  # nothing is decoded after that, and clearing up must not hide what went wrong
            self.lengths[row] = 0
        else:
            self._all("free", super().free, row)

    def fork(
        self,
        layers: Sequence[int],
        *,
        no_attention: Collection[int] = (),
        no_mlp: Collection[int] = (),
        embeddings: Tensor | None = None,
    ) -> LayerFork:
        raise ModelError(
            f"the target is split over {distributed.count()} processes (device {distributed.SPLIT}), which run all of "
            "its layers or none; take a drafter that is no part of its target, or a target on one device"
        )

    def _all(self, name: str, mine: Callable[..., Any], *arguments: Any) -> Any:
        values = [one for one in arguments if not isinstance(one, Tensor)]
        tensors = [one for one in arguments if isinstance(one, Tensor)]
        with distributed.collective():
            books = self._key, list(self.lengths), self.hidden_layers
            distributed.broadcast_operation("pass", *books, name, values, tensors=tensors)
            return mine(*arguments)


def _checked_pass(model: Any, batch_size: int, max_length: int, untried: bool) -> ForwardPass:
    """The passes of new slots. The first process decides if the trial runs: models may be other objects elsewhere."""
    check_model(model, max_length, untried)
    return ForwardPass.of(model, batch_size, max_length)


class Tables:
    """What drafting heads may know of a target larger than one device: its embedding and head are put together, there
    where it takes tokens. Of a split one there is its config beside them, and nothing else."""

    def __init__(self, model: Any):
        self.config, self.dtype, self.device = model.config, model.dtype, input_device(model)
        self._model, self._found = model, list[Tensor]()

    def get_input_embeddings(self) -> nn.Module:
        return nn.Embedding.from_pretrained(self._tables[0], freeze=True)

    def get_output_embeddings(self) -> nn.Linear:
        weight = self._tables[1]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._found)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not is_split(self._model):
            return getattr(self._model, name)
        raise ModelError(
            f"a drafter that reads more of its target than embedding and head ({name}) cannot draft for one that is "
            f"split over {distributed.count()} processes (device {distributed.SPLIT}); take another drafter"
        )

    @property
    def _tables(self) -> list[Tensor]:
        if not self._found and is_split(self._model):
            with distributed.collective():
                distributed.broadcast_operation("tables", split_of(self._model).key)
                self._found = _tables(self._model)
        elif not self._found:
            self._found = [table.to(self.device) for table in _tables(self._model)]
        return self._found


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
    if weight.device.type == "meta":  # it is not in memory
        from accelerate.utils import align_module_device

        with align_module_device(owner):
            return owner.weight.detach().clone()  # type: ignore[operator]
    return weight.detach()


def follow() -> int:
    """What every process but the first does: make its part of each step, until there are no more."""
    for number in (signal.SIGINT, signal.SIGTERM):  # nothing of it is worth waiting for
        signal.signal(number, signal.SIG_DFL)
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("crossdraft").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    distributed.init_process_group()
    held: dict[int, Any] = {}
    device = torch.device("cuda", distributed.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    while True:
        try:
            step, arguments, tensors, dropped = distributed.receive(device)
        except RuntimeError:  # the first process has ended, and said why
            return 0
        for key in dropped:
            held.pop(key, None)
        if step == "end":
            return 0
        try:
            _step(held, step, arguments, tensors)
        except CrossdraftError:  # the first process knows, and tells
            continue
        except Exception as error:
            if "closed by peer" not in str(error):
                where = f"process {distributed.rank() + 1} of {distributed.count()}"
                print(f"crossdraft: error: {where}: {first_line(error)}", file=sys.stderr)
            return 1


def _step(held: dict[int, Any], step: str, arguments: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
    if step == "load":
        key, name, options = arguments
        held[key] = load_model(name, device=distributed.SPLIT, **options).model
    elif step == "slots":
        model, key, batch_size, max_length, untried = arguments
        forward_pass = distributed.run_everywhere(
            lambda: _checked_pass(held[model], batch_size, max_length, untried), step
        )
        held[key] = RaggedLM(forward_pass, batch_size, max_length)
    elif step == "tables":
        _tables(held[arguments[0]])
    else:
        key, lengths, layers, name, values = arguments
        lm = held[key]
        lm.lengths, lm.hidden_layers = lengths, layers
        getattr(lm, name)(*values, *tensors)
