"""Samplers that are exact, or off by a stated total variation, and what `Evidence` decides about their draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from crossdraft_advisor.samples.foreign_samples import Decision, Draws, decide
from crossdraft_advisor.samples.sampler_verdict import Evidence, PrefixDraws, Verdict
from scipy.optimize import brentq

ROWS = np.array([[0.5, 0.2, 0.2, 0.1], [0.1, 0.7, 0.1, 0.1], [0.25, 0.25, 0.4, 0.1], [0.4, 0.3, 0.2, 0.1]])


def markov_sequences(random: np.random.Generator, rows: np.ndarray, n: int, length: int = 12) -> Draws:
    """Draws of a chain that starts in state 0."""
    sequences = []
    for _ in range(n):
        tokens, last = [], 0
        for _ in range(length):
            last = int(random.choice(len(rows), p=rows[last]))
            tokens.append(last)
        sequences.append(tokens)
    return Draws("f:1", [0], sequences=sequences)


def markov_decision(all_draws: list[Draws], deviation: float, **options: bool) -> Decision:
    trees = [draws.tree() for draws in all_draws]
    results = [
        (torch.from_numpy(ROWS[tree.tokens]), [(i, node) for node in range(len(tree.tokens))])
        for i, tree in enumerate(trees)
    ]
    return decide(all_draws, trees, results, deviation=deviation, **options)


def power_law_probs(rows: int, size: int, seed: int) -> np.ndarray:
    """Distributions ``[rows, size]`` like those of language models: some sharp, some flat, ids in no order."""
    random = np.random.default_rng(seed)
    logits = -random.uniform(0.8, 2.1, (rows, 1)) * np.log(1 + np.arange(size)) + random.normal(0, 0.5, (rows, size))
    probs = np.exp(random.permuted(logits, axis=1))
    return probs / probs.sum(1, keepdims=True)


def tempered(probs: np.ndarray, temperature: float) -> np.ndarray:
    changed = probs ** (1 / temperature)
    return changed / changed.sum(1, keepdims=True)


def tv(probs: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(probs - other).sum(1).mean() / 2)


def verdict_of(probs: np.ndarray, sampler: np.ndarray, draws: int, deviation: float, seed: int) -> Verdict:
    """The verdict about ``draws`` from each row of ``sampler [R, V]``."""
    counts = np.random.default_rng(seed).multinomial(draws, sampler)
    evidence = Evidence(seed)
    evidence.add(torch.from_numpy(probs), [_draws(i, row) for i, row in enumerate(counts)])
    return evidence.verdict(deviation)


def _draws(i: int, counts: np.ndarray) -> PrefixDraws:
    tokens = np.flatnonzero(counts)
    return PrefixDraws(str(i), tokens.tolist(), counts[tokens].tolist())


# -- deviations of a stated size ---------------------------------------------------------------------------------


def colder(probs: np.ndarray, deviation: float) -> np.ndarray:
    return tempered(probs, brentq(lambda t: tv(probs, tempered(probs, t)) - deviation, 0.2, 1))


def hotter(probs: np.ndarray, deviation: float) -> np.ndarray:
    return tempered(probs, brentq(lambda t: tv(probs, tempered(probs, t)) - deviation, 1, 5))


def tail_to_tail(probs: np.ndarray, deviation: float) -> np.ndarray:
    """Probability moves from the last 20 % of each distribution to the 20 % before, the head keeps what it has."""
    order = np.argsort(-probs, axis=1, kind="stable")
    falling = np.take_along_axis(probs, order, 1)
    before = falling.cumsum(1) - falling
    last, earlier = before >= 0.8, (before >= 0.6) & (before < 0.8)
    moved = deviation / np.mean((earlier.any(1)) & (last.any(1)))
    share = np.minimum(moved, 0.99 * (falling * last).sum(1)) * earlier.any(1)
    changed = falling * (1 - last * (share / np.maximum((falling * last).sum(1), 1e-300))[:, None])
    changed += falling * earlier * (share / np.maximum((falling * earlier).sum(1), 1e-300))[:, None]
    result = np.empty_like(probs)
    np.put_along_axis(result, order, changed / changed.sum(1, keepdims=True), 1)
    return result


@dataclass(frozen=True)
class Shape:
    """Prefixes, draws per prefix, and the TV to test."""

    prefixes: int
    draws: int
    deviation: float

    @property
    def name(self) -> str:
        return f"{self.prefixes} prefixes x {self.draws} draws, TV {self.deviation:g}"


SHAPES = (Shape(60, 1, 0.15), Shape(9, 256, 0.1), Shape(9, 1024, 0.05), Shape(1000, 1, 0.08), Shape(200, 12, 0.05))
DEVIATIONS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "colder by TV d": colder,
    "hotter by TV d": hotter,
    "tail to tail by TV d": tail_to_tail,
    "temperature 0.9": lambda probs, _: tempered(probs, 0.9),
    "temperature 1.1": lambda probs, _: tempered(probs, 1.1),
}


def error_rates(shape: Shape, simulations: int, size: int = 128) -> Iterator[tuple[str, dict[str, float]]]:
    """Frequencies of each outcome, for an exact sampler and for samplers that are off."""
    probs = power_law_probs(shape.prefixes, size, 0)
    samplers = {"exact": probs} | {name: make(probs, shape.deviation) for name, make in DEVIATIONS.items()}
    for name, sampler in samplers.items():
        apart = tv(probs, sampler)
        if "by TV d" in name:
            assert abs(apart - shape.deviation) < 0.01 * shape.deviation, (name, apart)
        elif name != "exact" and apart < shape.deviation:
            continue  # within d, so that a yes is right
        result = Counter(
            verdict_of(probs, sampler, shape.draws, shape.deviation, seed).outcome for seed in range(simulations)
        )
        yield name, {outcome: result[outcome] / simulations for outcome in ("yes", "no", "undecided")}
