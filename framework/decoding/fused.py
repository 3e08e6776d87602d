"""Verify steps made one piece by `torch.compile`: a few fused kernels in place of a hundred small operations.

A rule is written as it stands in its paper, in operations on whole tensors. Each of them reads and writes memory and
is launched by itself, which for a small target, or many rows of a large vocabulary, is more than the rule is worth.
Compiled code says the same tokens for the same random numbers, up to the rounding of sums.

Compiling takes seconds to minutes for each shape of a draft, so it is asked for (``compile_verifier`` in a recipe) and
done while a cell warms up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..draft import Draft, Verdict
from ..rng import CounterRound, RoundRng, UniformRound
from ..verifier import Verifier

logger = logging.getLogger(__name__)

#: Shapes of a draft that are compiled; further ones run as usual.
MOST_SHAPES = 4


class Fused(Verifier):
    """A rule without state, compiled for a shape of drafts when that comes for the second time.

    Where it cannot be compiled (no C++ compiler, say), there is one warning, and the rule runs as usual.

    Attributes:
        rule: the rule itself.
        compiling: whether new shapes are compiled; no longer, once a warm-up is over.
    """

    def __init__(self, rule: Verifier):
        if rule.traits.stateful:
            raise ValueError(f"'{rule.name}' keeps state on the host, which compiled code cannot read")
        super().__init__(rule.config)
        self.rule = rule
        self.name, self.traits = rule.name, rule.traits  # type: ignore[misc]
        self.compiling = True
        #: By shape; None = seen once.
        self._known: dict[Hashable, Callable[..., tuple[Tensor | None, ...]] | None] = {}

    @property
    def compiled(self) -> int:
        """Shapes there is compiled code for."""
        return sum(function is not None for function in self._known.values())

    def verify(self, draft: Draft, p: Tensor, rng: RoundRng) -> Verdict:
        if not isinstance(rng, CounterRound) or not draft.width:
            return self.rule.verify(draft, p, rng)
        most = max(16, 4 * (draft.width + 1))  # more than any rule of ours asks for
        uniforms = rng.table(most)[:, :, :most].contiguous()
        inputs = (draft.tokens, draft.parents, draft.valid, draft.q, draft.law, draft.sequences, p, uniforms)
        shapes = tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in inputs)
        key = (shapes, draft.drawn, draft.levels)
        if self._known.get(key) is None and not self._compiled(key, draft):
            return self.rule.verify(draft, p, rng)
        try:
            length, token, path, survival = self._known[key](*inputs)  # type: ignore[misc]
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            logger.warning("crossdraft: verifier '%s' runs uncompiled: %s", self.name, reason)
            self.compiling, self._known = False, {}
            return self.rule.verify(draft, p, rng)
        assert length is not None and token is not None
        return Verdict(length, token, path, survival)

    def _compiled(self, key: Hashable, draft: Draft) -> bool:
        """Whether there is compiled code for ``key`` now."""
        if not self.compiling:
            return False
        if key not in self._known:
            self._known[key] = None
            return False
        if self.compiled >= MOST_SHAPES:
            return False
        rule, drawn, levels = self.rule, draft.drawn, draft.levels

        def run(tokens, parents, valid, q, law, sequences, p, uniforms):  # type: ignore[no-untyped-def]
            again = _PlainDraft(tokens, parents, valid, q, law, drawn, sequences, levels)
            verdict = rule.verify(again, p, UniformRound(uniforms))
            return verdict.length, verdict.token, verdict.path, verdict.survival

        # What is compiled is found by code object, one after the other; with one of its own there is one to try.
        own = FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
        self._known[key] = torch.compile(own, fullgraph=True, dynamic=False)
        return True


#: A draft that keeps nothing it worked out: Python 3.11 does so under a lock, which cannot be compiled. The compiler
#: merges what is worked out twice.
_PlainDraft: Any = type(
    "_PlainDraft",
    (Draft,),
    {name: property(value.func) for name, value in vars(Draft).items() if isinstance(value, cached_property)},
)
