"""Verify steps compiled by PyTorch: a few fused kernels in place of a hundred small operations.

A rule is written as it stands in its paper, in operations on whole tensors. Each of them reads and writes memory and
is launched by itself, which for a small target, or many rows of a large vocabulary, is more than the rule is worth.
Compiled code says the same tokens for the same random numbers, up to the rounding of sums.

Compiling takes seconds to minutes for each shape of a draft, so it is asked for (``compile_verifier`` in a recipe) and
done while a cell warms up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..contracts.draft import Draft, Verdict
from ..contracts.rng import CounterStepRng, StepRng, UniformStepRng
from ..contracts.verifier import Verifier
from ..util.compilation import TensorFunction, compile_function

logger = logging.getLogger(__name__)

#: Shapes that are compiled; further ones run as usual.
MOST_SHAPES = 8

#: The verify step of a verifier: draft without probes, p and random numbers to a verdict.
VerifyFunction = Callable[[Draft, Tensor, StepRng], Verdict]


@dataclass
class _Compiled:
    """The code for inputs of one shape.

    Attributes:
        function: what to call.
        numbers: how many random numbers of each purpose it takes.
        path, survival: whether its verdicts have them.
    """

    function: TensorFunction
    numbers: int
    path: bool
    survival: bool


class CompiledVerifier:
    """The verify step of a verifier, compiled for a shape of its inputs when that occurs for the second time.

    If it cannot be compiled (no C++ compiler, say), there is one warning, and the verifier runs as usual.

    Attributes:
        rule: the verifier.
        compiling: compile new shapes; set to False after the warm-up.

    Raises:
        ValueError: the verifier keeps state that it does not hand over as tensors, see `Verifier.judge`.
    """

    def __init__(self, rule: Verifier):
        if not self.takes(rule):
            raise ValueError(f"'{rule.name}' keeps state on the host, which compiled code cannot read")
        self.rule = rule
        self.compiling = True
        #: Shapes seen so far, and their code if compiled.
        self._known: dict[Hashable, _Compiled | None] = {}

    @staticmethod
    def takes(rule: Verifier) -> bool:
        """Return True if ``rule`` can be compiled."""
        return not rule.traits(rule.config).stateful or type(rule).judge is not Verifier.judge

    @property
    def compiled(self) -> int:
        """Shapes there is compiled code for."""
        return sum(code is not None for code in self._known.values())

    def __call__(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        if not isinstance(rng, CounterStepRng) or not draft.width:
            return self.rule.verify(draft, p, rng)
        fields = {"tokens": draft.tokens, "parents": draft.parents, "valid": draft.valid}
        fields |= {"q": draft.q, "q_index": draft.q_index, "sequences": draft.sequences}
        given = {name: tensor for name, tensor in fields.items() if tensor is not None}
        inputs = [p, *given.values(), *self.rule.held(draft)]
        key = (
            tuple(given),
            draft.kind,
            draft.levels,
            draft.children,
            *((t.shape, t.stride(), t.dtype) for t in inputs),
        )
        compiled = self._known.get(key)
        if compiled is None and not (self.compiling and key in self._known and self.compiled < MOST_SHAPES):
            if self.compiling:
                self._known[key] = None
            return self.rule.verify(draft, p, rng)
        try:
            if compiled is None:
                compiled = self._known[key] = self._compile(draft, list(given), inputs, rng)
            length, token, *others = compiled.function([*inputs, _numbers(rng, compiled.numbers)])
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            logger.warning("crossdraft: verifier '%s' runs uncompiled: %s", self.rule.name, reason)
            self.compiling, self._known = False, {}
            return self.rule.verify(draft, p, rng)
        path = others.pop(0) if compiled.path else None
        survival = others.pop(0) if compiled.survival else None
        self.rule.hold(*others)
        return Verdict(length, token, path, survival)

    def _compile(self, draft: Draft, given: Sequence[str], inputs: list[Tensor], rng: UniformStepRng) -> _Compiled:
        """Code for ``inputs``: p, the ``given`` fields of the draft, held state; its own takes the uniforms too."""
        settled = {"kind": draft.kind, "levels": draft.levels, "children": draft.children}

        def judged(rng: StepRng, p: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
            fields: dict[str, Any] = {"q": None, **dict(zip(given, tensors, strict=False))}
            plain = _PlainDraft(**settled, **fields)
            verdict, *new = self.rule.judge(plain, p, rng, *tensors[len(given) :])
            return verdict.length, verdict.token, verdict.path, verdict.survival, *new

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(t for t in judged(UniformStepRng(tensors[-1]), *tensors[:-1]) if t is not None)

        # Once without values, to see what it takes and gives. On a CPU a rule may stop early and take fewer numbers.
        nowhere, zeros = torch.device("meta"), [0] * draft.batch_size
        count = CounterStepRng((0, 0), zeros, zeros, nowhere)
        _, _, path, survival, *_ = judged(count, *(tensor.to(nowhere) for tensor in inputs))
        numbers = count.table(1).shape[2]
        function = compile_function(step, [*inputs, _numbers(rng, numbers)])
        return _Compiled(function, numbers, path is not None, survival is not None)


def _numbers(rng: UniformStepRng, n: int) -> Tensor:
    """Exactly ``n`` of each purpose."""
    return rng.table(n)[:, :, :n].contiguous()


#: A draft that keeps nothing it worked out: Python 3.11 does so under a lock, which cannot be compiled. The compiler
#: merges what is worked out twice.
_PlainDraft: Any = type(
    "_PlainDraft",
    (Draft,),
    {name: property(value.func) for name, value in vars(Draft).items() if isinstance(value, cached_property)},
)
