"""Greedy multi-path block verification: pick the best of K i.i.d. sequences, then verify it as a block.

R. Thomas, A. Pal, "Greedy Multi-Path Block Verification for Faster Decoding in Speculative Sampling", 2026.

At every prefix the tokens are ranked by P / Q, ascending (ties: by id). The path is the lexicographically largest
sequence: at each depth, among the sequences with the same prefix, the highest-ranked next token. With A the probability
that a sequence ranks below the prefix and J the probability of the prefix (A = 0, J = 1 at first), the token x on that
path has the distribution

    Qhat(x) = ((lo + J Q(x))^K - lo^K) / ((A + J)^K - A^K),   lo = A + J sum_{y < x} Q(y);   A <- lo, J <- J Q(x)

and block verification runs on the path with Q := Qhat. With ``recycle`` a correction token that other sequences with
the accepted prefix contain is accepted, too, and verification continues in those.

For two children of the root drawn without replacement, a chain below each, the higher-ranked child has the distribution

    Qhat(x) = Q(x) (sum_{y < x} Q(y) / (1 - Q(x)) + sum_{y < x} Q(y) / (1 - Q(y)))

(x first and y second, or y first and x second), and the chain below it is a single draft.

It pays off if P and Q are far apart, and accepts less than a single draft if they are close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from ..framework.contracts.draft import Draft, Verdict
from ..framework.contracts.draft_kind import INDEPENDENT_SEQUENCES, SAMPLED_SIBLINGS
from ..framework.contracts.drafter import StrategyConfig
from ..framework.contracts.rng import StepRng, UniformStepRng, accept_each
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ..framework.util.tensors import counting, take_rows
from ._chain import HUGE, cache_slices, joint, or_target, subtract, total
from ._tree import at_token, choose, draw_where, is_empty, stop_at

#: Length from which torch sorts integers by radix on a CPU; slightly shorter lists are padded.
RADIX = 32768


class MultipathBlock(Verifier):
    """Block verification of the best-ranked sequence; lossless.

    Drafts are K i.i.d. sequences, a pair of chains whose first tokens were drawn without replacement, or a chain
    (K = 1: block).
    """

    name = "multipath-block"

    class Config(StrategyConfig):
        recycle: bool = Field(default=True, description="continue in other sequences that contain the correction token")

    config: Config

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({INDEPENDENT_SEQUENCES, SAMPLED_SIBLINGS}), pairs_only=True)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        sequences = draft.as_sequences()
        k, depth = sequences.shape[1:]
        if depth == 0:
            return Verdict(draft.count, rng.draw(p[:, 0]))
        drafted = DraftedSequences(draft, sequences)
        rank = drafted.ranks(p) if k > 1 else None
        # None = all rows, all sequences, from the first level.
        active = members = start = node_position = token = needs_bonus = None
        for attempt in range(min(depth, k if self.config.recycle else 1)):
            # Each attempt starts at least one token deeper, with at least one sequence fewer: the correction is never
            # the path's own token (Qhat below p_i P means p_{i+1} = 1).
            path = drafted.highest(rank, members, start, attempt)
            last = not self.config.recycle or attempt == k - 1
            # Rows that need a bonus token draw it with the last attempt of the others.
            ended = node_position if last else None
            stop, weights = verify_path(draft, p, path, members, start, attempt, k - attempt, active, rng, ended)
            if last:
                node_position, token = stop, draw_or_bonus(rng, active, needs_bonus, weights, token, attempt)
                needs_bonus = None
                break
            token = draw_where(rng, active, weights, token, index=attempt)
            # Nodes of other sequences after the accepted prefix with this token.
            matches = drafted.children_of(stop, token)
            node = torch.where(matches, drafted.positions, 0).amax((1, 2))
            if active is None or node_position is None or needs_bonus is None:
                node_position, needs_bonus = torch.maximum(stop, node), node > 0
            else:
                node_position = torch.where(active, torch.maximum(stop, node), node_position)
                needs_bonus = torch.where(active, node > 0, needs_bonus)
            if attempt + 1 == depth:
                break
            members = matches.any(2)
            start = (matches.any(1) * counting(depth + 1, p.device)[1:]).amax(1)
            # Rows at a leaf only need their bonus token.
            below = needs_bonus & (start < drafted.length)
            active = below if active is None else active & below
            if is_empty(active):
                break
            start = torch.where(active, start, depth)
        assert node_position is not None and token is not None
        # Rows whose last correction was a leaf still need their bonus token.
        if needs_bonus is not None and not is_empty(needs_bonus):
            token = draw_where(rng, needs_bonus, take_rows(p, node_position), token, "other")
        return stop_at(draft, node_position - 1, token)


@dataclass
class SequencePath:
    """A path of L levels in every row; entries outside of ``valid`` are meaningless.

    Attributes:
        positions: ``[B, L]``, nodes as positions in p: 0 is the root, i + 1 is node i; 0 past its end.
        parent, token, q_row: ``[B, L]``, parent's position, token, and row of q for the ranking.
        valid: ``[B, L]`` bool, True for nodes of the path.
    """

    positions: Tensor
    parent: Tensor
    token: Tensor
    q_row: Tensor
    valid: Tensor


class DraftedSequences:
    """Nodes of K sequences, their parents, tokens and rows of q.

    Attributes:
        positions: ``[B, K, L]``, as in `SequencePath`.
        length: ``[B]``, length of the sequences of a row.
    """

    def __init__(self, draft: Draft, sequences: Tensor):
        self._draft, self.positions = draft, sequences + 1
        inside = self.positions > 0
        self.length = inside[:, 0].sum(1)
        node = sequences.clamp(min=0).flatten(1)[:, None].expand(-1, 3, -1)
        fields = torch.stack([draft.parents + 1, draft.tokens, q_rows_of(draft)], 1).gather(2, node)
        #: ``[B, 3, K, L]``: position of the parent, token, row of q.
        self._fields = fields.unflatten(2, sequences.shape[1:])
        # -1 past the end of a sequence.
        self._parent, self._token = torch.where(inside, self._fields[:, 0], -1), self._fields[:, 1]

    def ranks(self, p: Tensor) -> Tensor:
        """``[B, K]``: number of sequences that each one ranks above, by P / Q of their tokens.

        Two sequences compare by the first token that differs; ties by id. Equal sequences have equal ranks.
        """
        parent, token, q_row = self._fields.unbind(1)
        row = counting(len(p), p.device)[:, None, None]
        top = p[row, parent, token]
        score = quotient(top, torch.ones_like(top) if self._draft.q is None else self._draft.q[row, q_row, token])
        differ = (self.positions[:, :, None] != self.positions[:, None]).max(3).indices
        rank, token = score.gather(2, differ), token.gather(2, differ)
        other_rank, other_token = rank.transpose(1, 2), token.transpose(1, 2)
        return torch.where(rank == other_rank, token > other_token, rank > other_rank).sum(2)

    def highest(self, rank: Tensor | None, members: Tensor | None, start: Tensor | None, first: int) -> SequencePath:
        """The path of the highest ``rank [B, K]`` among ``members [B, K]``, from level ``first`` of the draft.

        The path of a row begins at level ``start [B]`` of the draft.
        """
        positions, fields = self.positions[:, :, first:], self._fields[..., first:]
        if rank is None:
            nodes, path = positions[:, 0], fields[:, :, 0]
        else:
            rank = rank if members is None else torch.where(members, rank, -1)
            best = rank.argmax(1)[:, None, None].expand(-1, 1, positions.shape[2])
            nodes = positions.gather(1, best).squeeze(1)
            path = fields.gather(2, best[:, None].expand(-1, 3, -1, -1)).squeeze(2)
        valid = nodes > 0
        if start is not None:
            valid = valid & (counting(self.positions.shape[2], valid.device)[first:] >= start[:, None])
        parent, token, q_row = path.unbind(1)
        return SequencePath(nodes, parent, token, q_row, valid)

    def children_of(self, position: Tensor, token: Tensor) -> Tensor:
        """``[B, K, L]`` bool: the children of ``position [B]`` with ``token [B]``."""
        return (self._parent == position[:, None, None]) & (self._token == token[:, None, None])


def verify_path(
    draft: Draft,
    p: Tensor,
    path: SequencePath,
    members: Tensor | None,
    start: Tensor | None,
    first: int,
    max_sequences: int,
    active: Tensor | None,
    rng: StepRng,
    ended: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Block verification of ``path``, the highest-ranked of ``members [B, K]`` (at most ``max_sequences``) sequences.

    Level 0 of the path is level ``first`` of the draft; the path of a row begins at level ``start [B]`` of the draft.

    Returns:
        the position ``[B]`` of the last accepted node, and the weights ``[B, V]`` of the next token. Rows that are not
        ``active [B]`` stop at ``ended [B]``, if given, with weights P.
    """
    n = None if members is None or max_sequences == 1 else members.sum(1)
    levels, on_path = path.valid.shape[1], path.valid

    def verify_rows(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Qhat at each token of the path; p_0 = 1 to p_L; h_i between its tokens."""
        target, token, valid = take_rows(p[rows], path.parent[rows]), path.token[rows], on_path[rows]
        if draft.q is None:
            q = torch.zeros_like(target).scatter_(2, token[..., None], 1.0)
        else:
            q = take_rows(draft.q[rows], path.q_row[rows])
        if max_sequences == 1:
            qhat = q
        elif draft.kind.merged_sequences:
            qhat = best_path_probs(target, q, token, valid, None if n is None else n[rows], max_sequences)
        else:
            qhat = torch.cat([better_of_two_probs(target[:, 0], q[:, 0])[:, None], q[:, 1:]], 1)
        growth = (
            (at_token(target, token) / qhat.gather(2, token[..., None]).squeeze(2)).nan_to_num_(0.0).clamp_(max=HUGE)
        )
        reached = functional.pad(joint(torch.where(valid, growth, 1.0)), (1, 0), value=1.0)
        credit = reached[:, 1:-1]
        # Both with a negative sign: -S, and p_i - 1.
        s = total(torch.addcmul(qhat[:, 1:], target[:, 1:], credit[..., None].to(target.dtype), value=-1).clamp_(max=0))
        return qhat, reached, (s / (s + (credit - 1))).nan_to_num_(1.0)

    pieces = cache_slices(draft.batch_size, levels * p.shape[2], p)
    qhats, reached, h = zip(*map(verify_rows, pieces), strict=True)
    reached, h = concat(reached), concat(h)
    # The whole path: h_gamma = p_gamma, and a bonus token from P_gamma.
    entire = reached[:, -1] if active is None else torch.where(active, reached[:, -1], 0.0)
    coins = torch.cat([entire[:, None], torch.where(on_path[:, 1:] & on_path[:, :-1], h, 0.0)], 1)
    # Random numbers do not depend on the width of the batch.
    numbers = [level * (level + 1) // 2 + first for level in range(first, first + levels)]
    accepted = accept_each(rng, coins, numbers)
    tau = (accepted * counting(levels, p.device)).amax(1)
    if start is not None:
        tau = torch.maximum(tau, (start - first).clamp_(max=levels - 1))
    ends = accepted[:, 0]
    stop = torch.where(ends, path.positions.amax(1), path.parent.gather(1, tau[:, None]).squeeze(1))
    # p_i P - Qhat is P - Qhat / p_i up to a factor; after the whole path the weights are P.
    fails = ~ends
    if active is not None and ended is not None:
        stop, fails = torch.where(active, stop, ended), fails & active
    minus = fails / reached.gather(1, tau[:, None]).squeeze(1)
    target = take_rows(p, stop)
    qhat = concat([take_rows(part, tau[rows]) for part, rows in zip(qhats, pieces, strict=True)])
    return stop, or_target(subtract(target, qhat, minus), target)


def draw_or_bonus(
    rng: StepRng, active: Tensor | None, needs_bonus: Tensor | None, weights: Tensor, token: Tensor | None, attempt: int
) -> Tensor:
    """The token of each row after an ``attempt``, ``[B]``.

    Drawn in ``active [B]`` rows (``None`` = all), the bonus token in rows with ``needs_bonus [B]``, and ``token [B]``
    in others; attempts and bonus tokens have separate random numbers.
    """
    if active is None or needs_bonus is None or token is None:
        return draw_where(rng, None, weights, None, index=attempt)
    if isinstance(rng, UniformStepRng):
        drawn = rng.draw_either(active, weights, ("residual", attempt), ("other", 0))
        return torch.where(active | needs_bonus, drawn, token)
    token = draw_where(rng, active, weights, token, index=attempt)
    return draw_where(rng, needs_bonus & ~active, weights, token, "other")


def concat(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate slices of the batch."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def q_rows_of(draft: Draft) -> Tensor:
    """``[B, N]``: row of ``q`` for the ranking of each node; the first row for tokens drawn without replacement."""
    row = counting(draft.width, draft.tokens.device).expand_as(draft.tokens) if draft.q_index is None else draft.q_index
    return torch.where(draft.parents < 0, row[:, :1], row) if SAMPLED_SIBLINGS in draft.kind.capabilities else row


def quotient(p: Tensor, q: Tensor) -> Tensor:
    """P / Q, the ranking score of tokens; 0 / 0 is 0.

    Rounded to half precision for float32, which halves the time of sorting. The order hardly affects the acceptance,
    and the verifier is lossless with any order.
    """
    score = (p / q).nan_to_num_(0.0, posinf=torch.inf)
    return score.half() if score.dtype == torch.float32 else score


def ascending(score: Tensor) -> Tensor:
    """``score.argsort(1, stable=True)`` of non-negative numbers, ``[B, V]``.

    On a CPU torch sorts long lists of integers by radix, at least ten times faster than floats, and the bits of
    non-negative floats are integers in the same order.
    """
    size = score.shape[1]
    if score.device.type != "cpu" or score.dtype != torch.float16 or size < RADIX // 4:
        return score.argsort(dim=1, stable=True)
    bits = score.view(torch.int16)
    if size < RADIX:
        bits = functional.pad(bits, (0, RADIX - size), value=torch.iinfo(torch.int16).max)
    orders = [row.sort(stable=True).indices[:size] for row in bits]
    return torch.stack(orders) if len(orders) > 1 else orders[0][None]


def better_of_two_probs(p: Tensor, q: Tensor) -> Tensor:
    """``[B, V]``: distribution of the higher by P / Q of two tokens drawn from ``q [B, V]`` without replacement."""
    order = ascending(quotient(p, q))
    sorted_q = q.gather(1, order).double()
    rest = 1 - sorted_q
    odds = torch.where(
        rest > 0, sorted_q / rest, 0.0
    )  # of y; a second token x has probability q(x) times the odds of the first
    below, odds_below = sorted_q.cumsum(1) - sorted_q, odds.cumsum(1) - odds
    # A token with all the mass has no sibling.
    factor = torch.where(rest > 0, below / rest + odds_below, 1.0)
    return torch.empty_like(sorted_q).scatter_(1, order, sorted_q * factor).to(q.dtype)


def best_path_probs(p: Tensor, q: Tensor, y: Tensor, on_path: Tensor, n: Tensor | None, max_sequences: int) -> Tensor:
    """Qhat ``[B, L, V]`` of the path ``y [B, L]``, the highest of ``n [B]`` sequences (``None`` = ``max_sequences``).

    u^n - v^n = (u - v) sum_i u^i v^(n-1-i), so the factor J cancels with that of the denominator.

    Args:
        p, q: ``[B, L, V]``, the distributions at each token of the path.
        on_path: ``[B, L]`` bool, True for existing tokens.
        max_sequences: maximum number of sequences of a row, at least 2.
    """
    order = ascending(quotient(p, q).flatten(0, 1)).view_as(q)
    sums = q.gather(2, order).cumsum(2, dtype=torch.float64)
    up_to = torch.empty_like(q).scatter_(2, order, sums.to(q.dtype))  # sum of Q up to each token
    # A and J before each token, divided by their sum: only the ratio matters, and it does not underflow.
    own = at_token(q, y)
    below = (at_token(up_to, y) - own).clamp_(min=0)
    if n is not None:  # paths may begin deeper; values past their end do not affect earlier tokens
        own, below = torch.where(on_path, own, 1.0), torch.where(on_path, below, 0.0)
    j = functional.pad(own.cumprod(1)[:, :-1], (1, 0), value=1.0)
    a = functional.pad((below * j).cumsum(1)[:, :-1], (1, 0))
    share = (j / (a + j)).nan_to_num_(1.0)[..., None].to(q.dtype)
    a = 1 - share
    hi = torch.addcmul(a, up_to, share)
    lo = torch.addcmul(hi, q, share, value=-1).clamp_(min=0)
    top, bottom, lo_power, a_power = hi + lo, a + 1, lo, a
    if n is not None:
        one_left = (n < 2)[:, None]
        top, bottom = choose(one_left, torch.ones_like(top), top), torch.where(one_left[..., None], 1.0, bottom)
    for m in range(2, max_sequences):
        lo_power, a_power = lo_power * lo, a_power * a
        higher, lower = torch.addcmul(lo_power, hi, top), bottom + a_power
        if n is None:
            top, bottom = higher, lower
        else:
            more = (n > m)[:, None]
            top, bottom = choose(more, higher, top), torch.where(more[..., None], lower, bottom)
    return top.div_(bottom).mul_(q)
