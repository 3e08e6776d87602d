"""The certificate: is a drafter x verifier pair lossless, and how many tokens does it accept? Exact, by enumeration.

The real drafter, the real decode loop and the real verifier run on small exact models with a random source
that enumerates: every row of the batch follows one script of decisions and carries its probability. A row that
meets a decision beyond its script takes the first possible outcome and leaves a new script for each other one,
so the rows that come out are exactly the leaves of the decision tree. A script covers all steps, so that one
drafter lives through them and what it learns in `Drafter.observe` counts. Where a drafter is known to look at the last
token alone, rows that hold the same verifier state and end alike are merged between steps instead.

After R steps every output is completed to R (gamma + 1) tokens with the target's own law (or, while the
verifier still holds state, by steps without a draft), and the joint law is compared with the target's. This is
the validity of Lemma 2 in Sun et al. 2024, and it must hold jointly: tests of the first token miss most mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..api.build import build_decoder
from ..contracts.drafter import DraftContext, Drafter
from ..contracts.sampling import Sampling
from ..contracts.steps import StepEvent
from ..contracts.verifier import Verifier
from ..engine.decoder import Decoder
from .effort import MOST_PATHS, TooLargeError
from .table_lm import Toy, ToyContext

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
        expected_tau: E[tau] of each step.
        first_tau: Pr(tau = i) in the first step, i = 0 .. gamma.
        paths: decision paths enumerated.
        drafted: whether any draft had a node: where none has, nothing was shown.
    """

    tv: float
    expected_tau: list[float]
    first_tau: list[float]
    paths: int
    drafted: bool

    @property
    def lossless(self) -> bool:
        return self.tv <= TOLERANCE


class Enumeration:
    """A random source that follows one script of decisions per row and records what the scripts leave open.

    A decision is known by the step, its purpose and index, as a random number is. ``weight[b]`` is the probability of
    row b's decisions; a script carries the probability of what it prescribes, so it does not matter whether a number
    that no row needs (a draw for a row that stopped drafting) is asked for in one batch and not in another.
    """

    def __init__(self, scripts: np.ndarray, weight: np.ndarray, columns: dict[tuple[int, str, int], int]):
        self.scripts = scripts  # [B, decisions] outcome, -1 = undecided
        self.weight = weight
        self.columns = columns  # which column holds which decision, shared by all batches
        self.opened: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # parent rows, scripts, weights
        self._turn = 0

    def for_step(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> Enumeration:
        self._turn += 1
        return self

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        h = h.double().clamp(0, 1)
        outcomes = torch.stack([1 - h, h], -1).numpy()
        taken = [self._decide((purpose, index + i), outcomes[:, i]) for i in range(h.shape[1])]
        return torch.from_numpy(np.stack(taken, 1) if taken else np.zeros(h.shape, dtype=np.int64)) == 1

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        w = weights.double()
        mass = w.sum(-1, keepdim=True)
        # Of weights that are all 0 comes a token that means nothing: the first one.
        law = torch.where(mass == 0, torch.eye(1, w.shape[1], dtype=w.dtype), w / mass)
        return torch.from_numpy(self._decide((purpose, index), law.numpy()))

    def _decide(self, key: tuple[str, int], probability: np.ndarray) -> np.ndarray:
        """One decision for every row: ``probability [B, outcomes]`` -> the outcome each row takes ``[B]``."""
        column = self.columns.setdefault((self._turn, *key), len(self.columns))
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
#: What one step adds to a state: the emitted tokens and the verifier's new state, with their probability.
Outcomes = dict[State, float]


def certify(
    toy: Toy,
    build: DrafterFactory,
    verifier: Callable[[], Verifier],
    *,
    steps: int = 1,
    gamma: int | Sequence[int] | None = None,
    temperature: float = 1.0,
    markov: bool = False,
) -> Certificate:
    """Enumerate ``steps`` steps of a pair on ``toy``.

    Args:
        build: makes the drafter, see :data:`DrafterFactory`.
        verifier: makes the verifier; called once per batch of paths.
        steps: how many steps to chain, at least 1.
        gamma: draft length, the toy's own by default; 0 is allowed. One number a step makes a drafter for the
            largest that is cut short in the others, as at the end of a sequence.
        temperature: the target's; 0 certifies against the argmax.
        markov: the drafter looks at the last token alone, as both toy models do: states that end alike and hold
            the same verifier state are enumerated once, by drafters that are new in each step. Otherwise one drafter
            lives through all steps of a path.

    Raises:
        TooLargeError: there are more than `MOST_PATHS` paths.
    """
    lengths = _lengths(toy, steps, gamma)
    pair = _Pair(toy, build, verifier, Sampling(temperature=temperature), max(lengths))
    states, laws = _merged(pair, lengths) if markov or steps == 1 else pair.replay(lengths)
    total = sum(lengths) + steps
    paths = pair.paths
    while pending := {s: w for s, w in states.items() if s[1] is not None and len(s[0]) < total}:
        # The verifier still holds state: let it finish with steps that draft nothing.
        states = {s: w for s, w in states.items() if s not in pending}
        for state, weight in _advance(pair, pending, 0, markov)[0].items():
            states[state] = states.get(state, 0.0) + weight
    law = pair.sampling.probs(toy.target.log())
    expected = [float((of_tau * np.arange(len(of_tau))).sum()) for of_tau in laws]
    tv = _total_variation(states, law, total)
    return Certificate(tv, expected, [float(x) for x in laws[0]], paths, pair.drafted)


def _lengths(toy: Toy, steps: int, gamma: int | Sequence[int] | None) -> list[int]:
    if gamma is None or isinstance(gamma, int):
        return [toy.gamma if gamma is None else gamma] * steps
    if len(gamma) != steps:
        raise ValueError(f"{len(gamma)} draft lengths for {steps} steps")
    return list(gamma)


def _merged(pair: _Pair, lengths: Sequence[int]) -> tuple[Outcomes, list[np.ndarray]]:
    """Round after step, states that are alike enumerated once; the last states, and Pr(tau = i) of each step."""
    states: Outcomes = {((), None): 1.0}
    laws = []
    for length in lengths:
        states, law = _advance(pair, states, length, True)
        laws.append(law)
    return states, laws


def _advance(pair: _Pair, states: Outcomes, length: int, markov: bool) -> tuple[Outcomes, np.ndarray]:
    """One step from every state."""
    keys = {state: (state[0][-1:] if markov else state[0], state[1]) for state in states}
    origins = list(dict.fromkeys(keys.values()))
    outcomes = dict(zip(origins, pair.one_step(origins, length), strict=True))
    out: Outcomes = {}
    law = np.zeros(length + 1)
    for state, weight in states.items():
        for (new, snapshot), probability in outcomes[keys[state]].items():
            after = ((*state[0], *new), snapshot)
            out[after] = out.get(after, 0.0) + weight * probability
            law[len(new) - 1] += weight * probability
    return out, law


class _Scripts:
    """Scripts that wait to be followed, the youngest first, so that never many wait at a time."""

    def __init__(self, origins: int):
        self._columns: dict[tuple[int, str, int], int] = {}
        self._waiting = [(np.arange(origins), np.ones(origins), np.full((origins, 0), -1, dtype=np.int64))]

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, most: int) -> tuple[np.ndarray, Enumeration]:
        """At most so many rows: their origins, and the random source that follows their scripts."""
        taken, room = [], most
        while self._waiting and room:
            origin, weight, scripts = self._waiting.pop()
            if len(origin) > room:
                self._waiting.append((origin[room:], weight[room:], scripts[room:]))
            taken.append((origin[:room], weight[:room], _widen(scripts[:room], len(self._columns))))
            room -= len(taken[-1][0])
        origin, weight, scripts = (np.concatenate(part) for part in zip(*taken, strict=True))
        return origin, Enumeration(scripts, weight, self._columns)

    def add(self, origin: np.ndarray, rng: Enumeration) -> None:
        """The scripts that rows with these origins left."""
        self._waiting += [(origin[parent], weight, scripts) for parent, scripts, weight in rng.opened]


class _Pair:
    """A drafter and a verifier on a toy, and what was seen of them.

    Attributes:
        drafted: whether any draft had a node.
        paths: decision paths followed.
    """

    def __init__(
        self, toy: Toy, build: DrafterFactory, verifier: Callable[[], Verifier], sampling: Sampling, gamma: int
    ):
        self.toy, self.build, self.verifier, self.sampling, self.gamma = toy, build, verifier, sampling, gamma
        self.drafted, self.paths = False, 0

    def one_step(self, origins: list[State], length: int) -> list[Outcomes]:
        """What one step with drafts of ``length`` tokens leads to from each origin."""
        scripts, prompt = _Scripts(len(origins)), self.toy.prompt
        out: list[Outcomes] = [{} for _ in origins]
        while scripts:
            batch, rng = scripts.take(BATCH)
            decoder = self._decoder(rng, len(batch))
            for row, origin in enumerate(batch):
                tokens, snapshot = origins[origin]
                decoder.start(row, [*prompt, *tokens])
                if snapshot is not None:
                    decoder.verifier.restore(row, snapshot)
            self._step(decoder, length)
            for row, origin in enumerate(batch):
                new = tuple(decoder.sequences.history[row][len(prompt) + len(origins[origin][0]) :])
                state = (new, decoder.verifier.snapshot(row))
                out[origin][state] = out[origin].get(state, 0.0) + rng.weight[row]
            scripts.add(batch, rng)
        return out

    def replay(self, lengths: Sequence[int]) -> tuple[Outcomes, list[np.ndarray]]:
        """All steps of every path with one drafter: the last states, and Pr(tau = i) of each step.

        Rows of a batch share a drafter, unless its memory outlives a sequence: then rows are sequences to learn from.
        """
        scripts, prompt, size = _Scripts(1), self.toy.prompt, 1
        out: Outcomes = {}
        laws = [np.zeros(length + 1) for length in lengths]
        while scripts:
            batch, rng = scripts.take(size)
            decoder = self._decoder(rng, len(batch))
            size = 1 if decoder.drafter.remembers(decoder.drafter.config) else BATCH
            for row in range(len(batch)):
                decoder.start(row, prompt)
            ends = [[len(prompt)] * len(batch)]
            for length in lengths:
                self._step(decoder, length)
                ends.append([len(history) for history in decoder.sequences.history])
            for row, weight in enumerate(rng.weight):
                state = (tuple(decoder.sequences.history[row][len(prompt) :]), decoder.verifier.snapshot(row))
                out[state] = out.get(state, 0.0) + weight
                for law, before, after in zip(laws, ends, ends[1:], strict=False):
                    law[after[row] - before[row] - 1] += weight
            scripts.add(batch, rng)
        return out, laws

    def _decoder(self, rng: Enumeration, batch: int) -> Decoder:
        self.paths += batch
        if self.paths > MOST_PATHS:
            raise TooLargeError(
                f"there are more than {MOST_PATHS:,.0f} decision paths, which is where enumeration gives up; lower the "
                "draft length or the number of steps"
            )
        start = len(self.toy.prompt) - 1
        context = ToyContext(self.toy.target, self.toy.drafter, self.sampling, batch, start=start, words=self.toy.words)
        # How far a wrong rule leads is what is measured here; forms and counts are checked all the same.
        options = {"rng": rng, "on_step": self._look, "validate": "never"}
        return build_decoder(context, lambda context: self.build(context, self.gamma), self.verifier(), **options)

    def _step(self, decoder: Decoder, length: int) -> None:
        limit = decoder.sequences.limit
        limit[:] = [min(room, length) for room in limit]
        decoder.step()

    def _look(self, event: StepEvent) -> None:
        self.drafted = self.drafted or bool(event.draft.candidates.valid.any())


def _total_variation(states: dict[State, float], law: Tensor, length: int) -> float:
    """Complete every output with ``law [V+1, V]`` to ``length`` tokens and compare with the target's joint law."""
    vocab, rows = law.shape[1], law.numpy()
    ended = [np.zeros(vocab**n) for n in range(length + 1)]
    for (tokens, _), weight in states.items():
        n, beyond = min(len(tokens), length), tokens[length:]
        assert not beyond, "an output is longer than steps x (gamma + 1)"
        ended[n][_index(tokens, vocab)] += weight
    ours, target = ended[0], np.ones(1)
    for n in range(length):
        last = np.arange(vocab**n) % vocab if n else np.array([vocab])  # row V is the law of the first token
        ours = (ours[:, None] * rows[last]).ravel() + ended[n + 1]
        target = (target[:, None] * rows[last]).ravel()
    return float(np.abs(ours - target).sum() / 2)


def _index(tokens: Sequence[int], vocab: int) -> int:
    index = 0
    for token in tokens:
        index = index * vocab + token
    return index
