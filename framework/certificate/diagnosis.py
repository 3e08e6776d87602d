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
from itertools import product
from typing import Any

import numpy as np

from ..contracts.sampling import Sampling
from ..contracts.steps import StepEvent
from ..contracts.verifier import Verifier
from .certify import DrafterFactory, Path, WarmUp, certify, target_rows
from .draft_rows import draft_row
from .effort import TooLargeError
from .faults import outcomes
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


def _emissions(event: StepEvent) -> list[Emission]:
    """Emissions of the rows of a recorded step."""
    draft, p = event.draft.candidates, event.scores.p.double().numpy()
    emissions = []
    for row, (tau, token, path) in enumerate(outcomes(event.verdict)):
        nodes, tokens, parents, q = draft_row(draft, row)
        number = {node: i for i, node in enumerate(nodes.tolist())}
        masses = np.eye(p.shape[2])[np.array(tokens, dtype=int)] if q is None else q
        node = Node(tuple(tokens), tuple(parents), p[row, [0, *(nodes + 1)]], masses)
        accepted = range(tau) if event.verdict.path is None else path
        emissions.append(Emission(node, tuple(number[i] for i in accepted), token))
    return emissions


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
    start: WarmUp | None = None,
) -> Diagnosis:
    """Explain a failed certificate.

    Args:
        label: name of the drafts.
        lengths: draft length of each step of the failed certificate.
        sampling: of the target.
        scope: where it fails and where it does not, see `scope_of`.
        start: of the failed enumeration.
    """
    failures: list[list[Path]] = []
    steps, longest = len(lengths), max(lengths, default=0)
    sizes = [*range(1, longest + 1)] if longest else [0]
    for size in sizes:
        paths: list[Path] = []
        try:
            limits = [min(size, n) for n in lengths]
            result = certify(
                toy, build, verifier, steps=steps, gamma=limits, sampling=sampling, paths=paths, start=start
            )
        except TooLargeError:
            break
        if not result.lossless:
            failures.append(paths)
        if len(failures) == 2 or len(paths) * toy.vocab_size**2 > MOST_PATHS:
            break
    if not failures:
        return Diagnosis(", ".join(filter(None, ["not located: the pair is too large to list its paths", scope])))
    rows = target_rows(toy, sampling, start, result.last_token).numpy()
    located = _Located(toy, rows, failures[0])
    location, example = located.location(), located.counterexample(label, sampling.temperature)
    cause = ""
    if located.kinds:
        cause = _cause(_Located(toy, rows, failures[-1]))
    return Diagnosis("; ".join(filter(None, [location, scope])), cause, example)


class _Located:
    """The first position at which outputs differ from the target.

    Attributes:
        step: number of the step, 0 for the first.
        kinds: kinds of event that are wrong there.
    """

    def __init__(self, toy: Toy, rows: np.ndarray, paths: Sequence[Path]):
        self.toy, self._rows = toy, rows
        batches = {id(event): _emissions(event) for event in {id(e): e for p in paths for e in p.steps}.values()}
        self.emissions = [(path, [batches[id(event)][path.row] for event in path.steps]) for path in paths]
        self.kinds: list[str] = []
        self.step: int | None = None
        self.after: tuple[int, ...] = ()
        self.token, self.target, self.emitted = 0, 0.0, 0.0
        for position in range(max(len(path.output) for path in paths)):
            if self._locate(position):
                break

    def _probs(self, after: tuple[int, ...]) -> np.ndarray:
        return self._rows[after[-1] if after else self.toy.vocab_size]

    def _at(self, position: int) -> Iterator[tuple[Path, int, str, Emission, int]]:
        """Path, step, kind, emission and index in it, of the token at a position of each path that emits it."""
        for path, emissions in self.emissions:
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
                reached = np.prod([self._probs(after[:n])[token] for n, token in enumerate(after)])  # in both
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
        draft = list(emission.draft.tokens), list(emission.draft.parents), _outcome(kind, emission, index)
        emitted = list(self.after), self.token, self.target, self.emitted
        return Counterexample(self.toy.name, label, temperature, step + 1, *draft, *emitted)


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


def _residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return _norm((p - q).clip(0))


def _one_hot(size: int, token: int) -> np.ndarray:
    return np.eye(size)[token]


def _argmax(weights: np.ndarray) -> np.ndarray:
    return _one_hot(len(weights), int(weights.argmax()))


#: Probability of accepting token t, that of node i of a chain: (draft, i, t) -> h. The first is right.
_ACCEPTANCE: dict[str, Callable[[Node, int, int], float]] = {
    "": lambda d, i, t: _ratio(d.p[i, t], d.q[i, t]),
    "min(1, Q/P): P and Q are exchanged": lambda d, i, t: _ratio(d.q[i, t], d.p[i, t]),
    "1: every token is accepted": lambda d, i, t: 1.0,
    "P, so Q is ignored": lambda d, i, t: d.p[i, t],
    "Q, so P is ignored": lambda d, i, t: d.q[i, t],
    "1 if P >= Q, else 0": lambda d, i, t: d.p[i, t] >= d.q[i, t],
    "1 if P > 0, else 0": lambda d, i, t: d.p[i, t] > 0,
    "1 if the token is the argmax of P, else 0": lambda d, i, t: d.p[i].argmax() == t,
    "1 if the token is the argmax of Q, else 0": lambda d, i, t: d.q[i].argmax() == t,
} | {
    f"min(1, P/Q) with {reason}": lambda d, i, t, at=at: _ratio(d.p[at(d, i)[0], t], d.q[at(d, i)[1], t])
    for reason, at in {  # positions of P and Q
        "P after the token: the position of p is off by one": lambda d, i: (i + 1, i),
        "P of the position before: the position of p is off by one": lambda d, i: (max(i - 1, 0), i),
        "P at the root for every token": lambda d, i: (0, i),
        "Q of the next node": lambda d, i: (i, min(i + 1, len(d.q) - 1)),
        "Q of the node before": lambda d, i: (i, max(i - 1, 0)),
        "Q of the first node for every token": lambda d, i: (i, 0),
        "Q of the last node for every token": lambda d, i: (i, -1),
    }.items()
}


def _prefix(coins: Sequence[bool]) -> int:
    return next((i for i, coin in enumerate(coins) if not coin), len(coins))


def _last(coins: Sequence[bool]) -> int:
    return max((i + 1 for i, coin in enumerate(coins) if coin), default=0)


#: Number of accepted tokens from one coin a token. The first is right.
_COUNT: dict[str, Callable[[Sequence[bool]], int]] = {
    "": _prefix,
    "tokens after a rejection count as accepted (a sum of coins instead of their cumulative product)": sum,
    "the last accepted coin counts, whatever was rejected before it": _last,
    "one token too many is accepted: the rejected token stays (off by one)": lambda c: min(_prefix(c) + 1, len(c)),
    "one token too few is accepted (off by one)": lambda c: max(_prefix(c) - 1, 0),
}

#: Distribution of the token after tau < n accepted tokens: (draft, tau) -> [V]. The first is right.
_CORRECTION: dict[str, Callable[[Node, int], np.ndarray]] = {
    "": lambda d, k: _residual(d.p[k], d.q[k]),
    "P itself, not from the residual norm(max(P - Q, 0))": lambda d, k: d.p[k],
    "Q": lambda d, k: d.q[k],
    "norm(max(Q - P, 0)): P and Q are exchanged": lambda d, k: _residual(d.q[k], d.p[k]),
    "norm(|P - Q|): it lacks the maximum with 0": lambda d, k: _norm(abs(d.p[k] - d.q[k])),
    "P without the drafted token, which is right for point masses only": lambda d, k: _norm(
        d.p[k] * (np.arange(len(d.p[k])) != d.tokens[k])
    ),
    "P of the next position": lambda d, k: d.p[k + 1],
    "P at the root": lambda d, k: d.p[0],
    "P of the last position": lambda d, k: d.p[-1],
    "norm(max(P - Q, 0)) with P of the next position": lambda d, k: _residual(d.p[k + 1], d.q[k]),
    "norm(max(P - Q, 0)) with P at the root": lambda d, k: _residual(d.p[0], d.q[k]),
    "norm(max(P - Q, 0)) with Q of the next node": lambda d, k: _residual(d.p[k], d.q[min(k + 1, len(d.q) - 1)]),
    "norm(max(P - Q, 0)) with Q of the node before": lambda d, k: _residual(d.p[k], d.q[max(k - 1, 0)]),
    "norm(max(P - Q, 0)) with Q of the first node": lambda d, k: _residual(d.p[k], d.q[0]),
    "norm(max(P - Q, 0)) of the first position": lambda d, k: _residual(d.p[0], d.q[0]),
    "norm(max(P - Q, 0)) of the last position": lambda d, k: _residual(d.p[len(d.q) - 1], d.q[-1]),
    "the argmax of P": lambda d, k: _argmax(d.p[k]),
    "the argmax of Q": lambda d, k: _argmax(d.q[k]),
    "the argmax of P - Q": lambda d, k: _argmax(d.p[k] - d.q[k]),
    "the rejected token": lambda d, k: _one_hot(d.q.shape[1], d.tokens[k]),
    "a uniform distribution": lambda d, k: np.full(d.p.shape[1], 1 / d.p.shape[1]),
    "a constant, token 0": lambda d, k: _one_hot(d.p.shape[1], 0),
}

#: Distribution of the bonus token after n nodes: (draft, n) -> [V]; of no node, it is P. The first is right.
_BONUS: dict[str, Callable[[Node, int], np.ndarray]] = {
    "": lambda d, n: d.p[-1],
    "P of the position before the last token, p[b, n - 1] instead of p[b, n]": lambda d, n: d.p[n - 1],
    "P at the root, p[b, 0] instead of p[b, n]": lambda d, n: d.p[0],
    "Q of the last token": lambda d, n: d.q[-1],
    "norm(max(P - Q, 0)) with Q of the last token": lambda d, n: _residual(d.p[-1], d.q[-1]),
    "norm(max(P - Q, 0)) of the last token": lambda d, n: _residual(d.p[-2], d.q[-1]),
    "the argmax of P": lambda d, n: _argmax(d.p[-1]),
    "the argmax of Q": lambda d, n: _argmax(d.q[-1]),
    "the last drafted token": lambda d, n: _one_hot(d.p.shape[1], d.tokens[-1]),
    "a uniform distribution": lambda d, n: np.full(d.p.shape[1], 1 / d.p.shape[1]),
    "a constant, token 0": lambda d, n: _one_hot(d.p.shape[1], 0),
}
#: Formulas of the bonus token that need no node.
_WITHOUT_NODES = {"the argmax of P", "a uniform distribution", "a constant, token 0"}

#: Chains of a step, each after one output: the draft, and the mass of its outcomes ``[V]`` by tau.
_Cases = list[tuple[Node, dict[int, np.ndarray]]]


def _cause(located: _Located) -> str:
    """Name the mistake by the first formulas that fit the outcomes of a step on chains; empty if none fits."""
    step, cases = located.step or 0, dict[Any, tuple[Node, dict[int, np.ndarray]]]()
    for path, emissions in located.emissions:
        if step >= len(emissions):
            continue
        draft, nodes, token = emissions[step].draft, emissions[step].nodes, emissions[step].token
        if not draft.is_chain:
            return ""
        before = sum(len(e.nodes) + 1 for e in emissions[:step])
        _, masses = cases.setdefault((path.output[:before], draft), (draft, {}))
        masses.setdefault(len(nodes), np.zeros(located.toy.vocab_size))[token] += path.weight
    acceptance = _fitting_acceptance(list(cases.values()))
    causes = [acceptance or ""]
    residual = _fitting_tokens(list(cases.values()), bonus=False)
    bonus = _fitting_tokens(list(cases.values()), bonus=True)
    if residual and (CORRECTION in located.kinds or ACCEPTED in located.kinds):
        causes.append(f"after a rejection the token is drawn from {residual}")
    if bonus and BONUS in located.kinds:
        causes.append(f"the bonus token is drawn from {bonus}")
    return "; ".join(filter(None, causes))


def _fitting_acceptance(cases: _Cases) -> str | None:
    """The mistake in the number of accepted tokens; empty if it is that of token verification, None if none fits."""
    measured = []
    for draft, masses in cases:
        taus = np.array([masses[tau].sum() if tau in masses else 0.0 for tau in range(len(draft.tokens) + 1)])
        if taus.sum():
            measured.append((draft, taus / taus.sum()))
    for count_name, count in _COUNT.items():
        for name, h in _ACCEPTANCE.items():
            if all(abs(_taus(draft, h, count) - taus).max() <= FIT for draft, taus in measured):
                parts = [f"drafted tokens are accepted with probability {name}" if name else "", count_name]
                return "; ".join(filter(None, parts))
    return None


def _taus(draft: Node, h: Callable[[Node, int, int], float], count: Callable[[Sequence[bool]], int]) -> np.ndarray:
    """``[n + 1]``: the probability of each number of accepted tokens."""
    n = len(draft.tokens)
    result, probs = np.zeros(n + 1), [float(h(draft, i, token)) for i, token in enumerate(draft.tokens)]
    for coins in product((False, True), repeat=n):
        result[count(coins)] += np.prod([p if coin else 1 - p for p, coin in zip(probs, coins, strict=True)])
    return result


def _fitting_tokens(cases: _Cases, *, bonus: bool) -> str | None:
    """The formula of the bonus token or of the correction; empty if it is right, None if none fits."""
    measured = [
        (draft, tau, mass / mass.sum())
        for draft, masses in cases
        for tau, mass in masses.items()
        if mass.sum() > 0 and (tau == len(draft.tokens)) == bonus
    ]

    def fits(name: str, formula: Callable[[Node, int], np.ndarray], draft: Node, tau: int, drawn: np.ndarray) -> bool:
        applies = not bonus or draft.tokens or name in _WITHOUT_NODES
        return abs((formula(draft, tau) if applies else draft.p[-1]) - drawn).max() <= FIT

    for name, formula in (_BONUS if bonus else _CORRECTION).items():
        if measured and all(fits(name, formula, *case) for case in measured):
            return name
    return None
