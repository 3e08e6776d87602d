"""Verifiers with one mistake each, which a failed certificate must name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossdraft import SINGLE_CHILD, Draft, StepRng, Verdict, Verifier, VerifierTraits
from crossdraft.framework import plugins


class Honest(Verifier):
    """Token verification in four pieces, which a mistake replaces."""

    name = "faulty"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}))

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        tau = self.count(rng.accept(self.acceptance(draft, p) * draft.valid), draft)
        return Verdict(tau, self.token(draft, p, tau, rng))

    def acceptance(self, draft: Draft, p: Tensor) -> Tensor:
        x = draft.tokens[..., None]
        return (p[:, :-1].gather(2, x) / self.q(draft, p).gather(2, x)).squeeze(2).clamp(max=1).nan_to_num(0.0)

    def q(self, draft: Draft, p: Tensor) -> Tensor:
        """``[B, N, V]``."""
        if draft.q is None:
            return torch.zeros_like(p[:, :-1]).scatter_(2, draft.tokens[..., None], 1.0)
        return draft.q[:, : draft.width]

    def count(self, accepted: Tensor, draft: Draft) -> Tensor:
        return accepted.long().cumprod(1).sum(1)

    def token(self, draft: Draft, p: Tensor, tau: Tensor, rng: StepRng) -> Tensor:
        rows = torch.arange(len(tau))
        if not draft.width:
            return rng.draw(p[:, 0])
        q = torch.cat([self.q(draft, p), torch.zeros_like(p[:, :1])], 1)[rows, tau]
        q = q * (tau < draft.count)[:, None]
        weights = self.residual(p[rows, tau], q, draft, p, tau)
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, p[rows, tau])
        bonus = self.bonus(draft, p, tau)
        return self.draw(rng, torch.where((tau < draft.count)[:, None], weights, bonus), draft)

    def residual(self, p_tau: Tensor, q_tau: Tensor, draft: Draft, p: Tensor, tau: Tensor) -> Tensor:
        return (p_tau - q_tau).clamp(min=0)

    def bonus(self, draft: Draft, p: Tensor, tau: Tensor) -> Tensor:
        return p[torch.arange(len(tau)), tau]

    def draw(self, rng: StepRng, weights: Tensor, draft: Draft) -> Tensor:
        return rng.draw(weights)


class NoResidual(Honest):
    def residual(self, p_tau: Tensor, *_: Any) -> Tensor:
        return p_tau


class BonusElsewhere(Honest):
    def bonus(self, draft: Draft, p: Tensor, tau: Tensor) -> Tensor:
        return p[torch.arange(len(tau)), (tau - 1).clamp(min=0)]


class IndexByWidth(Honest):
    def draw(self, rng: StepRng, weights: Tensor, draft: Draft) -> Tensor:
        return rng.draw(weights, index=len(weights) % 7)


class Crashes(Honest):
    def residual(self, p_tau: Tensor, q_tau: Tensor, draft: Draft, *_: Any) -> Tensor:
        if int(draft.tokens[0].sum()) >= 0:
            raise RuntimeError("boom")
        return p_tau


class TorchRand(Honest):
    def draw(self, rng: StepRng, weights: Tensor, draft: Draft) -> Tensor:
        cdf = weights.cumsum(1) / weights.sum(1, keepdim=True)
        return (torch.rand(len(cdf), 1) > cdf).sum(1).clamp(max=weights.shape[1] - 1)


class Multinomial(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def draw(self, rng: StepRng, weights: Tensor, draft: Draft) -> Tensor:
        return torch.multinomial(weights, 1, generator=self.generator).squeeze(1)


class NumpyRandom(Honest):
    def draw(self, rng: StepRng, weights: Tensor, draft: Draft) -> Tensor:
        uniform = torch.from_numpy(np.random.rand(len(weights), 1))
        return (uniform > weights.cumsum(1) / weights.sum(1, keepdim=True)).sum(1).clamp(max=weights.shape[1] - 1)


class OwnNumpyGenerator(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.numpy = np.random.default_rng()

    def draw(self, rng: StepRng, weights: Tensor, draft: Draft) -> Tensor:
        uniform = torch.from_numpy(self.numpy.random((len(weights), 1)))
        return (uniform > weights.cumsum(1) / weights.sum(1, keepdim=True)).sum(1).clamp(max=weights.shape[1] - 1)


class Swapped(Honest):
    def acceptance(self, draft: Draft, p: Tensor) -> Tensor:
        x = draft.tokens[..., None]
        return (self.q(draft, p).gather(2, x) / p[:, :-1].gather(2, x)).squeeze(2).clamp(max=1)


class PAfterTheToken(Honest):
    def acceptance(self, draft: Draft, p: Tensor) -> Tensor:
        x = draft.tokens[..., None]
        return (p[:, 1:].gather(2, x) / self.q(draft, p).gather(2, x)).squeeze(2).clamp(max=1)


class SumOfCoins(Honest):
    def count(self, accepted: Tensor, draft: Draft) -> Tensor:
        return accepted.long().sum(1)


class IgnoresQ(Honest):
    """Accepts every draft as if it were a point mass."""

    def acceptance(self, draft: Draft, p: Tensor) -> Tensor:
        return p[:, :-1].gather(2, draft.tokens[..., None]).squeeze(2)


class PointMassResidual(Honest):
    def residual(self, p_tau: Tensor, q_tau: Tensor, draft: Draft, *_: Any) -> Tensor:
        return p_tau if draft.q is None else super().residual(p_tau, q_tau, draft, *_)


class SiblingsQ(Honest):
    def q(self, draft: Draft, p: Tensor) -> Tensor:
        return super().q(draft, p)[:, :1].expand(-1, draft.width, -1)


class AcceptsPadding(Honest):
    """Forgets where a row ends."""

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        tau = self.count(rng.accept(self.acceptance(draft, p)), draft)
        return Verdict(tau, self.token(draft, p, tau, rng))


class BonusAtTheWidth(Honest):
    """Right for drafts of full length."""

    def bonus(self, draft: Draft, p: Tensor, tau: Tensor) -> Tensor:
        return p[:, -1]


class Abs(Honest):
    def residual(self, p_tau: Tensor, q_tau: Tensor, *_: Any) -> Tensor:
        return (p_tau - q_tau).abs()


class NegativeResidual(Honest):
    def residual(self, p_tau: Tensor, q_tau: Tensor, *_: Any) -> Tensor:
        return p_tau - q_tau

    def token(self, draft: Draft, p: Tensor, tau: Tensor, rng: StepRng) -> Tensor:
        rows = torch.arange(len(tau))
        q = torch.cat([self.q(draft, p), torch.zeros_like(p[:, :1])], 1)[rows, tau] if draft.width else 0 * p[:, 0]
        return rng.draw(p[rows, tau] - q * (tau < draft.count)[:, None])


class SameNumber(Honest):
    """One number for the acceptance and for the residual."""

    def draw(self, rng: StepRng, weights: Tensor, draft: Draft) -> Tensor:
        return rng.draw(weights, "accept", 0)


class ArgmaxOfQ(Honest):
    """Wrong at temperature 0."""

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        verdict = super().verify(draft, p, rng)
        if draft.width and bool((p.amax(2) == 1).all()):
            verdict = Verdict(verdict.length, self.q(draft, p)[:, 0].argmax(1))
        return verdict


class RowsShareState(Honest):
    def acceptance(self, draft: Draft, p: Tensor) -> Tensor:
        return super().acceptance(draft, p)[:1].expand(draft.batch_size, -1)


class IndexByRow(Honest):
    def draw(self, rng: StepRng, weights: Tensor, draft: Draft) -> Tensor:
        drawn = torch.stack([rng.draw(weights, index=row % 5) for row in range(min(len(weights), 5))], 1)
        return drawn[torch.arange(len(weights)), torch.arange(len(weights)) % 5]


class KeepsState(Honest):
    """Every second step draws from P."""

    steps = 0

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        self.steps += 1
        return super().verify(draft, p, rng)

    def residual(self, p_tau: Tensor, q_tau: Tensor, *_: Any) -> Tensor:
        return p_tau if self.steps % 2 == 0 else super().residual(p_tau, q_tau, *_)


class StateWrongLater(KeepsState):
    """The same, declared: a wrong second step."""

    def __init__(self) -> None:
        super().__init__()
        self.of_row: dict[int, int] = {}

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}), stateful=True)

    def start(self, row: int) -> None:
        self.of_row[row] = 0

    def free(self, row: int) -> None:
        self.of_row.pop(row, None)

    def snapshot(self, row: int) -> Any:
        return self.of_row.get(row) or None

    def restore(self, row: int, snapshot: Any) -> None:
        self.of_row[row] = snapshot or 0

    def observe(self, accepted: Any, drafted: Any) -> None:
        self.of_row = {row: min(number + 1, 1) for row, number in self.of_row.items()}

    def residual(self, p_tau: Tensor, q_tau: Tensor, draft: Draft, *_: Any) -> Tensor:
        later = torch.tensor([self.of_row.get(row, 0) > 0 for row in range(len(p_tau))])[:, None]
        return torch.where(later, p_tau, (p_tau - q_tau).clamp(min=0))


class WritesIntoTokens(Honest):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        verdict = super().verify(draft, p, rng)
        draft.valid &= False
        return verdict


class IntLength(Honest):
    def count(self, accepted: Tensor, draft: Draft) -> Tensor:
        return super().count(accepted, draft).int()


class OnAnotherDevice(Honest):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        verdict = super().verify(draft, p, rng)
        return Verdict(verdict.length.to("meta"), verdict.token)


class Nan(Honest):
    def acceptance(self, draft: Draft, p: Tensor) -> Tensor:
        return super().acceptance(draft, p) * float("nan")


class OutsideOfTheVocabulary(Honest):
    def draw(self, rng: StepRng, weights: Tensor, draft: Draft) -> Tensor:
        return rng.draw(weights) + weights.shape[1]


def of_trees(change: Callable[[Any, Draft, Tensor, StepRng], Verdict]) -> type[Verifier]:
    base = plugins.get("verifiers", "specinfer")
    return type("OfTrees", (base,), {"name": "faulty", "verify": change})


def _q_of_the_first_sibling(self: Any, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
    """Every child is verified against the distribution of its parent's first child."""
    if draft.q is not None and not draft.kind.is_chain and draft.sequences is None:
        first = (draft.parents[:, :, None] == draft.parents[:, None]).long().argmax(2)
        index = torch.arange(draft.width).expand_as(first) if draft.q_index is None else draft.q_index
        draft = dataclasses.replace(draft, q_index=index.gather(1, first))
    return plugins.get("verifiers", "specinfer").verify(self, draft, p, rng)


LaterSiblings = of_trees(_q_of_the_first_sibling)

#: Verifier -> what the answer must hold: verdict, and words of the diagnosis.
FAULTY: dict[type[Verifier], tuple[str, list[str]]] = {
    NoResidual: ("FAILED", ["at a rejection", "drawn from P itself, not from the residual"]),
    BonusElsewhere: ("FAILED", ["at the bonus token", "p[b, n - 1] instead of p[b, n]"]),
    IndexByWidth: ("FAILED", ["a random number whose index depends on the number of rows of the batch"]),
    Crashes: ("ERROR", ["RuntimeError: boom", "faulty_verifiers.py:", "in residual", "draft tokens ["]),
    TorchRand: ("FAILED", ["takes random numbers outside of rng", "torch.rand at ", "faulty_verifiers.py:"]),
    Multinomial: ("FAILED", ["takes random numbers outside of rng", "torch.multinomial at "]),
    NumpyRandom: ("FAILED", ["takes random numbers outside of rng", "numpy.random at ", "faulty_verifiers.py:"]),
    OwnNumpyGenerator: ("FAILED", ["takes random numbers outside of rng"]),
    Swapped: ("FAILED", ["in the acceptance", "min(1, Q/P): P and Q are exchanged"]),
    PAfterTheToken: ("FAILED", ["in the acceptance", "the position of p is off by one"]),
    SumOfCoins: ("FAILED", ["tokens after a rejection count as accepted"]),
    IgnoresQ: ("FAILED", ["for sampled drafts only", "P, so Q is ignored"]),
    PointMassResidual: ("FAILED", ["for point masses only", "at a rejection", "drawn from P itself"]),
    SiblingsQ: ("FAILED", ["accepted with probability min(1, P/Q) with Q of the "]),
    AcceptsPadding: ("ERROR", ["accepted 2 tokens of a draft that is 1 deep"]),
    BonusAtTheWidth: ("FAILED", ["at the bonus token", "at the end of a row only"]),
    Abs: ("FAILED", ["at a rejection", "norm(|P - Q|)"]),
    NegativeResidual: ("ERROR", ["negative", "faulty_verifiers.py:", "draft tokens ["]),
    SameNumber: ("ERROR", ["random numbers [0] for 'accept' were already used this step", "faulty_verifiers.py:"]),
    ArgmaxOfQ: ("FAILED", ["at temperature 0 only"]),
    RowsShareState: ("FAILED", ["rows share state"]),
    IndexByRow: ("FAILED", ["a random number whose index depends on the number of the row"]),
    KeepsState: ("FAILED", ["keeps state from one step to the next"]),
    StateWrongLater: ("FAILED", ["in the second step only", "at a rejection"]),
    WritesIntoTokens: ("FAILED", ["writes into draft.valid"]),
    IntLength: ("ERROR", ["made verdict.length of dtype int32"]),
    OnAnotherDevice: ("ERROR", ["verdict.length on meta"]),
    Nan: ("ERROR", ["NaN or infinite probabilities", "faulty_verifiers.py:", "draft tokens ["]),
    OutsideOfTheVocabulary: ("ERROR", ["outside of the vocabulary"]),
    LaterSiblings: ("FAILED", ["for a tree's later siblings"]),
}
