"""The certificate: is a drafter x verifier pair lossless, and how many tokens does it accept? Exact, by enumeration.

The real drafter, the real decode loop and the real verifier run on small exact models with a random source
that enumerates: every row of the batch follows one script of decisions and carries its probability. A row that
meets a decision beyond its script takes the first possible outcome and leaves a new script for each other one,
so the rows that come out are exactly the leaves of the decision tree. Between rounds, rows that committed the
same tokens and hold the same verifier state are merged.

After R rounds every output is completed to R (gamma + 1) tokens with the target's own law (or, while the
verifier still holds state, by rounds without a draft), and the joint law is compared with the target's. This is
the validity of Lemma 2 in Sun et al. 2024, and it must hold jointly: tests of the first token miss most mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..contracts.drafter import DraftContext, Drafter
from ..contracts.sampling import Sampling
from ..contracts.verifier import Verifier
from ..decoding.build import build_decoder
from ..decoding.loop import Decoder
from .tablelm import Toy, ToyContext

#: A pair is lossless if its output differs from the target's law by less than this (float64 round-off).
TOLERANCE = 1e-12
#: Decision paths followed at once, as rows of one batch.
BATCH = 4096

#: ``build(context, gamma)`` makes the drafter under test; its ``context.load_lm(...)`` gives the toy's drafter model.
DrafterFactory = Callable[[DraftContext, int], Drafter]


@dataclass(frozen=True)
class Certificate:
    """What enumeration found.

    Attributes:
        tv: total variation between the output's joint law and the target's, 0 for a lossless pair.
        expected_tau: E[tau] of each round.
        first_tau: Pr(tau = i) in the first round, i = 0 .. gamma.
        paths: decision paths enumerated.
    """

    tv: float
    expected_tau: list[float]
    first_tau: list[float]
    paths: int

    @property
    def lossless(self) -> bool:
        return self.tv <= TOLERANCE


class Enumeration:
    """A random source that follows one script of decisions per row and records what the scripts leave open.

    A decision is known by (purpose, index), as a random number is. ``weight[b]`` is the probability of row b's
    decisions; a script carries the probability of what it prescribes, so it does not matter whether a number
    that no row needs (a draw for a row that stopped drafting) is asked for in one batch and not in another.
    """

    def __init__(self, scripts: np.ndarray, weight: np.ndarray, columns: dict[tuple[str, int], int]):
        self.scripts = scripts  # [B, decisions] outcome, -1 = undecided
        self.weight = weight
        self.columns = columns  # which column holds which decision, shared by all batches of a round
        self.opened: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # parent rows, scripts, weights

    def round(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> Enumeration:
        return self

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        h = h.double().clamp(0, 1)
        outcomes = torch.stack([1 - h, h], -1).numpy()
        taken = [self._decide((purpose, index + i), outcomes[:, i]) for i in range(h.shape[1])]
        return torch.from_numpy(np.stack(taken, 1) if taken else np.zeros(h.shape, dtype=np.int64)) == 1

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        w = weights.double()
        return torch.from_numpy(self._decide((purpose, index), (w / w.sum(-1, keepdim=True)).numpy()))

    def _decide(self, key: tuple[str, int], probability: np.ndarray) -> np.ndarray:
        """One decision for every row: ``probability [B, outcomes]`` -> the outcome each row takes ``[B]``."""
        column = self.columns.setdefault(key, len(self.columns))
        self.scripts = _widen(self.scripts, len(self.columns))
        rows, possible = np.arange(len(probability)), probability > 0
        scripted = self.scripts[:, column]
        undecided, first = scripted < 0, possible.argmax(1)
        taken = np.where(undecided, first, scripted)
        others = possible & undecided[:, None]
        others[rows, first] = False
        parent, outcome = np.nonzero(others)
        if len(parent):
            scripts = self.scripts[parent].copy()
            scripts[:, column] = outcome
            self.opened.append((parent, scripts, self.weight[parent] * probability[parent, outcome]))
        self.scripts[:, column] = taken
        self.weight = self.weight * np.where(undecided, probability[rows, taken], 1.0)
        return taken


def _widen(scripts: np.ndarray, columns: int) -> np.ndarray:
    return np.pad(scripts, ((0, 0), (0, max(0, columns - scripts.shape[1]))), constant_values=-1)


State = tuple[tuple[int, ...], Hashable]
#: What one round adds to a state: the emitted tokens and the verifier's new state, with their probability.
Outcomes = dict[State, float]


def certify(
    toy: Toy,
    build: DrafterFactory,
    verifier: Callable[[], Verifier],
    *,
    rounds: int = 1,
    gamma: int | Sequence[int] | None = None,
    temperature: float = 1.0,
    markov: bool = False,
) -> Certificate:
    """Enumerate ``rounds`` rounds of a pair on ``toy``.

    Args:
        build: makes the drafter, see :data:`DrafterFactory`.
        verifier: makes the verifier; called once per batch of paths.
        rounds: how many rounds to chain, at least 1.
        gamma: draft length, the toy's own by default; 0 is allowed. One number a round makes a drafter for the
            largest that is cut short in the others, as at the end of a sequence.
        temperature: the target's; 0 certifies against the argmax.
        markov: the drafter looks at the last token alone, as both toy models do: states that end alike and hold
            the same verifier state are enumerated once.
    """
    lengths = _lengths(toy, rounds, gamma)
    sampling = Sampling(temperature=temperature)

    def step(states: Outcomes, length: int) -> tuple[Outcomes, np.ndarray, int]:
        keys = {state: (state[0][-1:] if markov else state[0], state[1]) for state in states}
        origins = list(dict.fromkeys(keys.values()))
        found, paths = _one_round(toy, build, verifier, sampling, origins, length, max(lengths))
        outcomes = dict(zip(origins, found, strict=True))
        out: Outcomes = {}
        tau_law = np.zeros(length + 1)
        for state, weight in states.items():
            for (new, snapshot), probability in outcomes[keys[state]].items():
                after = ((*state[0], *new), snapshot)
                out[after] = out.get(after, 0.0) + weight * probability
                tau_law[len(new) - 1] += weight * probability
        return out, tau_law, paths

    states: Outcomes = {((), None): 1.0}
    expected, first_tau, paths = [], np.zeros(0), 0
    for length in lengths:
        states, tau_law, more = step(states, length)
        paths += more
        expected.append(float((tau_law * np.arange(length + 1)).sum()))
        first_tau = first_tau if len(first_tau) else tau_law
    total = sum(lengths) + rounds
    while pending := {s: w for s, w in states.items() if s[1] is not None and len(s[0]) < total}:
        # The verifier still holds state: let it finish with rounds that draft nothing.
        states = {s: w for s, w in states.items() if s not in pending}
        for state, weight in step(pending, 0)[0].items():
            states[state] = states.get(state, 0.0) + weight
    law = sampling.law(toy.target.log())
    return Certificate(_total_variation(states, law, total), expected, [float(x) for x in first_tau], paths)


def _lengths(toy: Toy, rounds: int, gamma: int | Sequence[int] | None) -> list[int]:
    if gamma is None or isinstance(gamma, int):
        return [toy.gamma if gamma is None else gamma] * rounds
    if len(gamma) != rounds:
        raise ValueError(f"{len(gamma)} draft lengths for {rounds} rounds")
    return list(gamma)


def _one_round(
    toy: Toy,
    build: DrafterFactory,
    verifier: Callable[[], Verifier],
    sampling: Sampling,
    origins: list[State],
    length: int,
    gamma: int,
) -> tuple[list[Outcomes], int]:
    """What one round with drafts of ``length`` tokens (by a drafter made for ``gamma``) leads to from each origin."""
    columns: dict[tuple[str, int], int] = {}
    of_row, weight = np.arange(len(origins)), np.ones(len(origins))
    scripts = np.full((len(origins), 0), -1, dtype=np.int64)
    out: list[Outcomes] = [{} for _ in origins]
    paths = 0
    while len(of_row):
        batch = of_row[:BATCH]
        rng = Enumeration(scripts[:BATCH], weight[:BATCH], columns)
        decoder = _decoder(toy, build, verifier(), sampling, rng, len(batch), gamma)
        for row, origin in enumerate(batch):
            tokens, snapshot = origins[origin]
            decoder.begin(row, [toy.vocab_size, *tokens])
            decoder.sequences.limit[row] = min(decoder.sequences.limit[row], length)
            if snapshot is not None:
                decoder.verifier.restore(row, snapshot)
        decoder.round()
        for row, origin in enumerate(batch):
            new = tuple(decoder.sequences.history[row][1 + len(origins[origin][0]) :])
            state = (new, decoder.verifier.snapshot(row))
            out[origin][state] = out[origin].get(state, 0.0) + rng.weight[row]
        paths += len(batch)
        of_row = np.concatenate([of_row[BATCH:], *(batch[parent] for parent, _, _ in rng.opened)])
        weight = np.concatenate([weight[BATCH:], *(w for _, _, w in rng.opened)])
        scripts = np.concatenate([_widen(s, len(columns)) for s in (scripts[BATCH:], *(s for _, s, _ in rng.opened))])
    return out, paths


def _decoder(
    toy: Toy,
    build: DrafterFactory,
    verifier: Verifier,
    sampling: Sampling,
    rng: Enumeration,
    batch: int,
    gamma: int,
) -> Decoder:
    context = ToyContext(toy.target, toy.drafter, sampling, batch)
    # How far a wrong rule leads is what is measured here; forms and counts are checked all the same.
    return build_decoder(context, lambda context: build(context, gamma), verifier, rng=rng, validate="never")


def _total_variation(states: dict[State, float], law: Tensor, length: int) -> float:
    """Complete every output with ``law [V+1, V]`` to ``length`` tokens and compare with the target's joint law."""
    vocab, rows = law.shape[1], law.numpy()
    ended = [np.zeros(vocab**n) for n in range(length + 1)]
    for (tokens, _), weight in states.items():
        n, beyond = min(len(tokens), length), tokens[length:]
        assert not beyond, "an output is longer than rounds x (gamma + 1)"
        ended[n][_index(tokens, vocab)] += weight
    ours, target = ended[0], np.ones(1)
    for n in range(length):
        last = np.arange(vocab**n) % vocab if n else np.array([vocab])
        ours = (ours[:, None] * rows[last]).ravel() + ended[n + 1]
        target = (target[:, None] * rows[last]).ravel()
    return float(np.abs(ours - target).sum() / 2)


def _index(tokens: Sequence[int], vocab: int) -> int:
    index = 0
    for token in tokens:
        index = index * vocab + token
    return index
