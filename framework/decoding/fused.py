"""Verify steps compiled by PyTorch: a few fused kernels in place of a hundred small operations.

A rule is written as it stands in its paper, in operations on whole tensors. Each of them reads and writes memory and
is launched by itself, which for a small target, or many rows of a large vocabulary, is more than the rule is worth.
Compiled code says the same tokens for the same random numbers, up to the rounding of sums.

Compiling takes seconds to minutes for each shape of a draft, so it is asked for (``compile_verifier`` in a recipe) and
done while a cell warms up.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..draft import Draft, Verdict
from ..rng import CounterRound, RoundRng, UniformRound
from ..verifier import Verifier

logger = logging.getLogger(__name__)

#: Shapes that are compiled; further ones run as usual.
MOST_SHAPES = 8

Function = Callable[[list[Tensor]], Sequence[Tensor]]


@dataclass
class _Shape:
    """What is known of a shape of inputs.

    Attributes:
        numbers: random numbers that the rule takes of a purpose, at most.
        path, survival: whether its verdicts have them.
        function: the code, once it is compiled.
    """

    numbers: int
    path: bool
    survival: bool
    function: Function | None = None


class Fused(Verifier):
    """A rule that is compiled for a shape of its inputs when that comes for the second time.

    Where it cannot be compiled (no C++ compiler, say), there is one warning, and the rule runs as usual.

    Attributes:
        rule: the rule itself.
        compiling: whether new shapes are compiled; no longer, once a warm-up is over.

    Raises:
        ValueError: a rule with state that it does not hand over as tensors, see `Verifier.judge`.
    """

    def __init__(self, rule: Verifier):
        if not self.takes(type(rule)):
            raise ValueError(f"'{rule.name}' keeps state on the host, which compiled code cannot read")
        super().__init__(rule.config)
        self.rule = rule
        self.name, self.traits = rule.name, rule.traits  # type: ignore[misc]
        self.compiling = True
        self._known: dict[Hashable, _Shape] = {}

    @staticmethod
    def takes(rule: type[Verifier]) -> bool:
        """Whether ``rule`` can be compiled."""
        return not rule.traits.stateful or rule.judge is not Verifier.judge

    @property
    def compiled(self) -> int:
        """Shapes there is compiled code for."""
        return sum(shape.function is not None for shape in self._known.values())

    def verify(self, draft: Draft, p: Tensor, rng: RoundRng) -> Verdict:
        if not isinstance(rng, CounterRound) or not draft.width:
            return self.rule.verify(draft, p, rng)
        fields = {"tokens": draft.tokens, "parents": draft.parents, "valid": draft.valid}
        fields |= {"q": draft.q, "law": draft.law, "sequences": draft.sequences}
        given = {name: tensor for name, tensor in fields.items() if tensor is not None}
        inputs = [p, *given.values(), *self.rule.held(draft)]
        key = (tuple(given), draft.drawn, draft.levels, *((t.shape, t.stride(), t.dtype) for t in inputs))
        shape = self._known.get(key)
        if shape is None or (shape.function is None and not (self.compiling and self.compiled < MOST_SHAPES)):
            verdict = self.rule.verify(draft, p, rng)
            if self.compiling:
                numbers = rng.table(1).shape[2]  # there are as many as were asked for
                self._known[key] = _Shape(numbers, verdict.path is not None, verdict.survival is not None)
            return verdict
        inputs.append(rng.table(shape.numbers)[:, :, : shape.numbers].contiguous())
        try:
            if shape.function is None:
                shape.function = compile_step(_step(self.rule, draft, list(given)), inputs)
            length, token, *others = shape.function(inputs)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            logger.warning("crossdraft: verifier '%s' runs uncompiled: %s", self.name, reason)
            self.compiling, self._known = False, {}
            return self.rule.verify(draft, p, rng)
        path = others.pop(0) if shape.path else None
        survival = others.pop(0) if shape.survival else None
        self.rule.hold(*others)
        return Verdict(length, token, path, survival)

    def begin(self, row: int) -> None:
        self.rule.begin(row)

    def observe(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        self.rule.observe(accepted, drafted)

    def retire(self, row: int) -> None:
        self.rule.retire(row)

    def snapshot(self, row: int) -> Hashable:
        return self.rule.snapshot(row)

    def restore(self, row: int, snapshot: Hashable) -> None:
        self.rule.restore(row, snapshot)


def _step(rule: Verifier, draft: Draft, given: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    """``rule`` on drafts like this one: p, the ``given`` fields, held state, uniforms -> verdict and new state, without
    what is None."""
    drawn, levels = draft.drawn, draft.levels

    def step(p: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        fields: dict[str, Any] = {"q": None, **dict(zip(given, tensors, strict=False))}
        held, uniforms = tensors[len(given) : -1], tensors[-1]
        verdict, *new = rule.judge(_PlainDraft(drawn=drawn, levels=levels, **fields), p, UniformRound(uniforms), *held)
        outputs = (verdict.length, verdict.token, verdict.path, verdict.survival, *new)
        return tuple(tensor for tensor in outputs if tensor is not None)

    return step


def compile_step(step: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> Function:
    """Code for ``step`` on tensors laid out like ``inputs``; what makes it impossible is raised now or by a call.

    On a CPU not by `torch.compile`: what its code does on every call before the first kernel takes longer than a small
    verify step.
    """
    return ahead_of_time(step, inputs) if inputs[0].device.type == "cpu" else just_in_time(step)


def just_in_time(step: Callable[..., tuple[Tensor, ...]]) -> Function:
    # What is compiled is found by code object, one after the other; with one of its own there is one to try.
    own = FunctionType(step.__code__.replace(), step.__globals__, closure=step.__closure__)
    function = torch.compile(own, fullgraph=True, dynamic=False)
    return lambda tensors: function(*tensors)


def ahead_of_time(step: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> Function:
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    with TemporaryDirectory(prefix="crossdraft-") as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own code
        program = torch.export.export(_Step(step), tuple(inputs))
        package = aoti_compile_and_package(program, package_path=str(Path(directory) / "step.pt2"))
        return aoti_load_package(package).loader.run  # type: ignore[union-attr]


class _Step(nn.Module):
    """A function as `torch.export` takes it."""

    def __init__(self, step: Callable[..., tuple[Tensor, ...]]):
        super().__init__()
        self.step = step

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.step(*tensors)


#: A draft that keeps nothing it worked out: Python 3.11 does so under a lock, which cannot be compiled. The compiler
#: merges what is worked out twice.
_PlainDraft: Any = type(
    "_PlainDraft",
    (Draft,),
    {name: property(value.func) for name, value in vars(Draft).items() if isinstance(value, cached_property)},
)
