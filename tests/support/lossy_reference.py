"""The lossy rules by hand: what each accepts of a token, and what it draws after a rejection."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from crossdraft.framework import plugins
from crossdraft.framework.contracts.rng import CounterRng

TOYS = ("T0", "G1", "G2", "G3", "G4")
CHAINS = ("chain", "point-mass")
TREES = ("iid-2", "tree-wor-2-1", "tree-greedy-2-1", "tree-top-2-1")
CHAIN_RULES, TREE_RULES = ("lenient", "bild"), ("typical", "top-k")
LOSSY = CHAIN_RULES + TREE_RULES
SEEDS = st.integers(0, 2**31)


def rule(name: str, **options: Any) -> Any:
    result = plugins.get("verifiers", name)
    return result(result.Config(**options))


def shipped_rng(seed: int, streams: Any) -> Any:
    return CounterRng(seed).for_step(list(streams), [0] * len(streams), torch.device("cpu"))


class Recording:
    """A rng that accepts everything or nothing, and records acceptance probabilities."""

    def __init__(self, accepts: bool = True):
        self.accepts = accepts
        self.h = self.weights = torch.empty(0)

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        self.h = h
        return torch.full_like(h, self.accepts, dtype=torch.bool)

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        self.weights = weights / weights.sum(-1, keepdim=True)
        return weights.argmax(-1)


# A rule by hand: ``accept_rule(P, Q, x)`` is the acceptance probability of x, and the distribution after its rejection;
# x = None: the distribution after a fully accepted draft.

Judge = Callable[[list[float], list[float], int | None], tuple[float, list[float]]]


def normalised(weights: list[float]) -> list[float]:
    return [w / sum(weights) for w in weights]


def favourite(probs: list[float]) -> list[float]:
    best = probs.index(max(probs))
    return [float(y == best) for y in range(len(probs))]


def lenient(lenience: float) -> Judge:
    def accept_rule(p: list[float], q: list[float], x: int | None) -> tuple[float, list[float]]:
        if x is None:
            return 0.0, p
        left = [max(a - lenience * b, 0.0) for a, b in zip(p, q, strict=True)]
        return min(1.0, p[x] / (lenience * q[x])), normalised(left) if sum(left) else p

    return accept_rule


def typical(epsilon: float, delta: float) -> Judge:
    def accept_rule(p: list[float], q: list[float], x: int | None) -> tuple[float, list[float]]:
        entropy = -sum(a * math.log(a) for a in p if a)
        passes = [a > min(epsilon, delta * math.exp(-entropy)) for a in p]
        return float(x is not None and passes[x]), normalised([a * ok for a, ok in zip(p, passes, strict=True)])

    return accept_rule


def top_k(k: int, tolerance: float) -> Judge:
    def accept_rule(p: list[float], q: list[float], x: int | None) -> tuple[float, list[float]]:
        best = sorted(range(len(p)), key=lambda y: -p[y])[:k]  # stable: ties by lowest id
        ok = x is not None and x in best and p[x] > 0 and math.log(max(p) / p[x]) <= tolerance
        return float(ok), favourite(p)

    return accept_rule


def bild(rollback: float) -> Judge:
    def accept_rule(p: list[float], q: list[float], x: int | None) -> tuple[float, list[float]]:
        if x is None:
            return 0.0, favourite(p)
        return float(p.index(max(p)) == x or (p[x] > 0 and -math.log(p[x]) <= rollback)), favourite(p)

    return accept_rule


SETTINGS: list[tuple[str, dict[str, Any], Judge]] = [
    ("lenient", {"lenience": 0.8}, lenient(0.8)),
    ("lenient", {"lenience": 0.1}, lenient(0.1)),
    ("typical", {}, typical(0.09, 0.3)),
    ("typical", {"epsilon": 0.3, "delta": 0.6}, typical(0.3, 0.6)),
    ("typical", {"epsilon": 1, "delta": 0.65}, typical(1, 0.65)),
    ("top-k", {}, top_k(3, 1.0)),
    ("top-k", {"k": 2, "tolerance": 1.5}, top_k(2, 1.5)),
    ("top-k", {"k": 2, "tolerance": 1e9}, top_k(2, 1e9)),
    ("bild", {}, bild(5.0)),
    ("bild", {"rollback": 1.25}, bild(1.25)),
]
