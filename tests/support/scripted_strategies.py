"""A scripted drafter and verifier, on a toy of 64 tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crossdraft.framework.certificate.table_lm import ToyContext
from crossdraft.framework.contracts.draft import Draft, Sequences, Verdict
from crossdraft.framework.contracts.draft_kind import (
    ANY_TREE,
    CHAIN,
    DETERMINISTIC,
    GREEDY_DRAFT,
    IID,
    WITHOUT_REPLACEMENT,
)
from crossdraft.framework.contracts.drafter import Drafter, DraftTraits, StrategyConfig
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.verifier import Verifier, VerifierTraits
from crossdraft.framework.engine.decoder import Decoder

V, B = 64, 2
UNIFORM = torch.full((V,), 1 / V)
KINDS = ("chain", "point", "wor", "greedy", "top", "iid")
DRAFT_KINDS = {
    "chain": CHAIN,
    "point": CHAIN,
    "wor": WITHOUT_REPLACEMENT,
    "greedy": GREEDY_DRAFT,
    "top": DETERMINISTIC,
    "iid": IID,
}


def honest(kind: str, vocabulary: int = V) -> Draft:
    """A chain of three, or a tree: two children of the root, one below each."""
    probs = torch.full((vocabulary,), 1 / vocabulary)
    if kind in ("chain", "point"):
        q = probs.expand(B, 3, -1).clone() if kind == "chain" else None
        return Draft.chain(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 2]), q)
    if kind == "iid":
        sequences = torch.tensor([[[1, 2], [3, 2]], [[1, 2], [1, 3]]])
        return Draft.iid(sequences, torch.tensor([2, 2]), probs.expand(B, 3, -1).clone())
    tokens = torch.tensor([[1, 2, 3, 3], [5, 6, 7, 8]])
    parents, valid = torch.tensor([[-1, -1, 0, 1]] * B), torch.tensor([[True] * 4, [True, False, True, False]])
    q = None
    if kind != "top":
        q = probs.expand(B, 4, -1).clone()
        for row, token in enumerate(tokens[:, 0].tolist()):
            q[row, 1, token] = 0
            q[row, 1] /= q[row, 1].sum()
            if kind == "greedy":
                q[row, 0] = 0
                q[row, 0, token] = 1
    return Draft(tokens, parents, valid, q, kind=DRAFT_KINDS[kind])


def verdict_of(kind: str) -> Verdict:
    """Probabilities of the honest draft."""
    one = torch.ones(B, dtype=torch.long)
    if kind in ("chain", "point"):
        return Verdict(one, 9 * one, survival=torch.full((B, 3), 0.5, dtype=torch.float64))
    return Verdict(2 * one, 9 * one, torch.tensor([[0, 2, -1, -1]] * B))


class Seeded(Drafter):
    name = "seeded"

    class Config(StrategyConfig):
        kind: str
        vocabulary: int = V
        change: Any = None

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(DRAFT_KINDS[config.kind], config.kind in ("point", "top"), 5, levels=4)

    def propose(self, sequences: Sequences, rng: Any) -> Draft:
        draft, change = honest(self.config.kind, self.config.vocabulary), self.config.change  # type: ignore
        changed = None if change is None else change(draft, sequences)
        return draft if changed is None else changed


class Fixed(Verifier):
    name = "fixed"

    class Config(StrategyConfig):
        kind: str
        change: Any = None

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=ANY_TREE)

    def verify(self, draft: Draft, p: Tensor, rng: Any) -> Verdict:
        verdict, change = verdict_of(self.config.kind), self.config.change  # type: ignore[attr-defined]
        changed = None if change is None else change(verdict, p)
        return verdict if changed is None else changed


def decoder(
    kind: str, draft: Callable | None = None, verdict: Callable | None = None, rule: Verifier | None = None, **loop: Any
) -> Decoder:
    context = ToyContext(UNIFORM.expand(V + 1, V), UNIFORM.expand(V + 1, V), Sampling(), B)
    drafter = Seeded(Seeded.Config(kind=kind, change=draft), context)
    fixed = rule if rule is not None else Fixed(Fixed.Config(kind=kind, change=verdict))
    assert context.target is not None
    return Decoder(context.target, drafter, fixed, sampling=Sampling(), **{"max_new_tokens": 12, **loop})


def first_step(decoder: Decoder) -> None:
    for row in range(B):
        decoder.start(row, [10 + row], row, row, f"prompt {row}")
    decoder.step()


def at(name: str, place: Any, value: Any) -> Callable:
    """Put ``value`` into a field of the draft or verdict."""

    def change(group: Any, _: Any) -> None:
        setattr(group, name, getattr(group, name).clone())
        getattr(group, name)[place] = value

    return change
