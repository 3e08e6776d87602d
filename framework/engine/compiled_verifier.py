"""Verify steps compiled by PyTorch: a few fused kernels in place of a hundred small operations.

Verifiers are written as in their papers, in operations on whole tensors, each with its own launch and memory traffic,
which is costly for a small target or a large vocabulary. Compiled code emits the same tokens for the same random
numbers, up to the rounding of sums.

Compiling takes seconds to minutes for each shape of a draft, so it is opt-in (``compile_verifier`` in a recipe) and
happens during the warm-up of a cell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contracts.draft import Draft, Verdict
from ..contracts.rng import CounterStepRng, StepRng, UniformStepRng
from ..contracts.verifier import Verifier
from ..util.compilation import TensorFunction, compile_function

logger = logging.getLogger(__name__)

#: Maximum number of compiled shapes; further ones run uncompiled.
MOST_SHAPES = 8

#: The verify step of a verifier: draft without probes, p and random numbers to a verdict.
VerifyFunction = Callable[[Draft, Tensor, StepRng], Verdict]


@dataclass
class _Compiled:
    """Compiled code for inputs of one shape.

    Attributes:
        function: the compiled function.
        numbers: random numbers of each purpose that it takes.
        path, survival: True if its verdicts have them.
    """

    function: TensorFunction
    numbers: int
    path: bool
    survival: bool


class CompiledVerifier:
    """The verify step of a verifier, compiled when a shape of its inputs occurs for the second time.

    If compiling fails (without a C++ compiler, for example), it logs one warning and runs the verifier uncompiled.

    Attributes:
        verifier: the verifier.
        compiling: compile new shapes; set to False after the warm-up.

    Raises:
        ValueError: the verifier is stateful and does not define `Verifier.verify_with_state`.
    """

    def __init__(self, verifier: Verifier):
        if not self.supports(verifier):
            raise ValueError(f"'{verifier.name}' keeps state on the host, which compiled code cannot read")
        self.verifier = verifier
        self.compiling = True
        #: Shapes seen so far, and their code if compiled.
        self._known: dict[Hashable, _Compiled | None] = {}

    @staticmethod
    def supports(verifier: Verifier) -> bool:
        """Return True if ``verifier`` can be compiled."""
        return (
            not verifier.traits(verifier.config).stateful
            or type(verifier).verify_with_state is not Verifier.verify_with_state
        )

    @property
    def compiled(self) -> int:
        """Number of compiled shapes."""
        return sum(code is not None for code in self._known.values())

    def __call__(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        if not isinstance(rng, CounterStepRng) or not draft.width:
            return self.verifier.verify(draft, p, rng)
        fields = {"tokens": draft.tokens, "parents": draft.parents, "valid": draft.valid}
        fields |= {"q": draft.q, "q_index": draft.q_index, "sequences": draft.sequences}
        tensors = {name: tensor for name, tensor in fields.items() if tensor is not None}
        inputs = [p, *tensors.values(), *self.verifier.state_tensors(draft)]
        key = (
            tuple(tensors),
            draft.kind,
            draft.trunk,
            draft.levels,
            draft.children,
            *((t.shape, t.stride(), t.dtype) for t in inputs),
        )
        compiled = self._known.get(key)
        if compiled is None and not (self.compiling and key in self._known and self.compiled < MOST_SHAPES):
            if self.compiling:
                self._known[key] = None
            return self.verifier.verify(draft, p, rng)
        try:
            if compiled is None:
                compiled = self._known[key] = self._compile(draft, list(tensors), inputs, rng)
            length, token, *others = compiled.function([*inputs, _numbers(rng, compiled.numbers)])
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            logger.warning("crossdraft: verifier '%s' runs uncompiled: %s", self.verifier.name, reason)
            self.compiling, self._known = False, {}
            return self.verifier.verify(draft, p, rng)
        path = others.pop(0) if compiled.path else None
        survival = others.pop(0) if compiled.survival else None
        self.verifier.store_state(*others)
        return Verdict(length, token, path, survival)

    def _compile(self, draft: Draft, names: Sequence[str], inputs: list[Tensor], rng: UniformStepRng) -> _Compiled:
        """Compile for ``inputs``: p, the fields ``names`` of the draft, and state; the code also takes the uniforms."""
        constants = {"kind": draft.kind, "levels": draft.levels, "children": draft.children}

        def verify(rng: StepRng, p: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
            fields: dict[str, Any] = {**constants, **dict(zip(names, tensors, strict=False))}
            verdict, *state = self.verifier.verify_with_state(Draft(**fields), p, rng, *tensors[len(names) :])
            return verdict.length, verdict.token, verdict.path, verdict.survival, *state

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(t for t in verify(UniformStepRng(tensors[-1]), *tensors[:-1]) if t is not None)

        # A run on the meta device counts the random numbers and outputs. (On a CPU a verifier may stop early.)
        meta, zeros = torch.device("meta"), [0] * draft.batch_size
        count = CounterStepRng((0, 0), zeros, zeros, meta)
        _, _, path, survival, *_ = verify(count, *(tensor.to(meta) for tensor in inputs))
        numbers = count.table(1).shape[2]
        function = compile_function(step, [*inputs, _numbers(rng, numbers)])
        return _Compiled(function, numbers, path is not None, survival is not None)


def _numbers(rng: UniformStepRng, n: int) -> Tensor:
    """Exactly ``n`` uniforms of each purpose."""
    return rng.table(n)[:, :, :n].contiguous()
