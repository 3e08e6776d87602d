"""Greedy multi-path block verification: pick the best of K i.i.d. sequences, then verify it as a block.

R. Thomas, A. Pal, "Greedy Multi-Path Block Verification for Faster Decoding in Speculative Sampling", 2026.

At every prefix the tokens are ranked by P / Q, ascending (ties: by id). The path taken is the lexicographically
largest sequence: at each depth, among the sequences that still agree, the highest-ranked next token. With A the
probability that one sequence ranks below the prefix and J the probability of the prefix (A = 0, J = 1 at first),
the token x on that path has the law

    Qhat(x) = ((lo + J Q(x))^K - lo^K) / ((A + J)^K - A^K),   lo = A + J sum_{y < x} Q(y);   A <- lo, J <- J Q(x)

and block verification runs on the path with Q := Qhat. With ``recycle`` a correction token that other sequences
through the accepted prefix had drafted is accepted too, and the rule goes on with what follows it in those.

Two children of the root drawn without replacement, a chain below each: the higher-ranked child has the law

    Qhat(x) = Q(x) (sum_{y < x} Q(y) / (1 - Q(x)) + sum_{y < x} Q(y) / (1 - Q(y)))

(x first and y second, or y first and x second), and what is below it is a single draft.

It pays off when P and Q are far apart, and accepts less than one draft would when they are close.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from ..framework.contracts.draft import Draft, Verdict
from ..framework.contracts.drafter import StrategyConfig
from ..framework.contracts.rng import RoundRng
from ..framework.contracts.tensors import counting, take_rows
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ._chain import HUGE, cached, joint, total
from ._tree_rules import at_token, choose, none, ratio, residual, settle, stop_at

#: Shorter lists torch does not sort by radix; those that are not much shorter are worth padding.
RADIX = 32768


class MultipathBlock(Verifier):
    """Block verification of the best-ranked sequence. Lossless; K i.i.d. sequences, a pair of chains whose first
    tokens were drawn without replacement, or a chain (K = 1: block)."""

    name = "multipath-block"

    class Config(StrategyConfig):
        recycle: bool = Field(
            default=True, description="go on in other sequences that had drafted the correction token"
        )

    config: Config

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(drawn=frozenset({"chain", "iid", "without_replacement"}), pairs_only=True)

    def verify(self, draft: Draft, p: Tensor, rng: RoundRng) -> Verdict:
        rows = torch.arange(draft.batch_size, device=p.device)
        sequences = draft.as_sequences()
        k, depth = sequences.shape[1:]
        at, start = torch.full_like(rows, -1), torch.zeros_like(rows)
        members = torch.ones(draft.batch_size, k, dtype=torch.bool, device=p.device)
        walking, token = torch.ones_like(rows, dtype=torch.bool), torch.zeros_like(rows)
        goes_on, score = walking, scores(draft, p)
        for attempt in range(min(depth, k if self.config.recycle else 1)):
            # An attempt starts at least one token deeper than the one before, and at least one sequence is left
            # behind: the correction is never the path's own token (Qhat below p_i P means p_{i+1} = 1).
            most = k - attempt
            later, begins = sequences[:, :, attempt:], start - attempt
            path = highest_path(draft, score, later, members, goes_on, begins)
            n = members.sum(1)
            stop, weights = verify_path(draft, p, path, n, begins, attempt, most, goes_on, rng)
            drawn = rng.draw(settle(weights, token, ~goes_on), index=attempt)
            at, token = torch.where(goes_on, stop, at), torch.where(goes_on, drawn, token)
            # Others through the accepted prefix that had drafted the token: the nodes that carry it.
            carries = (draft.parents == at[:, None]) & (draft.tokens == token[:, None]) & draft.valid
            node = torch.where(carries.any(1), carries.long().argmax(1), -1)
            through = (sequences == node[:, None, None]).any(2) & (node >= 0)[:, None]
            members = torch.where(goes_on[:, None], through, members)
            walking = walking & members.any(1)
            if not self.config.recycle:
                break
            at = torch.where(goes_on & walking, node, at)
            deeper = draft.depth.gather(1, node.clamp(min=0)[:, None]).squeeze(1)
            start = torch.where(goes_on & walking, deeper, start)
            # A row at a leaf waits for its bonus token, however deep the drafts of other rows are.
            below = torch.arange(depth, device=p.device) >= start[:, None, None]
            goes_on = goes_on & walking & (below & members[:, :, None] & (sequences >= 0)).any((1, 2))
            if none(goes_on):
                break
        # Rows whose last correction led to a leaf, and drafts without nodes, still lack their bonus token.
        if depth == 0:
            return Verdict(torch.zeros_like(rows), rng.draw(p[:, 0]))
        if self.config.recycle and not none(walking):
            token = rng.draw(settle(take_rows(p, at + 1), token, ~walking), "other")
        return stop_at(draft, at, token)


def verify_path(
    draft: Draft,
    p: Tensor,
    path: Tensor,
    n: Tensor,
    start: Tensor,
    first: int,
    most: int,
    walking: Tensor,
    rng: RoundRng,
) -> tuple[Tensor, Tensor]:
    """Block verification of ``path [B, L]``, the highest-ranked of ``n [B]`` (at most ``most``) sequences.

    Level 0 of the path is level ``first`` of the draft, and a row's own begins at level ``start [B]`` of the path.

    Returns the node ``[B]`` where it stops and the weights ``[B, V]`` of the token that follows.
    """
    on_path, nodes = path >= 0, path.clamp(min=0)
    above, y = draft.parents.gather(1, nodes), draft.tokens.gather(1, nodes)
    laws = laws_of(draft).gather(1, nodes)

    def judge(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Qhat along the path; p_i, from p_0 = 1 to that of its last token; h_i between its tokens."""
        law, token, on = take_rows(p[rows], above[rows] + 1), y[rows], on_path[rows]
        if draft.q is None:
            q = torch.zeros_like(law).scatter_(2, token[..., None], 1.0)
        else:
            q = take_rows(draft.q[rows], laws[rows])
        if most == 1:
            qhat = q
        elif draft.drawn == "iid":
            qhat = law_of_highest(law, q, token, on, n[rows], most)
        else:
            qhat = torch.cat([higher_of_two(law[:, 0], q[:, 0])[:, None], q[:, 1:]], 1)
        growth = torch.where(on, ratio(law, qhat, token).clamp(max=HUGE), 1.0)
        reached = functional.pad(joint(growth), (1, 0), value=1.0)
        credit = reached[:, 1:-1]
        s = -total(torch.addcmul(qhat[:, 1:], law[:, 1:], credit[..., None].to(law.dtype), value=-1).clamp_(max=0))
        left = s + (1 - credit)
        return qhat, reached, torch.where(left > 0, s / left, 1.0)

    pieces = cached(draft.batch_size, path.shape[1] * p.shape[2], p)
    laws_on_path, reached, h = zip(*map(judge, pieces), strict=True)
    reached, h = torch.cat(reached), torch.cat(h)
    credit, whole = reached[:, :-1], reached[:, -1]
    later = torch.arange(1, path.shape[1], device=p.device) > start[:, None]
    h = torch.where(on_path[:, 1:] & later, h, 0.0)
    tau = start.clamp(min=0, max=path.shape[1] - 1)
    for i in range(1, path.shape[1]):
        level = first + i
        number = level * (level + 1) // 2 + first  # the same whatever the width of the batch
        tau = torch.where(rng.accept(h[:, i - 1 : i], index=number).squeeze(1), i, tau)
    # The whole path: h_gamma = p_gamma, and the bonus from P_gamma.
    number = first * (first + 1) // 2 + first
    ends = rng.accept(torch.where(walking, whole, 0.0)[:, None], index=number).squeeze(1)
    stop = torch.where(ends, path.amax(1), above.gather(1, tau[:, None]).squeeze(1))
    scale = torch.where(ends, 1.0, credit.gather(1, tau[:, None]).squeeze(1))
    qhat = torch.cat([take_rows(of, tau[rows]) for of, rows in zip(laws_on_path, pieces, strict=True)])
    return stop, residual(take_rows(p, stop + 1), qhat * ~ends[:, None], scale)[0]


def scores(draft: Draft, p: Tensor) -> Tensor:
    """``[B, N]``: P / Q of every drafted token, by which its sequence is ranked."""
    rows = torch.arange(draft.batch_size, device=p.device)[:, None]
    top = p[rows, draft.parents + 1, draft.tokens]
    return quotient(top, torch.ones_like(top) if draft.q is None else draft.q[rows, laws_of(draft), draft.tokens])


def highest_path(
    draft: Draft, score: Tensor, sequences: Tensor, members: Tensor, walking: Tensor, start: Tensor
) -> Tensor:
    """``[B, L]``: the nodes of the highest-ranked of ``members [B, K]`` in ``sequences [B, K, L]``.

    Ranked by ``score [B, N]`` where two first differ, ties by id; -1 where there is none: past its end, before level
    ``start [B]``, and in rows that are not ``walking [B]``. Members agree before that level and are equally long.
    """
    nodes = sequences.clamp(min=0).flatten(1)
    tokens, ranks = (values.gather(1, nodes).view_as(sequences) for values in (draft.tokens, score))
    x, y, rank, other = tokens[:, :, None], tokens[:, None], ranks[:, :, None], ranks[:, None]
    inside = (sequences >= 0) & ((counting(sequences.shape[2], start.device) >= start[:, None]) & walking[:, None])[
        :, None
    ]
    differ = (x != y) & inside[:, :, None]
    below = differ & ((rank < other) | ((rank == other) & (x < y)))  # [B, K, K, L]
    at = differ.long().argmax(3, keepdim=True)  # where they part
    beaten = (below.gather(3, at).squeeze(3) & members[:, None]).any(2)
    highest = (members & ~beaten).long().argmax(1)[:, None, None].expand(-1, 1, sequences.shape[2])
    path = torch.where(inside & members[:, :, None], sequences, -1)
    return path.gather(1, highest).squeeze(1)


def laws_of(draft: Draft) -> Tensor:
    """``[B, N]``: the row of ``q`` that each node is ranked by: of two tokens drawn without replacement the first's."""
    law = torch.arange(draft.width, device=draft.tokens.device).expand_as(draft.tokens)
    law = law if draft.law is None else draft.law
    return torch.where(draft.parents < 0, law[:, :1], law)


def quotient(p: Tensor, q: Tensor) -> Tensor:
    """P / Q, by which tokens are ranked; 0 / 0 is 0.

    Of float32 laws it is rounded to half precision, which halves the time of sorting. The order decides how much is
    accepted, and hardly that; the rule keeps the target's law with any order.
    """
    score = (p / q).nan_to_num_(0.0, posinf=torch.inf)
    return score.half() if score.dtype == torch.float32 else score


def ascending(score: Tensor) -> Tensor:
    """``score.argsort(1, stable=True)`` of numbers that are not negative, ``[B, V]``.

    On a CPU torch sorts a long list of integers by radix, in a tenth of the time of floats or less, and the bits of
    floats that are not negative are integers in the same order.
    """
    size = score.shape[1]
    if score.device.type != "cpu" or score.dtype != torch.float16 or size < RADIX // 4:
        return score.argsort(dim=1, stable=True)
    bits = score.view(torch.int16)
    if size < RADIX:
        bits = functional.pad(bits, (0, RADIX - size), value=torch.iinfo(torch.int16).max)
    orders = [row.sort(stable=True).indices[:size] for row in bits]
    return torch.stack(orders) if len(orders) > 1 else orders[0][None]


def higher_of_two(p: Tensor, q: Tensor) -> Tensor:
    """``[B, V]``: the law of the higher, by ``p / q``, of two tokens drawn from ``q [B, V]`` without replacement."""
    order = ascending(quotient(p, q))
    sorted_q = q.gather(1, order).double()
    rest = 1 - sorted_q
    odds = torch.where(rest > 0, sorted_q / rest, 0.0)  # of y; as a second token x has q(x) times that of the first
    below, odds_below = sorted_q.cumsum(1) - sorted_q, odds.cumsum(1) - odds
    # A token with all the mass has no sibling.
    factor = torch.where(rest > 0, below / rest + odds_below, 1.0)
    return torch.empty_like(sorted_q).scatter_(1, order, sorted_q * factor).to(q.dtype)


def law_of_highest(p: Tensor, q: Tensor, y: Tensor, on_path: Tensor, n: Tensor, most: int) -> Tensor:
    """Qhat ``[B, L, V]`` along the path ``y [B, L]`` of the highest-ranked of ``n [B]`` (at most ``most``) sequences.

    u^n - v^n = (u - v) sum_i u^i v^(n-1-i), so the factor J cancels against the denominator's.

    Args:
        p, q: ``[B, L, V]``, the laws before each token of the path.
        on_path: ``[B, L]`` bool, which of the tokens there are.
    """
    order = ascending(quotient(p, q).flatten(0, 1)).view_as(q)
    sums = q.gather(2, order).cumsum(2, dtype=torch.float64)
    up_to = torch.empty_like(q).scatter_(2, order, sums.to(q.dtype))  # sum of Q up to each token
    # A and J before each token, as shares of their sum: only that matters, and it does not vanish.
    own = at_token(q, y)
    below = torch.where(on_path, (at_token(up_to, y) - own).clamp(min=0), 0.0)
    j = functional.pad(torch.where(on_path, own, 1.0).cumprod(1)[:, :-1], (1, 0), value=1.0)
    a = functional.pad((below * j).cumsum(1)[:, :-1], (1, 0))
    both = a + j
    a, j = torch.where(both > 0, a / both, 0.0), torch.where(both > 0, j / both, 1.0)
    share = j[..., None].to(q.dtype)
    hi = torch.addcmul(a[..., None].to(q.dtype), up_to, share)
    lo = torch.addcmul(hi, q, share, value=-1).clamp_(min=0)
    top, bottom = torch.ones_like(share), torch.ones_like(a)
    lo_power, a_power = lo, a
    for m in range(1, most):
        if m > 1:
            lo_power, a_power = lo_power * lo, a_power * a
        more = (n > m)[:, None]
        top = choose(more, torch.addcmul(lo_power, hi, top), top)
        bottom = torch.where(more, bottom + a_power, bottom)
    return q * top.div_(bottom[..., None].to(q.dtype))
