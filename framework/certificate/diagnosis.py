"""Diagnosis of a failed certificate: the smallest counterexample, where the error sits, and the mistake.

The outputs of all decision paths are compared with the target token by token. Up to the first position at which they
differ, every emitted token is right, so the mistake is in the events that emit this token: an accepted node, a
correction after a rejection, or a bonus token after the last node. Let a path emit token y after w by one of these
events with mass m(w, y). The
total must be proportional to P(y | w), as the outputs that ended before are completed by the target:

    the bonus tokens by themselves are not proportional to P    -> the bonus token
    the mass of accepted nodes exceeds the target's             -> the acceptance: no residual can repair it
    neither                                                     -> the token after a rejection (the residual)

On chains, probabilities of acceptance and distributions of tokens are then compared with formulas of common mistakes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..contracts.draft import Draft
from ..contracts.sampling import Sampling
from ..contracts.steps import StepEvent
from ..contracts.verifier import Verifier
from .certify import DrafterFactory, Path, certify
from .effort import TooLargeError
from .table_lm import Toy

#: Smallest deviation of a probability that is not round-off, and of a formula from the measured value.
DEVIATION, FIT = 1e-10, 1e-9
#: Maximum decision paths of a diagnosis.
MOST_PATHS = 20_000


@dataclass(frozen=True)
class Counterexample:
    """The smallest case in which the output differs from the target.

    Attributes:
        toy, draft: names of the toy and of the drafts.
        temperature: of the target.
        step: number of the step, 1 for the first.
        tokens, parents: the draft.
        outcome: the event that emits the token.
        after: output before the token.
        token: the token that is emitted too often.
        target, emitted: its probabilities given ``after``.
    """

    toy: str
    draft: str
    temperature: float
    step: int
    tokens: list[int]
    parents: list[int]
    outcome: str
    after: list[int]
    token: int
    target: float
    emitted: float

    def __str__(self) -> str:
        tree = "" if self.parents == list(range(-1, len(self.parents) - 1)) else f", parents {self.parents}"
        return (
            f"toy '{self.toy}', draft '{self.draft}', temperature {self.temperature:g}"
            f"{f', step {self.step}' if self.step > 1 else ''}: drafted {self.tokens}{tree}; {self.outcome}; "
            f"token {self.token} after {self.after}: target probability {self.target:.6g}, emitted {self.emitted:.6g}"
        )


@dataclass(frozen=True)
class Diagnosis:
    """Result of `diagnose`.

    Attributes:
        location: place of the error.
        cause: the mistake, empty if no formula fits.
        counterexample: None if the pair is too large to be enumerated path by path.
    """

    location: str
    cause: str = ""
    counterexample: Counterexample | None = None

    @property
    def summary(self) -> str:
        return self.cause or f"error {self.location}"

    def lines(self) -> list[str]:
        """The diagnosis as lines of text."""
        lines = [f"where: {self.location}"] if self.location else []
        if self.cause:
            lines.append(f"mistake: {self.cause}")
        if self.counterexample is not None:
            lines.append(f"counterexample: {self.counterexample}")
        return lines

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# -- events ------------------------------------------------------------------------------------------------------

#: Kinds of event that emit a token.
ACCEPTED, CORRECTION, BONUS = "accepted", "correction", "bonus"


@dataclass(frozen=True)
class Node:
    """A row of a draft on the host: tokens and parents of its valid nodes, and the distributions of their tokens.

    ``p [n + 1, V]``, ``q [n, V]`` (one-hot for point masses).
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    p: np.ndarray = field(compare=False)
    q: np.ndarray = field(compare=False)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def path(self, tau: int, path: Sequence[int] | None) -> list[int]:
        return list(range(tau)) if path is None else list(path[:tau])

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]


@dataclass(frozen=True)
class Emission:
    """A step of a path: its draft, the accepted nodes, and the token after them."""

    draft: Node
    nodes: tuple[int, ...]
    token: int

    @property
    def ending(self) -> str:
        """The kind of the last token."""
        return CORRECTION if self.draft.children(self.nodes[-1] if self.nodes else -1) else BONUS

    @property
    def tokens(self) -> list[int]:
        return [*(self.draft.tokens[node] for node in self.nodes), self.token]


class _Events:
    """Emissions of recorded steps, each batch copied to the host once."""

    def __init__(self) -> None:
        self._batches: dict[int, tuple[StepEvent, list[Emission]]] = {}

    def of(self, event: StepEvent, row: int) -> Emission:
        if id(event) not in self._batches:
            self._batches[id(event)] = event, list(self._read(event))
        return self._batches[id(event)][1][row]

    @staticmethod
    def _read(event: StepEvent) -> Iterator[Emission]:
        draft, p = event.draft.candidates, event.scores.p.double().numpy()
        lengths, tokens = event.verdict.length.tolist(), event.verdict.token.tolist()
        paths = None if event.verdict.path is None else event.verdict.path.tolist()
        q = _q(draft, p.shape[2])
        valid = draft.valid.numpy()
        all_tokens, all_parents = draft.tokens.numpy(), draft.parents.numpy()
        for row, (tau, token) in enumerate(zip(lengths, tokens, strict=True)):
            kept = np.flatnonzero(valid[row])
            number = {-1: -1, **{int(node): i for i, node in enumerate(kept)}}
            nodes = Node(
                tuple(all_tokens[row, kept].tolist()),
                tuple(number[int(parent)] for parent in all_parents[row, kept]),
                p[row, [0, *(kept + 1)]],
                q[row, kept],
            )
            path = range(tau) if paths is None else paths[row][:tau]
            yield Emission(nodes, tuple(number[node] for node in path), token)


def _q(draft: Draft, vocab_size: int) -> np.ndarray:
    """``[B, N, V]``: the distributions that nodes were drawn from."""
    if draft.q is None or not draft.width:
        return np.eye(vocab_size)[draft.tokens.numpy()]
    q = draft.q.double().numpy()
    index = np.arange(draft.width)[None] if draft.q_index is None else draft.q_index.numpy()
    return q[np.arange(len(q))[:, None], np.broadcast_to(index, draft.tokens.shape)]


# -- where -------------------------------------------------------------------------------------------------------


def diagnose(
    toy: Toy,
    label: str,
    build: DrafterFactory,
    verifier: Callable[[], Verifier],
    *,
    lengths: Sequence[int],
    sampling: Sampling,
    scope: str = "",
) -> Diagnosis:
    """Explain a failed certificate.

    Args:
        label: name of the drafts.
        lengths: draft length of each step of the failed certificate.
        sampling: of the target.
        scope: where it fails and where it does not, see `scope_of`.
    """
    failures: list[tuple[list[int], list[Path]]] = []
    steps, longest = len(lengths), max(lengths, default=0)
    sizes = [*range(1, longest + 1)] if longest else [0]
    for size in sizes:
        paths: list[Path] = []
        try:
            result = certify(
                toy, build, verifier, steps=steps, gamma=[min(size, n) for n in lengths], sampling=sampling, paths=paths
            )
        except TooLargeError:
            break
        if not result.lossless:
            failures.append((list(lengths), paths))
        if len(failures) == 2 or len(paths) * toy.vocab_size**2 > MOST_PATHS:
            break
    if not failures:
        return Diagnosis(", ".join(filter(None, ["not located: the pair is too large to list its paths", scope])))
    rows = sampling.probs(toy.target.log()).numpy()
    located = _Located(toy, rows, failures[0][1])
    location, example = located.location(), located.counterexample(label, sampling.temperature)
    cause = ""
    if located.kinds:
        largest = _Located(toy, rows, failures[-1][1])
        cause = _cause([emission for _, emission in largest.emissions()], largest.step or 0, largest)
    return Diagnosis("; ".join(filter(None, [location, scope])), cause, example)


class _Located:
    """The first position at which outputs differ from the target.

    Attributes:
        step: number of the step, 0 for the first.
        kinds: kinds of event that are wrong there.
    """

    def __init__(self, toy: Toy, rows: np.ndarray, paths: Sequence[Path]):
        self.toy, self._rows, self._paths = toy, rows, paths
        self._events = _Events()
        self.kinds: list[str] = []
        self.step: int | None = None
        self.after: tuple[int, ...] = ()
        self.token, self.target, self.emitted = 0, 0.0, 0.0
        for position in range(max(len(path.output) for path in paths)):
            if self._locate(position):
                break

    def emissions(self) -> Iterator[tuple[Path, list[Emission]]]:
        for path in self._paths:
            yield path, [self._events.of(event, path.row) for event in path.steps]

    def _probs(self, after: tuple[int, ...]) -> np.ndarray:
        return self._rows[after[-1] if after else self.toy.vocab_size]

    def _at(self, position: int) -> Iterator[tuple[Path, int, str, Emission, int]]:
        """Path, step, kind, emission and index in it, of the token at a position of each path that emits it."""
        for path, emissions in self.emissions():
            start = 0
            for step, emission in enumerate(emissions):
                n = len(emission.nodes) + 1
                if start <= position < start + n:
                    index = position - start
                    kind = ACCEPTED if index < n - 1 else emission.ending
                    yield path, step, kind, emission, index
                    break
                start += n

    def _locate(self, position: int) -> bool:
        """Compare the token at ``position``; True if it differs from the target."""
        vocab = self.toy.vocab_size
        mass: dict[tuple[int, ...], dict[tuple[int, str], np.ndarray]] = defaultdict(
            lambda: defaultdict(lambda: np.zeros(vocab))
        )
        for path, step, kind, *_ in self._at(position):
            mass[path.output[:position]][step, kind][path.output[position]] += path.weight
        worst = 0.0
        wrong: dict[str, None] = {}
        steps: set[int] = set()
        for after, events in mass.items():
            p = self._probs(after)
            total = np.sum(list(events.values()), axis=0)
            deviation = total - total.sum() * p
            if abs(deviation).max() <= DEVIATION:
                continue
            if deviation.max() > worst:
                worst, self.after, self.token = float(deviation.max()), after, int(deviation.argmax())
                reached = self._reached(after)
                self.target = float(p[self.token])
                self.emitted = float(self.target + deviation[self.token] / reached)
            for step in {step for step, _ in events}:
                parts = {kind: m for (number, kind), m in events.items() if number == step}
                kinds = _wrong_kinds(parts, p)
                wrong |= dict.fromkeys(kinds)
                steps |= {step} if kinds else set()
        if not worst:
            return False
        self.kinds, self.step = list(wrong), min(steps, default=None)
        return True

    def _reached(self, after: tuple[int, ...]) -> float:
        """Probability of outputs that start with ``after``, the same in output and target."""
        probability, before = 1.0, ()
        for token in after:
            probability, before = probability * float(self._probs(before)[token]), (*before, token)
        return probability

    def location(self) -> str:
        kinds = self.kinds or [CORRECTION]
        names = {
            ACCEPTED: "in the acceptance: drafted tokens are accepted too often, which no residual can repair",
            CORRECTION: "at a rejection: the token that replaces a rejected one (the residual)",
            BONUS: "at the bonus token, after the last accepted node of a draft",
        }
        place = " and ".join(names[kind] for kind in kinds)
        later = self.step and ", in the second step only (state that is carried from the first)"
        return place + (later or "")

    def counterexample(self, label: str, temperature: float) -> Counterexample | None:
        position = len(self.after)
        masses: dict[tuple[Any, ...], float] = defaultdict(float)
        examples: dict[tuple[Any, ...], tuple[int, str, Emission, int]] = {}
        for path, step, kind, emission, index in self._at(position):
            if path.output[: position + 1] != (*self.after, self.token):
                continue
            key = step, kind, emission.draft, emission.nodes
            masses[key] += path.weight
            examples.setdefault(key, (step, kind, emission, index))
        if not masses:
            return None
        preferred = [key for key in masses if key[1] in self.kinds and key[0] == (self.step or 0)] or list(masses)
        key = max(preferred, key=lambda key: (-len(key[2].tokens), masses[key]))
        step, kind, emission, index = examples[key]
        return Counterexample(
            toy=self.toy.name,
            draft=label,
            temperature=temperature,
            step=step + 1,
            tokens=list(emission.draft.tokens),
            parents=list(emission.draft.parents),
            outcome=_outcome(kind, emission, index),
            after=list(self.after),
            token=self.token,
            target=self.target,
            emitted=self.emitted,
        )


def _wrong_kinds(mass: dict[str, np.ndarray], p: np.ndarray) -> list[str]:
    """Kinds of event whose tokens, with these masses ``[V]``, do not follow ``p [V]``."""
    wrong = []
    bonus = mass.get(BONUS, np.zeros_like(p))
    if abs(bonus - bonus.sum() * p).max() > DEVIATION:
        wrong.append(BONUS)
    accepted, correction = (mass.get(kind, np.zeros_like(p)) for kind in (ACCEPTED, CORRECTION))
    total = accepted + correction
    if abs(total - total.sum() * p).max() > DEVIATION:
        too_often = (accepted > total.sum() * p + DEVIATION).any()
        wrong.append(ACCEPTED if too_often else CORRECTION)
    return wrong


def _outcome(kind: str, emission: Emission, index: int) -> str:
    accepted = [emission.draft.tokens[node] for node in emission.nodes]
    if kind == ACCEPTED:
        node = emission.nodes[index]
        siblings = emission.draft.children(emission.draft.parents[node])
        later = f" (child {siblings.index(node) + 1} of {len(siblings)})" if len(siblings) > 1 else ""
        return f"node {node}{later} with token {emission.draft.tokens[node]} is accepted"
    if kind == BONUS:
        subject = f"all of {accepted} is accepted" if accepted else "there is nothing to accept"
        return f"{subject}, and token {emission.token} is the bonus token"
    rejected = [emission.draft.tokens[n] for n in emission.draft.children(emission.nodes[-1] if emission.nodes else -1)]
    first = f"{accepted} is accepted, " if accepted else ""
    return f"{first}{rejected} is rejected, and token {emission.token} is emitted instead"


# -- formulas of mistakes on chains -------------------------------------------------------------------------------


def _ratio(a: float, b: float) -> float:
    return min(1.0, a / b) if b > 0 else float(a > 0)


def _norm(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum() if weights.sum() > 0 else weights


#: Probability of accepting token i of a chain: (draft, i) -> h. The first is right.
_ACCEPTANCE: dict[str, Callable[[Node, int], float]] = {
    "": lambda d, i: _ratio(d.p[i][d.tokens[i]], d.q[i][d.tokens[i]]),
    "min(1, Q/P): P and Q are exchanged": lambda d, i: _ratio(d.q[i][d.tokens[i]], d.p[i][d.tokens[i]]),
    "1: every token is accepted": lambda d, i: 1.0,
    "P, so Q is ignored": lambda d, i: float(d.p[i][d.tokens[i]]),
    "Q, so P is ignored": lambda d, i: float(d.q[i][d.tokens[i]]),
    "1 if P >= Q, else 0": lambda d, i: float(d.p[i][d.tokens[i]] >= d.q[i][d.tokens[i]]),
    "1 if P > 0, else 0": lambda d, i: float(d.p[i][d.tokens[i]] > 0),
    "1 if the token is the argmax of P, else 0": lambda d, i: float(d.p[i].argmax() == d.tokens[i]),
    "1 if the token is the argmax of Q, else 0": lambda d, i: float(d.q[i].argmax() == d.tokens[i]),
    "min(1, P/Q) with P after the token: the position of p is off by one": lambda d, i: _ratio(
        d.p[i + 1][d.tokens[i]], d.q[i][d.tokens[i]]
    ),
    "min(1, P/Q) with P of the position before: the position of p is off by one": lambda d, i: _ratio(
        d.p[max(i - 1, 0)][d.tokens[i]], d.q[i][d.tokens[i]]
    ),
    "min(1, P/Q) with P at the root for every token": lambda d, i: _ratio(d.p[0][d.tokens[i]], d.q[i][d.tokens[i]]),
    "min(1, P/Q) with Q of the next node": lambda d, i: _ratio(
        d.p[i][d.tokens[i]], d.q[min(i + 1, len(d.q) - 1)][d.tokens[i]]
    ),
    "min(1, P/Q) with Q of the node before": lambda d, i: _ratio(d.p[i][d.tokens[i]], d.q[max(i - 1, 0)][d.tokens[i]]),
    "min(1, P/Q) with Q of the first node for every token": lambda d, i: _ratio(
        d.p[i][d.tokens[i]], d.q[0][d.tokens[i]]
    ),
    "min(1, P/Q) with Q of the last node for every token": lambda d, i: _ratio(
        d.p[i][d.tokens[i]], d.q[-1][d.tokens[i]]
    ),
}


def _prefix(coins: Sequence[bool]) -> int:
    return next((i for i, coin in enumerate(coins) if not coin), len(coins))


#: Number of accepted tokens from one coin a token. The first is right.
_COUNT: dict[str, Callable[[Sequence[bool]], int]] = {
    "": _prefix,
    "tokens after a rejection count as accepted (a sum of coins instead of their cumulative product)": sum,
    "the last accepted coin counts, whatever was rejected before it": lambda coins: max(
        (i + 1 for i, coin in enumerate(coins) if coin), default=0
    ),
    "one token too many is accepted: the rejected token stays (off by one)": lambda coins: min(
        _prefix(coins) + 1, len(coins)
    ),
    "one token too few is accepted (off by one)": lambda coins: max(_prefix(coins) - 1, 0),
}

#: Distribution of the token after tau < n accepted tokens: (draft, tau) -> [V]. The first is right.
_RESIDUAL: dict[str, Callable[[Node, int], np.ndarray]] = {
    "": lambda d, k: _norm((d.p[k] - d.q[k]).clip(0)),
    "P itself, not from the residual norm(max(P - Q, 0))": lambda d, k: d.p[k],
    "Q": lambda d, k: d.q[k],
    "norm(max(Q - P, 0)): P and Q are exchanged": lambda d, k: _norm((d.q[k] - d.p[k]).clip(0)),
    "norm(|P - Q|): it lacks the maximum with 0": lambda d, k: _norm(abs(d.p[k] - d.q[k])),
    "P without the drafted token, which is right for point masses only": lambda d, k: _norm(
        d.p[k] * (np.arange(len(d.p[k])) != d.tokens[k])
    ),
    "P of the next position": lambda d, k: d.p[k + 1],
    "P at the root": lambda d, k: d.p[0],
    "P of the last position": lambda d, k: d.p[-1],
    "norm(max(P - Q, 0)) with P of the next position": lambda d, k: _norm((d.p[k + 1] - d.q[k]).clip(0)),
    "norm(max(P - Q, 0)) with P at the root": lambda d, k: _norm((d.p[0] - d.q[k]).clip(0)),
    "norm(max(P - Q, 0)) with Q of the next node": lambda d, k: _norm((d.p[k] - d.q[min(k + 1, len(d.q) - 1)]).clip(0)),
    "norm(max(P - Q, 0)) with Q of the node before": lambda d, k: _norm((d.p[k] - d.q[max(k - 1, 0)]).clip(0)),
    "norm(max(P - Q, 0)) with Q of the first node": lambda d, k: _norm((d.p[k] - d.q[0]).clip(0)),
    "norm(max(P - Q, 0)) of the first position": lambda d, k: _norm((d.p[0] - d.q[0]).clip(0)),
    "norm(max(P - Q, 0)) of the last position": lambda d, k: _norm((d.p[len(d.q) - 1] - d.q[-1]).clip(0)),
    "the argmax of P": lambda d, k: np.eye(len(d.p[k]))[d.p[k].argmax()],
    "the argmax of Q": lambda d, k: np.eye(len(d.q[k]))[d.q[k].argmax()],
    "the argmax of P - Q": lambda d, k: np.eye(len(d.q[k]))[(d.p[k] - d.q[k]).argmax()],
    "the rejected token": lambda d, k: np.eye(len(d.q[k]))[d.tokens[k]],
    "a uniform distribution": lambda d, k: np.full(len(d.p[k]), 1 / len(d.p[k])),
    "a constant, token 0": lambda d, k: np.eye(len(d.p[k]))[0],
}

#: Distribution of the bonus token after n nodes: draft -> [V]. The first is right.
_BONUS: dict[str, Callable[[Node], np.ndarray]] = {
    "": lambda d: d.p[-1],
    "P of the position before the last token, p[b, n - 1] instead of p[b, n]": lambda d: d.p[max(len(d.p) - 2, 0)],
    "P at the root, p[b, 0] instead of p[b, n]": lambda d: d.p[0],
    "Q of the last token": lambda d: d.q[-1] if len(d.q) else d.p[-1],
    "norm(max(P - Q, 0)) with Q of the last token": lambda d: (
        _norm((d.p[-1] - d.q[-1]).clip(0)) if len(d.q) else d.p[-1]
    ),
    "norm(max(P - Q, 0)) of the last token": lambda d: _norm((d.p[-2] - d.q[-1]).clip(0)) if len(d.q) else d.p[-1],
    "the argmax of P": lambda d: np.eye(len(d.p[-1]))[d.p[-1].argmax()],
    "the argmax of Q": lambda d: np.eye(len(d.q[-1]))[d.q[-1].argmax()] if len(d.q) else d.p[-1],
    "the last drafted token": lambda d: np.eye(len(d.p[-1]))[d.tokens[-1]] if d.tokens else d.p[-1],
    "a uniform distribution": lambda d: np.full(len(d.p[-1]), 1 / len(d.p[-1])),
    "a constant, token 0": lambda d: np.eye(len(d.p[-1]))[0],
}


def _cause(paths: Sequence[list[Emission]], step: int, located: _Located) -> str:
    """Name the mistake by the first formulas that fit the outcomes of a step on chains; empty if none fits."""
    vocab = located.toy.vocab_size
    taus: dict[Any, dict[int, np.ndarray]] = {}
    drafts: dict[Any, Node] = {}
    for (path, emissions), _ in zip(located.emissions(), paths, strict=True):
        if step >= len(emissions):
            continue
        emission = emissions[step]
        if not emission.draft.is_chain:
            return ""
        before = sum(len(e.nodes) + 1 for e in emissions[:step])
        key = path.output[:before], emission.draft
        drafts[key] = emission.draft
        masses = taus.setdefault(key, {})
        masses.setdefault(len(emission.nodes), np.zeros(vocab))[emission.token] += path.weight
    acceptance = _fitting_acceptance(taus, drafts)
    residual = _fitting_tokens(taus, drafts, bonus=False)
    bonus = _fitting_tokens(taus, drafts, bonus=True)
    causes = []
    if ACCEPTED in located.kinds or acceptance is None or acceptance:
        causes.append(acceptance or "")
    if residual and (CORRECTION in located.kinds or ACCEPTED in located.kinds):
        causes.append(f"after a rejection the token is drawn from {residual}")
    if bonus and BONUS in located.kinds:
        causes.append(f"the bonus token is drawn from {bonus}")
    return "; ".join(filter(None, causes))


def _fitting_acceptance(taus: dict[Any, dict[int, np.ndarray]], drafts: dict[Any, Node]) -> str | None:
    """The mistake in the number of accepted tokens; empty if it is that of token verification, None if none fits."""
    measured = {
        key: np.array([masses[tau].sum() if tau in masses else 0.0 for tau in range(len(drafts[key].tokens) + 1)])
        for key, masses in taus.items()
    }
    for count_name, count in _COUNT.items():
        for name, h in _ACCEPTANCE.items():
            if all(
                abs(_taus(drafts[key], h, count) - m / m.sum()).max() <= FIT for key, m in measured.items() if m.sum()
            ):
                parts = [f"drafted tokens are accepted with probability {name}" if name else "", count_name]
                return "; ".join(filter(None, parts))
    return None


def _taus(draft: Node, h: Callable[[Node, int], float], count: Callable[[Sequence[bool]], int]) -> np.ndarray:
    """``[n + 1]``: the probability of each number of accepted tokens."""
    n = len(draft.tokens)
    result, probs = np.zeros(n + 1), [h(draft, i) for i in range(n)]
    for number in range(2**n):
        coins = [bool(number >> i & 1) for i in range(n)]
        result[count(coins)] += np.prod([p if coin else 1 - p for p, coin in zip(probs, coins, strict=True)])
    return result


def _fitting_tokens(taus: dict[Any, dict[int, np.ndarray]], drafts: dict[Any, Node], *, bonus: bool) -> str | None:
    """The formula of the bonus token or of the correction; empty if it is right, None if none fits."""
    cases = [
        (drafts[key], tau, mass / mass.sum())
        for key, masses in taus.items()
        for tau, mass in masses.items()
        if mass.sum() > 0 and (tau == len(drafts[key].tokens)) == bonus
    ]
    formulas: dict[str, Callable[[Node, int], np.ndarray]] = _RESIDUAL
    if bonus:
        formulas = {name: lambda draft, tau, formula=formula: formula(draft) for name, formula in _BONUS.items()}
    for name, formula in formulas.items():
        if cases and all(abs(formula(draft, tau) - measured).max() <= FIT for draft, tau, measured in cases):
            return name
    return None
