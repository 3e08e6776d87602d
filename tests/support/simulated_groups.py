"""Groups of cells on a simulated machine that others disturb, with known speed-ups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from crossdraft.framework.metrics.component_times import CellPieces
from crossdraft.framework.metrics.pieces import Piece

TOKENS = 32
#: Drafters: draft length, and seconds of a draft for each token and beyond.
DRAFTERS = {
    "none": (0, 0.0, 1e-5),
    "lookup": (3, 0.0, 1.5e-4),
    "small": (3, 4e-3, 1e-3),
    "head": (4, 1.5e-3, 5e-4),
    "long": (6, 2.5e-3, 5e-4),
}
PAIRS = [(d, v) for d in list(DRAFTERS)[1:] for v in ("token", "block")]
#: How easily the drafts of each are accepted, beside the prompt's own ease.
EASE = {"lookup": 0.6, "small": 0.9, "head": 0.8, "long": 0.9, "none": 0.0}


@dataclass
class Machine:
    """A machine that is disturbed by ``factor`` in a share ``busy`` of its steps, or of its time in bursts.

    Attributes:
        burst: seconds that a neighbour stays, on average; 0: each step meets its own.
        counted: the share of the lost time that the kernel's counters report; 0: no counters.
        jitter: standard deviation of the logarithm of an undisturbed target pass.
    """

    random: Any
    factor: float = 1.0
    busy: float = 0.0
    burst: float = 0.0
    counted: float = 0.0
    jitter: float = 0.03
    _now: float = 0.0
    _until: float = 0.0
    _on: bool = field(default=False)

    def slowdown(self) -> float:
        """Time of the piece that starts now."""
        if not self.busy or (not self.burst and self.random.random() >= self.busy):
            return 1.0
        if self.burst:
            while self._now >= self._until:
                self._on = not self._on
                mean = self.burst if self._on else self.burst * (1 - self.busy) / self.busy
                self._until += self.random.exponential(mean)
            if not self._on:
                return 1.0
        return max(self.factor * float(np.exp(0.15 * self.random.standard_normal())), 1.1)

    def step(self, parts: list[float]) -> tuple[list[float], float]:
        """Seconds that the parts of a step take, and what was waited."""
        used, waited, slow = [], 0.0, self.slowdown()
        for seconds in parts:
            slow = self.slowdown() if self.burst else slow
            used.append(seconds * slow)
            waited += seconds * (slow - 1) * self.counted
            self._now += used[-1]
        return used, waited


def components(drafter: str, verifier: str, nodes: int, length: int) -> list[float]:
    """Mean seconds of draft, target, verify and rest."""
    _, each, fixed = DRAFTERS[drafter]
    verify = {"token": 8e-4, "block": 1.4e-3}[verifier] + 5e-5 * nodes
    return [each * nodes + fixed, 0.06 * (1 + 0.03 * nodes) * (1 + 0.02 * (length // 256)), verify, 1e-3]


def prefill(drafter: str, length: int) -> float:
    """Seconds of a drafter's prefill: a pass, and its tokens."""
    return 0.012 + length * 1e-4 if DRAFTERS[drafter][1] else 1e-5


def steps_of(random: Any, drafter: str, ease: float, prompt: int) -> Iterator[tuple[int, int, int]]:
    """Nodes, length and tokens emitted of each step of a sequence."""
    done, gamma = 0, DRAFTERS[drafter][0]
    while done < TOKENS:
        nodes, tau = min(gamma, TOKENS - done - 1), 0
        while tau < nodes and random.random() < EASE[drafter] * ease:
            tau += 1
        yield nodes, prompt + done, tau + 1
        done += tau + 1


def prompt_of(random: Any) -> tuple[float, int]:
    """Acceptance of a prompt, and its tokens."""
    return float(random.beta(5.0, 3.0)), int(random.integers(60, 400))


def group(machine: Machine, pairs: int, prompts: int, drift: float = 0.01) -> list[CellPieces]:
    """Plain decoding and some pairs on the same prompts, a prompt a piece, in random order."""
    random = machine.random
    cells = [("none", "token"), *PAIRS[:pairs]]
    pieces: list[list[Piece]] = [[] for _ in cells]
    for _ in range(prompts):
        ease, length = prompt_of(random)
        for i in random.permutation(len(cells)):
            drafter, verifier = cells[i]
            pace, emitted, steps = float(np.exp(drift * random.standard_normal())), 0, {}
            resume_from = machine.step([prefill(drafter, length)])
            for nodes, at, tokens in steps_of(random, drafter, ease, length):
                jitter = np.exp(np.array([0.08, machine.jitter, 0.1, 0.1]) * random.standard_normal(4))
                mean = components(drafter, verifier, nodes, at)
                used, waited = machine.step([m * float(x) * pace for m, x in zip(mean, jitter, strict=True)])
                row = [round(1e6 * s) for s in (*used, waited)]
                if not emitted:
                    row[-1] += round(1e6 * resume_from[1])
                    row += [length, round(1e6 * resume_from[0][0])]
                steps.setdefault(f"{nodes} {at // 256}", []).append(row)
                emitted += tokens
            pieces[i].append(Piece(emitted, {"target": 1.0}, steps=steps))
    return [CellPieces(*cell, by_name) for cell, by_name in zip(cells, pieces, strict=True)]


@cache
def truth(drafter: str, verifier: str) -> float:
    """The speed-up of a pair on an undisturbed machine, over very many prompts."""
    rates = []
    for d, v in ((drafter, verifier), ("none", "token")):
        random, tokens, seconds = np.random.default_rng(1), 0, 0.0
        for _ in range(4000):
            ease, length = prompt_of(random)
            seconds += prefill(d, length)
            for nodes, at, emitted in steps_of(random, d, ease, length):
                seconds += sum(components(d, v, nodes, at))
                tokens += emitted
        rates.append(tokens / seconds)
    return rates[0] / rates[1]
