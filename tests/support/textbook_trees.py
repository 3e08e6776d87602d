"""The rules for several drafts as in the papers, one row at a time, in pieces that a mutant can get wrong."""

from collections.abc import Generator, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from crossdraft.framework.contracts.draft import Draft, Verdict
from crossdraft.framework.contracts.draft_kind import INDEPENDENT_SEQUENCES, SAMPLED_SIBLINGS
from crossdraft.framework.contracts.verifier import Verifier, VerifierTraits

ROOT = -1
Law = list[float]
#: Yields the weights of every random choice, is sent the outcome, returns the accepted nodes and the next token.
Walk = Generator[Law, int, tuple[list[int], int]]


class Row:
    """The draft of one row: ``token[node]``, ``children[node]`` in the order drawn, ``p[node]``, ``q[node]``."""

    def __init__(self, tokens: list, parents: list, valid: list, p: list, distributions: list, sequences: list | None):
        nodes = [node for node, counts in enumerate(valid) if counts]
        self.token, self.sequences = tokens, sequences
        self.p = {node: p[node + 1] for node in [ROOT, *nodes]}
        self.q = {node: distributions[node] for node in nodes}
        self.children: dict[int, list[int]] = {node: [] for node in [ROOT, *nodes]}
        for node in nodes:
            self.children[parents[node]].append(node)


class Textbook(Verifier):
    traits = classmethod(
        lambda cls, config: VerifierTraits(accepts=frozenset({INDEPENDENT_SEQUENCES, SAMPLED_SIBLINGS}))
    )

    def walk(self, row: Row) -> Walk:
        raise NotImplementedError

    def verify(self, draft: Draft, p: Tensor, rng: Any) -> Verdict:
        assert draft.q is not None
        distributions = (
            draft.q if draft.q_index is None else draft.q.gather(1, draft.q_index[..., None].expand(-1, -1, p.shape[2]))
        )
        columns = [draft.tokens, draft.parents, draft.valid, p, distributions]
        sequences = [None] * draft.batch_size if draft.sequences is None else draft.sequences.tolist()
        rows = zip(*(column.tolist() for column in columns), sequences, strict=True)
        walks = [self.walk(Row(*row)) for row in rows]
        waiting: dict[int, Law] = {b: next(walk) for b, walk in enumerate(walks)}
        path = torch.full_like(draft.tokens, -1)
        length, token = torch.zeros_like(draft.count), torch.zeros_like(draft.count)
        step = 0
        while waiting:
            weights = torch.zeros(len(walks), p.shape[2], dtype=torch.float64)
            weights[:, 0] = 1
            choices = [distribution + [0.0] * (p.shape[2] - len(distribution)) for distribution in waiting.values()]
            weights[list(waiting)] = torch.tensor(choices, dtype=torch.float64)
            outcomes = rng.draw(weights, index=step).tolist()
            for b in list(waiting):
                try:
                    waiting[b] = walks[b].send(outcomes[b])
                except StopIteration as end:
                    del waiting[b]
                    nodes, token[b] = end.value
                    length[b] = len(nodes)
                    path[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.long)
            step += 1
        return Verdict(length, token, path=path)


def coin(h: float) -> Generator[Law, int, bool]:
    return bool((yield [1 - h, h]))


def ratio(above: float, below: float) -> float:
    return above / below if above > 0 else 0.0


def positive(weights: Iterator[float]) -> Law:
    return [max(0.0, w) for w in weights]


def norm(weights: Law, fallback: Law) -> Law:
    """``fallback`` where nothing is left, which has probability 0."""
    total = sum(weights)
    return [w / total for w in weights] if total > 0 else fallback


class KSeq(Textbook):
    """SpecTr's K-SEQ on the sequences that agree with what was emitted."""

    def walk(self, row: Row) -> Walk:
        assert row.sequences is not None
        racing, at, path = row.sequences, ROOT, []
        for level in range(len(racing[0])):
            p, q = row.p[at], row.q[racing[0][level]]
            rho = self.rho(p, q, len(racing))
            for x in (row.token[sequence[level]] for sequence in racing):
                if (yield from coin(min(1.0, ratio(p[x], rho * q[x])))):
                    y = x
                    break
            else:
                y = yield norm(self.residual(p, q, rho, len(racing)), p)
            racing = [sequence for sequence in racing if row.token[sequence[level]] == y]
            if not racing:
                return path, y
            at = racing[0][level]
            path.append(at)
        return path, (yield row.p[at])

    def rho(self, p: Law, q: Law, n: int) -> float:
        return smallest_rho(tuple(p), tuple(q), n)

    def residual(self, p: Law, q: Law, rho: float, n: int) -> Law:
        beta = overlap(p, q, rho)
        share = (1 - (1 - beta) ** n) / beta if beta > 0 else 0.0
        return positive(px - min(qx, px / rho) * share for px, qx in zip(p, q, strict=True))


def overlap(p: Sequence[float], q: Sequence[float], rho: float) -> float:
    """The overlap beta(rho)."""
    return sum(min(qx, px / rho) for px, qx in zip(p, q, strict=True))


@cache
def smallest_rho(p: tuple[float, ...], q: tuple[float, ...], n: int) -> float:
    """The smallest valid one, from above."""
    low, high = 1.0, float(n)
    for _ in range(60):
        middle = (low + high) / 2
        beta = overlap(p, q, middle)
        low, high = (middle, high) if 1 - (1 - beta) ** n > middle * beta else (low, middle)
    return high


class Siblings(Textbook):
    """For rules that examine distinct children in order, each with its q given the earlier siblings."""

    def children(self, row: Row, at: int) -> list[tuple[int, Law]]:
        """(child, q_j) in the order in which they are examined."""
        earlier_siblings: list[int] = []
        results = []
        for child in self.order(row, row.children[at]):
            q = row.q[child]
            rest = [0.0 if x in earlier_siblings else qx for x, qx in enumerate(q)]
            results.append((child, norm(rest, q)))
            earlier_siblings.append(row.token[child])
        return results

    def order(self, row: Row, children: list[int]) -> list[int]:
        return children


class MultiStep(Siblings):
    """SpecInfer's multi-step speculative sampling."""

    def walk(self, row: Row) -> Walk:
        at, path = ROOT, []
        while True:
            p = left = row.p[at]
            for child, q in self.children(row, at):
                x = row.token[child]
                if (yield from coin(min(1.0, ratio(p[x], q[x])))):
                    at = child
                    path.append(child)
                    break
                p, left = self.rejected(p, left, q)
            else:
                return path, (yield left)

    def rejected(self, p: Law, left: Law, q: Law) -> tuple[Law, Law]:
        """Distribution against which the next child is verified, and that of Y after the last child."""
        left = norm(positive(px - qx for px, qx in zip(left, q, strict=True)), left)
        return left, left


class Traversal(Siblings):
    def walk(self, row: Row) -> Walk:
        result = yield from self.visit(row, ROOT, 1.0)
        assert result is not None  # the root's credit stays 1
        nodes, token = result
        return nodes[::-1], token

    def visit(self, row: Row, node: int, a: float) -> Generator[Law, int, tuple[list[int], int] | None]:
        p = row.p[node]
        for child, q in self.children(row, node):
            x = row.token[child]
            result = yield from self.visit(row, child, min(1.0, a * ratio(p[x], q[x])))
            if result is not None:
                nodes, token = result
                return [*nodes, *([node] if node != ROOT else [])], token
            a, p = self.failed(a, p, q)
        if not (yield from coin(a)):
            return None
        return [node] if node != ROOT else [], (yield p)

    def failed(self, a: float, p: Law, q: Law) -> tuple[float, Law]:
        """Credit and distribution of a node once a child has failed."""
        left = positive(a * px - qx for px, qx in zip(p, q, strict=True))
        s = sum(left)
        return (s / (s + (1 - a)) if s + (1 - a) > 0 else 1.0), norm(left, p)


class MultiPath(Textbook):
    """Block verification of the best-ranked sequence, without recycling."""

    def walk(self, row: Row) -> Walk:
        assert row.sequences is not None
        below, mass, agreeing, at = 0.0, 1.0, row.sequences, ROOT  # A, J
        path, joint, distributions = [], [1.0], []
        for level in range(len(row.sequences[0])):
            p, q = row.p[at], row.q[agreeing[0][level]]
            order = sorted(range(len(p)), key=lambda x: (self.score(p[x], q[x]), x))
            drafted = [row.token[sequence[level]] for sequence in agreeing]
            y = self.select(p, q, order, drafted)
            lo = {x: below + mass * sum(q[z] for z in order[:rank]) for rank, x in enumerate(order)}
            k = len(row.sequences)
            whole = (below + mass) ** k - below**k
            hat = [((lo[x] + mass * qx) ** k - lo[x] ** k) / whole for x, qx in enumerate(q)]
            distribution = self.probs(q, hat)
            distributions.append(distribution)
            joint.append(min(1.0, joint[-1] * ratio(p[y], distribution[y])))
            below, mass = lo[y], mass * q[y]
            agreeing = [sequence for sequence in agreeing if row.token[sequence[level]] == y]
            at = agreeing[0][level]
            path.append(at)
        distributions.append([0.0] * len(row.p[ROOT]))
        for i in range(len(path), 0, -1):
            p, left = row.p[path[i - 1]], self.excess(joint[i], row.p[path[i - 1]], distributions[i])
            s = sum(left)
            if (yield from coin(1.0 if joint[i] == 1 else s / (s + (1 - joint[i])))):
                return path[:i], (yield norm(left, p))
        return [], (yield norm(self.excess(1.0, row.p[ROOT], distributions[0]), row.p[ROOT]))

    def score(self, p: float, q: float) -> float:
        return p / q if q > 0 else float("inf") if p > 0 else 0.0

    def select(self, p: Law, q: Law, order: list[int], drafted: list[int]) -> int:
        return max(drafted, key=order.index)

    def probs(self, q: Law, hat: Law) -> Law:
        return hat

    def excess(self, joint: float, p: Law, distribution: Law) -> Law:
        return positive(joint * px - qx for px, qx in zip(p, distribution, strict=True))
