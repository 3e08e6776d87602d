"""Upper bounds on E[tau] of one step over all lossless verifiers, for the drafts of a given drafter.

All drafts on a small exact model are enumerated with their probabilities; the bounds depend on nothing else of the
drafter. x^i is a prefix of i tokens, M_b(x^i) its probability under the target, M_s(x^i) the probability that it is
drafted. As in the certificate, a token that equals a drafted child counts as accepted. Lossy verifiers are not bound.

For a verifier that preserves the target distribution in every step (drop-in, Lemma 2 in Sun et al. 2024):

    E[tau] <= linear program <= full information <= gamma,

and for chains the linear program equals the single-draft optimum. A stateful verifier that compensates in later steps
(greedy block verification) is bound by full information only.

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

import numpy as np
from torch import Tensor

from ..contracts.draft import Draft
from ..contracts.sampling import Sampling
from ..errors import NumericalError
from .certify import DrafterFactory, certify
from .draft_rows import DraftRecorder, paths_of
from .effort import TooLargeError
from .table_lm import Toy

#: Maximum number of distinct drafts, and of variables of a linear program.
MOST_DRAFTS = 20_000
MOST_VARIABLES = 50_000

#: Tokens of a path from the root.
Prefix = tuple[int, ...]
#: A draft as the set of its nodes; sibling order does not change a bound.
Tree = frozenset[Prefix]
#: Entries (row, column, value) of a sparse matrix.
Matrix = list[tuple[int, int, float]]


@dataclass
class DraftDistribution:
    """Distribution of the drafts of a drafter at the start of a toy.

    Attributes:
        gamma: maximum draft depth.
        trees: draft -> probability.
        prefix_probs: M_s, the probability that a draft contains the prefix.
        sequences: K for K i.i.d. sequences, else ``None``.
        single: for i.i.d. sequences, the probability that the first one starts with the prefix.
    """

    gamma: int
    trees: dict[Tree, float] = field(default_factory=dict)
    prefix_probs: dict[Prefix, float] = field(default_factory=dict)
    sequences: int | None = None
    single: dict[Prefix, float] = field(default_factory=dict)

    @property
    def is_chain(self) -> bool:
        """True if no draft branches."""
        return all(len(tree) == max(map(len, tree), default=0) for tree in self.trees)

    def add(self, draft: Draft, p: Tensor, weight: np.ndarray) -> None:
        """Add a batch of drafts with their probabilities ``weight [B]``, see `DraftRecorder`."""
        sequences = None if draft.sequences is None else draft.sequences[:, 0].tolist()
        if draft.sequences is not None and not draft.trunk:
            self.sequences = draft.sequences.shape[1]
        rows = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.count.tolist(), weight, strict=True)
        for row, (tokens, parents, count, mass) in enumerate(rows):
            prefixes = paths_of(tokens[:count], parents[:count])
            tree = frozenset(prefixes.values()) - {()}
            self.trees[tree] = self.trees.get(tree, 0.0) + float(mass)
            for node in sequences[row] if sequences is not None else ():
                if node >= 0:
                    prefix = prefixes[node]
                    self.single[prefix] = self.single.get(prefix, 0.0) + float(mass)
        if len(self.trees) > MOST_DRAFTS:
            raise TooLargeError(
                f"bounds require at most {MOST_DRAFTS:,} distinct drafts, and there are more; lower the draft length "
                f"with --gamma (now {self.gamma})"
            )


@dataclass(frozen=True)
class Bounds:
    """Upper bounds on E[tau] of lossless verifiers in the first step; ``None`` = not applicable or too large.

    Attributes:
        single_draft: :func:`single_draft`, chains only; binds drop-in verifiers.
        full_information: :func:`full_information`; binds all verifiers.
        optimal_transport: :func:`optimal_transport`, on Pr(tau >= 1) instead of E[tau]; binds all verifiers.
        lp: :func:`linear_program`; binds drop-in verifiers.
        missing: reasons why bounds could not be computed.
    """

    single_draft: float | None = None
    full_information: float | None = None
    optimal_transport: float | None = None
    lp: float | None = None
    missing: tuple[str, ...] = ()


def bounds(toy: Toy, build: DrafterFactory, gamma: int, temperature: float = 1.0) -> Bounds:
    """Return all bounds for drafts of ``gamma`` tokens by the drafter of ``build`` on ``toy``."""
    try:
        drafts = draft_distribution(toy, build, gamma, temperature)
    except TooLargeError as error:
        return Bounds(missing=(f"toy {toy.name}: {error}",))
    joint = target_prefix_probs(Sampling(temperature=temperature).probs(toy.target.log()), drafts)
    missing: dict[str, None] = {}

    def attempt(bound: Callable[[DraftDistribution, Mapping[Prefix, float]], float]) -> float | None:
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


def draft_distribution(toy: Toy, build: DrafterFactory, gamma: int, temperature: float = 1.0) -> DraftDistribution:
    """Enumerate the drafts of the drafter.

    Raises:
        TooLargeError: more than :data:`MOST_DRAFTS` distinct drafts.
    """
    drafts = DraftDistribution(gamma)
    certify(toy, build, lambda: DraftRecorder(drafts.add), gamma=gamma, temperature=temperature)
    for tree, probability in drafts.trees.items():
        for prefix in tree:
            drafts.prefix_probs[prefix] = drafts.prefix_probs.get(prefix, 0.0) + probability
    return drafts


def target_prefix_probs(target: Tensor, drafts: DraftDistribution) -> dict[Prefix, float]:
    """M_b of all drafted prefixes and their children, without those of mass 0.

    Args:
        target: ``[V + 1, V]`` float64: row x holds the probabilities after token x, row V those of the first token.
    """
    rows = target.tolist()
    joint: dict[Prefix, float] = {(): 1.0}
    for prefix in sorted({(), *drafts.prefix_probs}, key=len):
        if len(prefix) < drafts.gamma and prefix in joint:
            probs = rows[prefix[-1] if prefix else -1]
            joint |= {(*prefix, token): joint[prefix] * p for token, p in enumerate(probs) if p > 0}
    del joint[()]
    return joint


# -- the bounds -----------------------------------------------------------------------------------------


def single_draft(drafts: DraftDistribution, joint: Mapping[Prefix, float]) -> float:
    """Maximum E[tau] of drop-in verifiers on chains, sum_i sum_{x^i} M_s(x^i) p_i(x^i) (Sun et al. 2024, Lemma 4).

    p_i = min(1, p_{i-1} P(x_i) / Q(x_i)) in the form m(x^i) = min(M_s(x^i), m(x^{i-1}) P(x_i)). Block verification
    attains it.
    """
    mass: dict[Prefix, float] = {}
    for prefix in sorted(drafts.prefix_probs, key=len):
        before = prefix[:-1]
        if prefix in joint:
            offered = mass[before] * joint[prefix] / joint[before] if before else joint[prefix]
            mass[prefix] = min(drafts.prefix_probs[prefix], offered)
    return sum(mass.values(), 0.0)


def full_information(drafts: DraftDistribution, joint: Mapping[Prefix, float]) -> float:
    """Maximum E[tau] if a step need not preserve the distribution of its own output, sum_i alpha*_i.

    alpha*_i is the value of the optimal transport between the drafted prefixes of i tokens and M_b^i;
    sum_{x^i} min(M_b, M_s) for a chain.

    Raises:
        TooLargeError: the linear program of a tree is too large.
    """
    return sum(_transport(drafts, joint, level) for level in range(1, drafts.gamma + 1))


def optimal_transport(drafts: DraftDistribution, joint: Mapping[Prefix, float]) -> float:
    """Maximum alpha* of Pr(Y is a child of the root) over all couplings of the children with Y ~ P.

    By max-flow/min-cut alpha* = 1 + min_{H subset of V} [P(H) - Pr(all children in H)].

    Raises:
        TooLargeError: as :func:`full_information`.
    """
    return _transport(drafts, joint, 1) if drafts.gamma else 0.0


def _transport(drafts: DraftDistribution, joint: Mapping[Prefix, float], level: int) -> float:
    """alpha*_level, by the cheapest of three equivalent methods."""
    p = {prefix: mass for prefix, mass in joint.items() if len(prefix) == level}
    if drafts.is_chain:
        return sum(min(mass, drafts.prefix_probs.get(prefix, 0.0)) for prefix, mass in p.items())
    if drafts.sequences is not None:
        q = [drafts.single.get(prefix, 0.0) for prefix in p]
        return transport_iid(np.array(list(p.values())), np.array(q), drafts.sequences)
    sets: dict[Tree, float] = {}
    for tree, probability in drafts.trees.items():
        children = frozenset(prefix for prefix in tree if prefix in p)
        sets[children] = sets.get(children, 0.0) + probability
    return transport(sets, p)


def transport(sets: Mapping[Tree, float], p: Mapping[Prefix, float]) -> float:
    """Maximum Pr(Y in S) over all couplings of a random set S ~ ``sets`` with Y ~ ``p``: a maximum flow.

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
        p, q: ``[V]`` float64. Tokens without target mass may be omitted: they belong to every optimal H, so the mass
            missing from ``q`` is assigned to them.
    """
    missing = max(0.0, 1.0 - float(q.sum()))
    order = np.argsort(np.divide(p, q, out=np.full(len(p), np.inf), where=q > 0))
    covered = np.minimum(missing + np.cumsum(q[order]), 1.0)
    cuts = np.concatenate([[-(missing**k)], np.cumsum(p[order]) - covered**k])
    return float(np.clip(1 + cuts.min(), 0.0, 1.0))


def linear_program(drafts: DraftDistribution, joint: Mapping[Prefix, float]) -> float:
    """Maximum E[tau] of all verifiers that are valid in the sense of Lemma 2 in Sun et al. 2024.

    A verifier stops at a node n of the draft D and emits a token y. If y counts as accepted when it is a child of n,
    the output w = n y is a shortest string outside of D, or a path of gamma tokens in D (the bonus token is sampled
    from the target and can be omitted). The variables are pi(D, w), and

        sum_w pi(D, w) = Pr(D)                                               for every draft D,
        sum_D sum_{w that z starts with} pi(D, w) M_b(z) / M_b(w) = M_b(z)    for every longest output z:

    i.e. outputs completed by the target follow its distribution. The program may use target probabilities off the
    drafted paths, which a real verifier does not know.

    Raises:
        TooLargeError: more than :data:`MOST_VARIABLES` variables.
        NumericalError: the solver did not find an optimum.
    """
    children: dict[Prefix, list[Prefix]] = defaultdict(list)
    for w in joint:
        children[w[:-1]].append(w)
    longest = [w for w in joint if w not in children]
    extensions: dict[Prefix, list[int]] = defaultdict(list)  # the longest outputs that start with w
    for i, z in enumerate(longest):
        for length in range(1, len(z) + 1):
            extensions[z[:length]].append(i)
    tau: list[float] = []
    sums: Matrix = []
    joint_entries: Matrix = []
    for number, tree in enumerate(drafts.trees):
        nodes: list[Prefix] = [()]
        while nodes:
            for w in children[nodes.pop()]:
                if w in tree and len(w) < drafts.gamma:
                    nodes.append(w)
                    continue
                sums.append((number, len(tau), 1.0))
                joint_entries += [(z, len(tau), joint[longest[z]] / joint[w]) for z in extensions[w]]
                tau.append(len(w) if w in tree else len(w) - 1)
    # Both sides sum to 1, so "at most" is "equal" up to rounding, which must not make the program infeasible.
    masses = [joint[z] * (1 + 1e-12) for z in longest]
    return _maximum(tau, joint_entries, masses, sums, list(drafts.trees.values()))


def _maximum(
    value: Sequence[float],
    upper: Matrix,
    at_most: Sequence[float],
    equal: Matrix | None = None,
    equal_to: Sequence[float] | None = None,
) -> float:
    """Maximum of value x subject to below x <= at_most, equal x = equal_to, x >= 0."""
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

    solution = linprog(
        c=-np.array(value, dtype=float),
        A_ub=matrix(upper, len(at_most)),
        b_ub=at_most,
        A_eq=matrix(equal, len(equal_to)) if equal and equal_to else None,
        b_eq=equal_to,
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if solution.status != 0:
        raise NumericalError(f"the solver of the linear program found no optimum: {solution.message}")
    return float(-solution.fun)
