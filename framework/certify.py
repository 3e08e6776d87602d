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

from .decoding.loop import Decoder
from .decoding.sampling import Sampling
from .drafter import DraftContext, Drafter
from .tablelm import TableLM, Toy
from .verifier import Verifier

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


@dataclass
class _RoundResult:
    states: dict[State, float]
    expected_tau: float
    tau: np.ndarray
    paths: int


def certify(
    toy: Toy,
    build: DrafterFactory,
    verifier: Callable[[], Verifier],
    *,
    rounds: int = 1,
    gamma: int | None = None,
    temperature: float = 1.0,
) -> Certificate:
    """Enumerate ``rounds`` rounds of a pair on ``toy``.

    Args:
        build: makes the drafter, see :data:`DrafterFactory`.
        verifier: makes the verifier; called once per batch of paths.
        rounds: how many rounds to chain, at least 1.
        gamma: draft length, the toy's own by default; 0 is allowed.
        temperature: the target's; 0 certifies against the argmax.
    """
    gamma = toy.gamma if gamma is None else gamma
    sampling = Sampling(temperature=temperature)
    states: dict[State, float] = {((), None): 1.0}
    expected, first_tau, paths = [], np.zeros(gamma + 1), 0
    for r in range(rounds):
        result = _one_round(toy, build, verifier, sampling, states, gamma)
        states, paths = result.states, paths + result.paths
        expected.append(result.expected_tau)
        if r == 0:
            first_tau = result.tau
    length = rounds * (gamma + 1)
    while pending := {s: w for s, w in states.items() if s[1] is not None and len(s[0]) < length}:
        # The verifier still holds state: let it finish with rounds that draft nothing.
        done = {s: w for s, w in states.items() if s not in pending}
        states = _merge(done, _one_round(toy, build, verifier, sampling, pending, 0).states)
    law = sampling.law(toy.target.log())
    return Certificate(_total_variation(states, law, length), expected, [float(x) for x in first_tau], paths)


def _one_round(
    toy: Toy,
    build: DrafterFactory,
    verifier: Callable[[], Verifier],
    sampling: Sampling,
    states: dict[State, float],
    gamma: int,
) -> _RoundResult:
    keys, columns = list(states), {}
    of_row, weight = np.arange(len(keys)), np.array(list(states.values()))
    scripts = np.full((len(keys), 0), -1, dtype=np.int64)
    out: dict[State, float] = {}
    tau_law, paths = np.zeros(gamma + 1), 0
    while len(of_row):
        batch = of_row[:BATCH]
        rng = Enumeration(scripts[:BATCH], weight[:BATCH], columns)
        decoder = _decoder(toy, build, verifier(), sampling, rng, len(batch), gamma)
        for row, key in enumerate(batch):
            tokens, snapshot = keys[key]
            decoder.begin(row, [toy.vocab_size, *tokens])
            if snapshot is not None:
                decoder.verifier.restore(row, snapshot)
        decoder.round()
        for row, key in enumerate(batch):
            tokens = tuple(decoder.sequences.history[row][1:])
            state = (tokens, decoder.verifier.snapshot(row))
            out[state] = out.get(state, 0.0) + rng.weight[row]
            tau_law[len(tokens) - len(keys[key][0]) - 1] += rng.weight[row]
        paths += len(batch)
        of_row = np.concatenate([of_row[BATCH:], *(batch[parent] for parent, _, _ in rng.opened)])
        weight = np.concatenate([weight[BATCH:], *(w for _, _, w in rng.opened)])
        scripts = np.concatenate([_widen(s, len(columns)) for s in (scripts[BATCH:], *(s for _, s, _ in rng.opened))])
    expected = float((tau_law * np.arange(gamma + 1)).sum())
    return _RoundResult(out, expected, tau_law, paths)


def _decoder(
    toy: Toy,
    build: DrafterFactory,
    verifier: Verifier,
    sampling: Sampling,
    rng: Enumeration,
    batch: int,
    gamma: int,
) -> Decoder:
    context = DraftContext(
        sampling=sampling,
        batch_size=batch,
        max_length=256,
        vocab_size=toy.vocab_size,
        device=torch.device("cpu"),
        load_lm=lambda name: TableLM(toy.drafter, batch),
    )
    drafter = build(context, gamma)
    return Decoder(TableLM(toy.target, batch), drafter, verifier, sampling=sampling, rng=rng)


def _merge(a: dict[State, float], b: dict[State, float]) -> dict[State, float]:
    for state, weight in b.items():
        a[state] = a.get(state, 0.0) + weight
    return a


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
