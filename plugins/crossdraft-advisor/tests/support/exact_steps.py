"""One step of each rule in exact arithmetic, written from the papers, and random models to run it on.

A model maps a prefix (a tuple of tokens) to a distribution (a list of fractions). Every rule returns the joint
distribution of a step's tokens and tau. No code is shared with the tested implementation.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import ceil, prod

Model = Callable[[tuple[int, ...]], list[Fraction]]
#: What a step emitted, and tau, with its probability.
Joint = dict[tuple[tuple[int, ...], int], Fraction]
ONE, ZERO = Fraction(1), Fraction(0)


def random_model(seed: int, v: int) -> Model:
    """Cached random distributions, some with zeros."""
    rng, distributions = random.Random(seed), {}

    def probs(prefix: tuple[int, ...]) -> list[Fraction]:
        if prefix not in distributions:
            weights = [rng.choice([0, 1, 1, 2, 3, 5, 9]) for _ in range(v)]
            weights[rng.randrange(v)] += 1
            distributions[prefix] = [Fraction(w, sum(weights)) for w in weights]
        return distributions[prefix]

    return probs


def mixed(target: Model, other: Model) -> Model:
    """A drafter that is the target at every other depth."""
    return lambda prefix: target(prefix) if len(prefix) % 2 else other(prefix)


def chance(model: Model, tokens: tuple[int, ...]) -> Fraction:
    return prod((model(tokens[:i])[x] for i, x in enumerate(tokens)), start=ONE)


def strings(v: int, n: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(range(v), repeat=n)


def positive(values: list[Fraction]) -> list[Fraction]:
    return [max(x, ZERO) for x in values]


def scaled(weights: list[Fraction]) -> list[Fraction]:
    return [w / sum(weights) for w in weights]


def token(p: Model, q: Model, v: int, gamma: int) -> Joint:
    out: Joint = defaultdict(Fraction)
    for draft in strings(v, gamma):
        weight = chance(q, draft)
        for tau in range(gamma + 1) if weight else ():
            prefix = draft[:tau]
            probs = p(prefix)
            if tau < gamma:
                x, drawn = draft[tau], q(prefix)
                accept = min(ONE, probs[x] / drawn[x])
                rest = positive([a - b for a, b in zip(probs, drawn, strict=True)])
                for y, mass in enumerate(scaled(rest)) if accept < 1 else ():
                    out[(*prefix, y), tau] += weight * (1 - accept) * mass
                weight *= accept
            else:
                for y, mass in enumerate(probs):
                    out[(*prefix, y), tau] += weight * mass
    return out


def block(p: Model, q: Model, v: int, gamma: int) -> Joint:
    out: Joint = defaultdict(Fraction)
    for draft in strings(v, gamma):
        weight = chance(q, draft)
        if not weight:
            continue
        keep = [ONE]
        for i, x in enumerate(draft):
            keep.append(min(ONE, keep[-1] * p(draft[:i])[x] / q(draft[:i])[x]))
        left = ONE  # no longer prefix was accepted
        for tau in range(gamma, -1, -1):
            prefix, probs = draft[:tau], p(draft[:tau])
            rest = list(probs)
            if tau < gamma:
                rest = positive([keep[tau] * a - b for a, b in zip(probs, q(prefix), strict=True)])
            s = sum(rest)
            if tau == gamma:
                h = keep[tau]
            else:
                h = s / (s + 1 - keep[tau]) if s + 1 - keep[tau] else ONE
            h = ONE if tau == 0 else h
            for y, mass in enumerate(scaled(rest)) if s and h * left else ():
                out[(*prefix, y), tau] += weight * left * h * mass
            left *= 1 - h
    return out


def point_mass(p: Model, draft: tuple[int, ...], v: int) -> Joint:
    """Token verification of a draft that was not drawn."""

    def q(prefix: tuple[int, ...]) -> list[Fraction]:
        return [Fraction(x == draft[len(prefix)]) for x in range(v)]

    return token(p, q, v, len(draft))


def many(p: Model, q: Model, v: int, gamma: int, k: int, node: Callable[..., Iterator]) -> Joint:
    """A rule on k i.i.d. sequences that decides node by node.

    ``node(p law, q law, drawn tokens in order)`` gives next tokens, whether the sequences that carry one go on with it,
    and its probability.
    """
    out: Joint = defaultdict(Fraction)

    def walk(prefix: tuple[int, ...], live: int, weight: Fraction) -> None:
        if len(prefix) == gamma:
            for y, mass in enumerate(p(prefix)):
                out[(*prefix, y), gamma] += weight * mass
            return
        for drawn in strings(v, live):
            chosen = prod((q(prefix)[x] for x in drawn), start=ONE)
            for y, should_continue, mass in node(p(prefix), q(prefix), drawn) if chosen else ():
                if mass and should_continue:
                    walk((*prefix, y), drawn.count(y), weight * chosen * mass)
                elif mass:
                    out[(*prefix, y), len(prefix)] += weight * chosen * mass

    walk((), k, ONE)
    return out


def specinfer(p: list[Fraction], q: list[Fraction], drawn: tuple[int, ...]) -> Iterator[tuple[int, bool, Fraction]]:
    left, probs = ONE, p
    for x in drawn:
        accept = min(ONE, probs[x] / q[x])
        yield x, True, left * accept
        left *= 1 - accept
        if not left:
            return
        probs = scaled(positive([a - b for a, b in zip(probs, q, strict=True)]))
    for y, mass in enumerate(probs):
        yield y, False, left * mass


def sample_match(p: list[Fraction], q: list[Fraction], drawn: tuple[int, ...]) -> Iterator[tuple[int, bool, Fraction]]:
    for y, mass in enumerate(p):
        yield y, y in drawn, mass


def spectr(slack: Fraction) -> Callable[..., Iterator[tuple[int, bool, Fraction]]]:
    """K-SEQ with a rational rho that is valid, and larger than the smallest one by less than ``slack``."""

    def node(p: list[Fraction], q: list[Fraction], drawn: tuple[int, ...]) -> Iterator[tuple[int, bool, Fraction]]:
        n = len(drawn)
        r = valid_rho(p, q, n, slack)
        common = [min(a / r, b) for a, b in zip(p, q, strict=True)]
        beta = sum(common)
        left = ONE
        for x in drawn:
            accept = min(ONE, p[x] / (r * q[x]))
            yield x, True, left * accept
            left *= 1 - accept
        if left:
            share = (1 - (1 - beta) ** n) / beta if beta else ZERO
            rest = scaled([a - c * share for a, c in zip(p, common, strict=True)])
            assert min(rest) >= 0
            for y, mass in enumerate(rest):
                yield y, y in drawn, left * mass  # a sequence whose token equals the residual's draw continues, too

    return node


def valid_rho(p: list[Fraction], q: list[Fraction], n: int, slack: Fraction) -> Fraction:
    """The first of 1, 1 + slack, 1 + 2 slack, .. that is valid for n draws; those above are valid, too."""

    def valid(steps: int) -> bool:
        r = 1 + steps * slack
        beta = sum(min(a / r, b) for a, b in zip(p, q, strict=True))
        return 1 - (1 - beta) ** n <= r * beta

    return 1 + bisect_left(range(ceil(n / slack)), True, key=valid) * slack


def given_output(joint: Joint, p: Model, output: tuple[int, ...]) -> list[Fraction]:
    """Pr(tau >= i | output), i = 1 .. gamma, where P completes what the step emitted."""
    gamma = len(output) - 1
    total, at_least = chance(p, output), [ZERO] * gamma
    for (report, tau), weight in joint.items():
        if output[: len(report)] == report:
            weight *= prod((p(output[:i])[output[i]] for i in range(len(report), len(output))), start=ONE)
            for i in range(tau):
                at_least[i] += weight / total
    return at_least
