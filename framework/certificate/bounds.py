"""Upper bounds on E[tau] of one step: how much could any verifier accept of these drafts?

Every draft that a drafter can make on a small exact model is enumerated with its probability; what follows looks
at nothing else of the drafter. x^i is a prefix of i tokens, M_b(x^i) its probability under the target, M_s(x^i)
the probability that it is drafted. As in the certificate, a token that equals a drafted child counts as accepted,
however it came about. Nothing here binds a verifier that is lossy.

For a verifier that keeps the law of every step (a drop-in rule, as Lemma 2 in Sun et al. 2024 defines it):

    E[tau] <= linear program <= full information <= gamma,

and for chains the first is the single-draft optimum. A rule that repays in later steps what it takes in this one
(greedy block verification) is bound by full information alone.

Z. Sun, U. Mendlovic, Y. Leviathan, A. Aharoni, J. H. Ro, A. Beirami, A. T. Suresh, "Block Verification
Accelerates Speculative Decoding", ICLR 2025, Lemmas 2 and 4; Z. Sun, A. T. Suresh, J. H. Ro, A. Beirami, H. Jain,
F. Yu, "SpecTr: Fast Speculative Decoding via Optimal Transport", NeurIPS 2023, section 4; Z. Hu, T. Zheng,
V. Viswanathan, Z. Chen, R. A. Rossi, Y. Wu, D. Manocha, H. Huang, "Towards Optimal Multi-draft Speculative
Decoding", ICLR 2025 (the dual of the transport, over subsets of the vocabulary).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..contracts.draft import Draft, Verdict
from ..contracts.rng import StepRng
from ..contracts.sampling import Sampling
from ..contracts.verifier import Verifier, VerifierTraits
from ..errors import NumericalError
from .certify import DrafterFactory, Enumeration, certify
from .effort import TooLargeError
from .table_lm import Toy

#: Different drafts that are told apart, and variables of the largest linear program.
MOST_DRAFTS = 20_000
MOST_VARIABLES = 50_000

#: The tokens of a path that starts at the root.
Prefix = tuple[int, ...]
#: A draft as the set of its nodes; the order in which siblings were drawn cannot change a bound.
Tree = frozenset[Prefix]
#: Entries (row, column, value) of a sparse matrix.
Matrix = list[tuple[int, int, float]]


@dataclass
class DraftLaw:
    """Every draft that a drafter can make from the start of a toy.

    Attributes:
        gamma: the most tokens a draft can be deep.
        trees: the different drafts and their probabilities.
        reach: M_s, the probability that a draft holds this prefix.
        sequences: K for K independent sequences, else ``None``.
        single: of independent sequences, the probability that the first one starts with this prefix.
    """

    gamma: int
    trees: dict[Tree, float] = field(default_factory=dict)
    reach: dict[Prefix, float] = field(default_factory=dict)
    sequences: int | None = None
    single: dict[Prefix, float] = field(default_factory=dict)

    @property
    def is_chain(self) -> bool:
        """Whether no draft branches."""
        return all(len(tree) == max(map(len, tree), default=0) for tree in self.trees)


@dataclass(frozen=True)
class Bounds:
    """Upper bounds on what lossless verifiers accept in the first step; ``None`` = does not apply or is too large.

    Attributes:
        single_draft: :func:`single_draft`, of chains alone; binds drop-in rules.
        full_information: :func:`full_information`; binds every rule.
        optimal_transport: :func:`optimal_transport`, on Pr(tau >= 1) instead of E[tau]; binds every rule.
        lp: :func:`linear_program`; binds drop-in rules.
        missing: sentences that say why some could not be computed.
    """

    single_draft: float | None = None
    full_information: float | None = None
    optimal_transport: float | None = None
    lp: float | None = None
    missing: tuple[str, ...] = ()


def bounds(toy: Toy, build: DrafterFactory, gamma: int, temperature: float = 1.0) -> Bounds:
    """All bounds for the drafts, ``gamma`` tokens deep, that ``build`` makes on ``toy`` (target at ``temperature``)."""
    try:
        drafts = draft_law(toy, build, gamma, temperature)
    except TooLargeError as error:
        return Bounds(missing=(f"toy {toy.name}: {error}",))
    joint = target_law(Sampling(temperature=temperature).probs(toy.target.log()), drafts)
    missing: dict[str, None] = {}

    def attempt(bound: Callable[[DraftLaw, Mapping[Prefix, float]], float]) -> float | None:
        try:
            return bound(drafts, joint)
        except TooLargeError as error:
            missing[f"toy {toy.name}: {error}"] = None
        return None

    return Bounds(
        single_draft=single_draft(drafts, joint) if drafts.is_chain else None,
        full_information=attempt(full_information),
        optimal_transport=attempt(optimal_transport),
        lp=attempt(linear_program),
        missing=tuple(missing),
    )


# -- the drafts and the target --------------------------------------------------------------------------


def draft_law(toy: Toy, build: DrafterFactory, gamma: int, temperature: float = 1.0) -> DraftLaw:
    """Let the drafter itself draft everything it can.

    Raises:
        TooLargeError: there are more than :data:`MOST_DRAFTS` different drafts.
    """
    law = DraftLaw(gamma)
    certify(toy, build, lambda: _Recorder(law), gamma=gamma, temperature=temperature)
    for tree, probability in law.trees.items():
        for prefix in tree:
            law.reach[prefix] = law.reach.get(prefix, 0.0) + probability
    return law


class _Recorder(Verifier):
    """Accepts nothing and writes down every draft with the probability of the decisions that led to it."""

    name = "recorder"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset(), lossless=False)

    def __init__(self, law: DraftLaw):
        super().__init__()
        self.law = law

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        assert isinstance(rng, Enumeration)
        sequences = None if draft.sequences is None else draft.sequences[:, 0].tolist()
        if draft.sequences is not None:
            self.law.sequences = draft.sequences.shape[1]
        rows = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.count.tolist(), rng.weight, strict=True)
        for row, (tokens, parents, count, weight) in enumerate(rows):
            prefixes: list[Prefix] = []
            for token, parent in zip(tokens[:count], parents[:count], strict=True):
                prefixes.append((*(prefixes[parent] if parent >= 0 else ()), token))
            tree = frozenset(prefixes)
            self.law.trees[tree] = self.law.trees.get(tree, 0.0) + float(weight)
            for node in sequences[row] if sequences is not None else ():
                if node >= 0:
                    prefix = prefixes[node]
                    self.law.single[prefix] = self.law.single.get(prefix, 0.0) + float(weight)
        if len(self.law.trees) > MOST_DRAFTS:
            raise TooLargeError(
                f"there are more than {MOST_DRAFTS:,} different drafts, too many for bounds; lower the draft "
                f"length with --gamma (now {self.law.gamma})"
            )
        nothing = torch.full_like(draft.tokens, -1)
        return Verdict(torch.zeros_like(draft.count), p[:, 0].argmax(-1), None if draft.is_chain else nothing)


def target_law(target: Tensor, drafts: DraftLaw) -> dict[Prefix, float]:
    """M_b of every prefix that is drafted, or that comes right after a drafted one; without those of mass 0.

    Args:
        target: ``[V + 1, V]`` float64, row x the law after token x, row V that at the start.
    """
    rows = target.tolist()
    joint: dict[Prefix, float] = {(): 1.0}
    for prefix in sorted({(), *drafts.reach}, key=len):
        if len(prefix) < drafts.gamma and prefix in joint:
            law = rows[prefix[-1] if prefix else -1]
            joint |= {(*prefix, token): joint[prefix] * p for token, p in enumerate(law) if p > 0}
    del joint[()]
    return joint


# -- the bounds -----------------------------------------------------------------------------------------


def single_draft(drafts: DraftLaw, joint: Mapping[Prefix, float]) -> float:
    """The most a drop-in rule can accept of a chain, sum_i sum_{x^i} M_s(x^i) p_i(x^i) (Sun et al. 2024, Lemma 4).

    p_i = min(1, p_{i-1} P(x_i) / Q(x_i)) in the form m(x^i) = min(M_s(x^i), m(x^{i-1}) P(x_i)), where M_s is the
    probability that the draft gets as far as x^i. Block verification attains it.
    """
    mass: dict[Prefix, float] = {}
    for prefix in sorted(drafts.reach, key=len):
        before = prefix[:-1]
        if prefix in joint:
            offered = mass[before] * joint[prefix] / joint[before] if before else joint[prefix]
            mass[prefix] = min(drafts.reach[prefix], offered)
    return sum(mass.values(), 0.0)


def full_information(drafts: DraftLaw, joint: Mapping[Prefix, float]) -> float:
    """What could be accepted if a step were free to break the law of its own output, sum_i alpha*_i.

    alpha*_i is the value of the optimal transport between the prefixes of i tokens that are drafted and M_b^i;
    sum_{x^i} min(M_b, M_s) for a chain.

    Raises:
        TooLargeError: a tree that needs a linear program, and that is too large.
    """
    return sum(_transport(drafts, joint, level) for level in range(1, drafts.gamma + 1))


def optimal_transport(drafts: DraftLaw, joint: Mapping[Prefix, float]) -> float:
    """alpha*, the largest Pr(Y is a child of the root) over all couplings of the children with Y ~ P.

    By max-flow/min-cut alpha* = 1 + min_{H subset of V} [P(H) - Pr(all children in H)].

    Raises:
        TooLargeError: as :func:`full_information`.
    """
    return _transport(drafts, joint, 1) if drafts.gamma else 0.0


def _transport(drafts: DraftLaw, joint: Mapping[Prefix, float], level: int) -> float:
    """alpha*_level, by the cheapest of three ways to the same number."""
    p = {prefix: mass for prefix, mass in joint.items() if len(prefix) == level}
    if drafts.is_chain:
        return sum(min(mass, drafts.reach.get(prefix, 0.0)) for prefix, mass in p.items())
    if drafts.sequences is not None:
        q = [drafts.single.get(prefix, 0.0) for prefix in p]
        return transport_iid(np.array(list(p.values())), np.array(q), drafts.sequences)
    sets: dict[Tree, float] = {}
    for tree, probability in drafts.trees.items():
        children = frozenset(prefix for prefix in tree if prefix in p)
        sets[children] = sets.get(children, 0.0) + probability
    return transport(sets, p)


def transport(sets: Mapping[Tree, float], p: Mapping[Prefix, float]) -> float:
    """The largest Pr(Y in S) over all couplings of a random set S with law ``sets`` and Y ~ ``p``: a maximum flow.

    Raises:
        TooLargeError, NumericalError: as :func:`linear_program`.
    """
    row = {prefix: len(sets) + i for i, prefix in enumerate(p)}
    pairs = [(number, prefix) for number, s in enumerate(sets) for prefix in s]
    matrix = [(number, i, 1.0) for i, (number, _) in enumerate(pairs)]
    matrix += [(row[prefix], i, 1.0) for i, (_, prefix) in enumerate(pairs)]
    return min(1.0, _maximum([1.0] * len(pairs), matrix, [*sets.values(), *p.values()]))


def transport_iid(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """alpha* for ``k`` independent draws from ``q``: 1 + min_H [P(H) - Q(H)^k].

    An optimal H is a prefix of the tokens sorted by P/Q (Hu et al. 2025), so that V log V steps are enough.

    Args:
        p, q: ``[V]`` float64. Tokens without target mass may be left out: they belong to every optimal H, so
            what is missing from ``q`` counts as theirs.
    """
    missing = max(0.0, 1.0 - float(q.sum()))
    order = np.argsort(np.divide(p, q, out=np.full(len(p), np.inf), where=q > 0))
    covered = np.minimum(missing + np.cumsum(q[order]), 1.0)
    cuts = np.concatenate([[-(missing**k)], np.cumsum(p[order]) - covered**k])
    return float(np.clip(1 + cuts.min(), 0.0, 1.0))


def linear_program(drafts: DraftLaw, joint: Mapping[Prefix, float]) -> float:
    """The largest E[tau] of all verifiers that are valid in the sense of Lemma 2 in Sun et al. 2024.

    A verifier stops at a node n of the draft D and emits a token y. Taking y as accepted if it is a child of n,
    the output w = n y is one of the shortest strings that D does not hold, or a path of gamma tokens that it does
    (the bonus token follows the target and can be left out). So the variables are pi(D, w), and

        sum_w pi(D, w) = Pr(D)                                               for every draft D,
        sum_D sum_{w that z starts with} pi(D, w) M_b(z) / M_b(w) = M_b(z)    for every longest output z:

    once the target has completed every output, their law is the target's. The rule may know everything about the
    target, also off the drafted paths, so a real verifier does no better.

    Raises:
        TooLargeError: there are more than :data:`MOST_VARIABLES` variables.
        NumericalError: the solver found no optimum.
    """
    children: dict[Prefix, list[Prefix]] = defaultdict(list)
    for w in joint:
        children[w[:-1]].append(w)
    longest = [w for w in joint if w not in children]
    ends: dict[Prefix, list[int]] = defaultdict(list)  # the longest outputs that start with w
    for i, z in enumerate(longest):
        for length in range(1, len(z) + 1):
            ends[z[:length]].append(i)
    tau: list[float] = []
    sums: Matrix = []
    laws: Matrix = []
    for number, tree in enumerate(drafts.trees):
        nodes: list[Prefix] = [()]
        while nodes:
            for w in children[nodes.pop()]:
                if w in tree and len(w) < drafts.gamma:
                    nodes.append(w)
                    continue
                sums.append((number, len(tau), 1.0))
                laws += [(z, len(tau), joint[longest[z]] / joint[w]) for z in ends[w]]
                tau.append(len(w) if w in tree else len(w) - 1)
    # Both sides sum to 1, so "at most" is "equal", but for rounding errors, which must not make it infeasible.
    masses = [joint[z] * (1 + 1e-12) for z in longest]
    return _maximum(tau, laws, masses, sums, list(drafts.trees.values()))


def _maximum(
    value: Sequence[float],
    below: Matrix,
    at_most: Sequence[float],
    equal: Matrix | None = None,
    equal_to: Sequence[float] | None = None,
) -> float:
    """max value x subject to below x <= at_most, equal x = equal_to, x >= 0."""
    if not any(value):
        return 0.0
    if len(value) > MOST_VARIABLES:
        raise TooLargeError(
            f"the linear program has {len(value):,} variables, more than the {MOST_VARIABLES:,} that are allowed; "
            "lower the draft length with --gamma"
        )
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    def matrix(entries: Matrix, rows: int) -> csr_array:
        row, column, values = zip(*entries, strict=True)
        return csr_array((values, (row, column)), shape=(rows, len(value)))

    found = linprog(
        c=-np.array(value, dtype=float),
        A_ub=matrix(below, len(at_most)),
        b_ub=at_most,
        A_eq=matrix(equal, len(equal_to)) if equal and equal_to else None,
        b_eq=equal_to,
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if found.status != 0:
        raise NumericalError(f"the solver of the linear program found no optimum: {found.message}")
    return float(-found.fun)
