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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from ..framework.contracts.draft import Draft, Verdict
from ..framework.contracts.draft_kind import IID, INDEPENDENT_SEQUENCES, SAMPLED_SIBLINGS, WITHOUT_REPLACEMENT
from ..framework.contracts.drafter import StrategyConfig
from ..framework.contracts.rng import StepRng, UniformStepRng, accept_each
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ..framework.util.tensors import counting, take_rows
from ._chain import HUGE, cached, joint, or_target, subtract, total
from ._tree_rules import at_token, choose, draw_where, none, stop_at

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
        return VerifierTraits(accepts=frozenset({INDEPENDENT_SEQUENCES, SAMPLED_SIBLINGS}), pairs_only=True)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        sequences = draft.as_sequences()
        k, depth = sequences.shape[1:]
        if depth == 0:
            return Verdict(draft.count, rng.draw(p[:, 0]))
        drafted = DraftedSequences(draft, sequences)
        place = drafted.ranked(p) if k > 1 else None
        # None = all rows, all sequences, from the first level on.
        going = members = start = at = token = waits = None
        for attempt in range(min(depth, k if self.config.recycle else 1)):
            # An attempt starts at least one token deeper than the one before, and at least one sequence is left
            # behind: the correction is never the path's own token (Qhat below p_i P means p_{i+1} = 1).
            path = drafted.highest(place, members, start, attempt)
            last = not self.config.recycle or attempt == k - 1
            # Rows that wait for a bonus token draw it with the last attempt of the others.
            ended = at if last else None
            stop, weights = verify_path(draft, p, path, members, start, attempt, k - attempt, going, rng, ended)
            if last:
                at, token = stop, draw_or_bonus(rng, going, waits, weights, token, attempt)
                waits = None
                break
            token = draw_where(rng, going, weights, token, index=attempt)
            # Others through the accepted prefix that had drafted the token: the nodes that carry it.
            carries = drafted.behind(stop, token)
            node = torch.where(carries, drafted.places, 0).amax((1, 2))
            if going is None or at is None or waits is None:
                at, waits = torch.maximum(stop, node), node > 0
            else:
                at = torch.where(going, torch.maximum(stop, node), at)
                waits = torch.where(going, node > 0, waits)
            if attempt + 1 == depth:
                break
            members = carries.any(2)
            start = (carries.any(1) * counting(depth + 1, p.device)[1:]).amax(1)
            # A row at a leaf waits for its bonus token, however deep the drafts of other rows are.
            below = waits & (start < drafted.length)
            going = below if going is None else going & below
            if none(going):
                break
            start = torch.where(going, start, depth)
        assert at is not None and token is not None
        # Rows whose last correction led to a leaf still lack their bonus token.
        if waits is not None and not none(waits):
            token = draw_where(rng, waits, take_rows(p, at), token, "other")
        return stop_at(draft, at - 1, token)


@dataclass
class Path:
    """A way down the draft, of L levels, in every row; what is not ``on`` it means nothing.

    Attributes:
        places: ``[B, L]``, nodes as positions in p: 0 is the root, i + 1 node i. 0 past its end.
        above, token, law: ``[B, L]``, of each node its parent's position, its token, and the row of q it is ranked by.
        on: ``[B, L]`` bool, its nodes from its first level on.
    """

    places: Tensor
    above: Tensor
    token: Tensor
    law: Tensor
    on: Tensor


class DraftedSequences:
    """What is read of the nodes of K sequences.

    Attributes:
        places: ``[B, K, L]``, as in `Path`.
        length: ``[B]``, tokens of every sequence of a row.
    """

    def __init__(self, draft: Draft, sequences: Tensor):
        self._draft, self.places = draft, sequences + 1
        inside = self.places > 0
        self.length = inside[:, 0].sum(1)
        node = sequences.clamp(min=0).flatten(1)[:, None].expand(-1, 3, -1)
        read = torch.stack([draft.parents + 1, draft.tokens, laws_of(draft)], 1).gather(2, node)
        #: Three times ``[B, K, L]``: position of the parent, token, row of q.
        self._read = read.unflatten(2, sequences.shape[1:])
        # Past its end a sequence is behind no node.
        self._above, self._token = torch.where(inside, self._read[:, 0], -1), self._read[:, 1]

    def ranked(self, p: Tensor) -> Tensor:
        """``[B, K]``: how many sequences each is ranked above, by P / Q of their tokens.

        The highest is known by where it differs from another first; ties by id. Equal sequences are equally high.
        """
        above, token, law = self._read.unbind(1)
        row = counting(len(p), p.device)[:, None, None]
        top = p[row, above, token]
        score = quotient(top, torch.ones_like(top) if self._draft.q is None else self._draft.q[row, law, token])
        differ = (self.places[:, :, None] != self.places[:, None]).max(3).indices
        rank, token = score.gather(2, differ), token.gather(2, differ)
        other, its_token = rank.transpose(1, 2), token.transpose(1, 2)
        return torch.where(rank == other, token > its_token, rank > other).sum(2)

    def highest(self, place: Tensor | None, members: Tensor | None, start: Tensor | None, first: int) -> Path:
        """The highest in ``place [B, K]`` of ``members [B, K]``, from level ``first`` of the draft on.

        A row's own path begins at level ``start [B]`` of the draft.
        """
        places, read = self.places[:, :, first:], self._read[..., first:]
        if place is None:
            chosen, along = places[:, 0], read[:, :, 0]
        else:
            place = place if members is None else torch.where(members, place, -1)
            best = place.argmax(1)[:, None, None].expand(-1, 1, places.shape[2])
            chosen = places.gather(1, best).squeeze(1)
            along = read.gather(2, best[:, None].expand(-1, 3, -1, -1)).squeeze(2)
        on = chosen > 0
        if start is not None:
            on = on & (counting(self.places.shape[2], on.device)[first:] >= start[:, None])
        above, token, law = along.unbind(1)
        return Path(chosen, above, token, law, on)

    def behind(self, at: Tensor, token: Tensor) -> Tensor:
        """``[B, K, L]`` bool: the children of position ``at [B]`` that carry ``token [B]``."""
        return (self._above == at[:, None, None]) & (self._token == token[:, None, None])


def verify_path(
    draft: Draft,
    p: Tensor,
    path: Path,
    members: Tensor | None,
    start: Tensor | None,
    first: int,
    most: int,
    going: Tensor | None,
    rng: StepRng,
    ended: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Block verification of ``path``, the highest-ranked of ``members [B, K]`` (at most ``most``) sequences.

    Level 0 of the path is level ``first`` of the draft, and a row's own begins at level ``start [B]`` of the draft.

    Returns the position ``[B]`` where it stops and the weights ``[B, V]`` of the token that follows. Rows that are not
    ``going [B]`` stop at ``ended [B]``, if that is given, and P follows.
    """
    n = None if members is None or most == 1 else members.sum(1)
    levels, on_path = path.on.shape[1], path.on

    def judge(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Qhat along the path; p_i, from p_0 = 1 to that of its last token; h_i between its tokens."""
        law, token, on = take_rows(p[rows], path.above[rows]), path.token[rows], on_path[rows]
        if draft.q is None:
            q = torch.zeros_like(law).scatter_(2, token[..., None], 1.0)
        else:
            q = take_rows(draft.q[rows], path.law[rows])
        if most == 1:
            qhat = q
        elif draft.kind is IID:
            qhat = law_of_highest(law, q, token, on, None if n is None else n[rows], most)
        else:
            qhat = torch.cat([higher_of_two(law[:, 0], q[:, 0])[:, None], q[:, 1:]], 1)
        growth = (at_token(law, token) / qhat.gather(2, token[..., None]).squeeze(2)).nan_to_num_(0.0).clamp_(max=HUGE)
        reached = functional.pad(joint(torch.where(on, growth, 1.0)), (1, 0), value=1.0)
        credit = reached[:, 1:-1]
        # Both as they are below 0: -S, and p_i - 1.
        s = total(torch.addcmul(qhat[:, 1:], law[:, 1:], credit[..., None].to(law.dtype), value=-1).clamp_(max=0))
        return qhat, reached, (s / (s + (credit - 1))).nan_to_num_(1.0)

    pieces = cached(draft.batch_size, levels * p.shape[2], p)
    laws_on_path, reached, h = zip(*map(judge, pieces), strict=True)
    reached, h = one(reached), one(h)
    # The whole path: h_gamma = p_gamma, and the bonus from P_gamma.
    whole = reached[:, -1] if going is None else torch.where(going, reached[:, -1], 0.0)
    coins = torch.cat([whole[:, None], torch.where(on_path[:, 1:] & on_path[:, :-1], h, 0.0)], 1)
    # The same numbers whatever the width of the batch.
    numbers = [level * (level + 1) // 2 + first for level in range(first, first + levels)]
    accepted = accept_each(rng, coins, numbers)
    tau = (accepted * counting(levels, p.device)).amax(1)
    if start is not None:
        tau = torch.maximum(tau, (start - first).clamp_(max=levels - 1))
    ends = accepted[:, 0]
    stop = torch.where(ends, path.places.amax(1), path.above.gather(1, tau[:, None]).squeeze(1))
    # p_i P - Qhat is P - Qhat / p_i up to a factor; the whole path leaves P.
    fails = ~ends
    if going is not None and ended is not None:
        stop, fails = torch.where(going, stop, ended), fails & going
    minus = fails / reached.gather(1, tau[:, None]).squeeze(1)
    law = take_rows(p, stop)
    qhat = one([take_rows(of, tau[rows]) for of, rows in zip(laws_on_path, pieces, strict=True)])
    return stop, or_target(subtract(law, qhat, minus), law)


def draw_or_bonus(
    rng: StepRng, going: Tensor | None, waits: Tensor | None, weights: Tensor, token: Tensor | None, attempt: int
) -> Tensor:
    """``[B]``: what follows an ``attempt`` where that is ``going [B]`` (``None`` = all rows), by the number of the
    attempt; elsewhere the bonus token of rows that ``waits [B]``, by a number of its own, and ``token [B]`` of others.
    """
    if going is None or waits is None or token is None:
        return draw_where(rng, None, weights, None, index=attempt)
    if isinstance(rng, UniformStepRng):
        drawn = rng.draw_either(going, weights, ("residual", attempt), ("other", 0))
        return torch.where(going | waits, drawn, token)
    token = draw_where(rng, going, weights, token, index=attempt)
    return draw_where(rng, waits & ~going, weights, token, "other")


def one(pieces: Sequence[Tensor]) -> Tensor:
    """Pieces of the batch as a whole."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def laws_of(draft: Draft) -> Tensor:
    """``[B, N]``: the row of ``q`` that each node is ranked by: of two tokens drawn without replacement the first's."""
    law = counting(draft.width, draft.tokens.device).expand_as(draft.tokens) if draft.q_index is None else draft.q_index
    return torch.where(draft.parents < 0, law[:, :1], law) if draft.kind is WITHOUT_REPLACEMENT else law


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


def law_of_highest(p: Tensor, q: Tensor, y: Tensor, on_path: Tensor, n: Tensor | None, most: int) -> Tensor:
    """Qhat ``[B, L, V]`` along the path ``y [B, L]`` of the highest-ranked of ``n [B]`` sequences, ``None`` = ``most``.

    u^n - v^n = (u - v) sum_i u^i v^(n-1-i), so the factor J cancels against the denominator's.

    Args:
        p, q: ``[B, L, V]``, the laws before each token of the path.
        on_path: ``[B, L]`` bool, which of the tokens there are.
        most: at least 2, and no row has more sequences.
    """
    order = ascending(quotient(p, q).flatten(0, 1)).view_as(q)
    sums = q.gather(2, order).cumsum(2, dtype=torch.float64)
    up_to = torch.empty_like(q).scatter_(2, order, sums.to(q.dtype))  # sum of Q up to each token
    # A and J before each token, as shares of their sum: only that matters, and it does not vanish.
    own = at_token(q, y)
    below = (at_token(up_to, y) - own).clamp_(min=0)
    if n is not None:  # paths may begin further down; what is behind their end matters to no token before it
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
    for m in range(2, most):
        lo_power, a_power = lo_power * lo, a_power * a
        higher, lower = torch.addcmul(lo_power, hi, top), bottom + a_power
        if n is None:
            top, bottom = higher, lower
        else:
            more = (n > m)[:, None]
            top, bottom = choose(more, higher, top), torch.where(more[..., None], lower, bottom)
    return top.div_(bottom).mul_(q)
