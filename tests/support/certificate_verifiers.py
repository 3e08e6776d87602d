"""Verifiers shared by the tests of ``crossdraft certify``: verifiers with a state of their own, right and wrong."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from verifier_traits import traits_of

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft, Verdict
from crossdraft.framework.contracts.draft_kind import SINGLE_CHILD
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.verifier import Verifier, VerifierTraits


def exact(values: Sequence[str]) -> list[float]:
    return [float(Fraction(value)) for value in values]


class ByTurn(Verifier):
    """Counts each row's steps; `odd` steps are verified by one rule, even ones by another."""

    name = "by-turn"
    traits = classmethod(lambda cls, config: VerifierTraits(accepts=frozenset({SINGLE_CHILD}), stateful=True))

    def __init__(self) -> None:
        super().__init__()
        self.turn: dict[int, int] = {}
        self.even = plugins.get("verifiers", "token")()
        self.odd = plugins.get("verifiers", "block")()

    def start(self, row: int) -> None:
        self.turn[row] = 0

    def free(self, row: int) -> None:
        del self.turn[row]

    def snapshot(self, row: int) -> int:
        return self.turn[row]

    def restore(self, row: int, snapshot: Any) -> None:
        self.turn[row] = snapshot

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        odd = torch.tensor([self.turn[row] % 2 == 1 for row in range(draft.batch_size)])
        for row in self.turn:
            self.turn[row] += 1
        verdicts = [rule.verify(draft, p, Apart(rng, k)) for k, rule in enumerate((self.even, self.odd))]
        even, odds = verdicts
        return Verdict(torch.where(odd, odds.length, even.length), torch.where(odd, odds.token, even.token))


class Apart:
    """A view of a rng whose decisions do not collide with those of the other views."""

    def __init__(self, rng: Any, number: int):
        self.rng, self.offset = rng, 100 * number

    def accept(self, h: torch.Tensor, purpose: str = "accept", index: int = 0) -> torch.Tensor:
        return self.rng.accept(h, purpose, index + self.offset)

    def draw(self, weights: torch.Tensor, purpose: str = "residual", index: int = 0) -> torch.Tensor:
        return self.rng.draw(weights, purpose, index + self.offset)


class AcceptAll(Verifier):
    """Wrong on purpose: keeps every drafted token."""

    name = "accept-all"
    traits = classmethod(lambda cls, config: VerifierTraits(accepts=frozenset({SINGLE_CHILD})))

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        rows = torch.arange(draft.batch_size)
        return Verdict(draft.count, rng.draw(p[rows, draft.count]))


class WrongLater(ByTurn):
    def __init__(self) -> None:
        super().__init__()
        self.odd = AcceptAll()


def kind_of(kind: Any, rule: Any) -> Any:
    """The kind of the drafts of a label, at a temperature that the verifier takes."""
    drafter, config = kind.config(2)
    return drafter.traits(config, Sampling(temperature=0 if traits_of(rule).temperature_zero_only else 1)).kind
