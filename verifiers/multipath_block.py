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

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from ..framework.draft import Draft, Verdict, take
from ..framework.drafter import StrategyConfig
from ..framework.rng import RoundRng
from ..framework.verifier import Verifier, VerifierTraits
from ._chain import total
from ._tree import choose, none, ratio, residual, settle, stop_at

#: Shorter lists torch does not sort by radix; those that are not much shorter are worth padding.
RADIX = 32768


class MultipathBlock(Verifier):
    """Block verification of the best-ranked sequence. Lossless; K i.i.d. sequences, a pair of chains whose first
    tokens were drawn without replacement, or a chain (K = 1: block)."""

    name = "multipath-block"
    traits = VerifierTraits(drawn=frozenset({"chain", "iid", "without_replacement"}), pairs_only=True)

    class Config(StrategyConfig):
        recycle: bool = Field(
            default=True, description="go on in other sequences that had drafted the correction token"
        )

    config: Config

    def verify(self, draft: Draft, p: Tensor, rng: RoundRng) -> Verdict:
        rows = torch.arange(draft.batch_size, device=p.device)
        sequences = draft.as_sequences()
        k, depth = sequences.shape[1:]
        at, start = torch.full_like(rows, -1), torch.zeros_like(rows)
        members = torch.ones(draft.batch_size, k, dtype=torch.bool, device=p.device)
        walking, token = torch.ones_like(rows, dtype=torch.bool), torch.zeros_like(rows)
        goes_on = walking
        for attempt in range(min(depth, k if self.config.recycle else 1)):
            # An attempt starts at least one token deeper than the one before, and at least one sequence is left
            # behind: the correction is never the path's own token (Qhat below p_i P means p_{i+1} = 1).
            most = k - attempt
            stop, weights = self._block(draft, p, sequences, members, at, start, attempt, most, goes_on, rng)
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
            token = rng.draw(settle(take(p, at + 1), token, ~walking), "other")
        return stop_at(draft, at, token)

    def _block(
        self,
        draft: Draft,
        p: Tensor,
        sequences: Tensor,
        members: Tensor,
        at: Tensor,
        start: Tensor,
        first_level: int,
        most: int,
        walking: Tensor,
        rng: RoundRng,
    ) -> tuple[Tensor, Tensor]:
        """One block verification from node ``at [B]`` (depth ``start [B]``) over the sequences ``members [B, K]``,
        of which there are no more than ``most``.

        Returns the node ``[B]`` where it stops and the weights ``[B, V]`` of the token that follows.
        """
        depth, n = sequences.shape[2], members.sum(1)
        a, j = torch.zeros_like(start, dtype=torch.float64), torch.ones_like(start, dtype=torch.float64)
        credit = torch.ones_like(a)  # p_i of block verification
        # tau = 0 and what follows P, unless something longer is accepted.
        stop, scale, minus, law_at_stop = at, credit, torch.zeros_like(a), None
        for level in range(first_level, depth):
            chooser = members & (sequences[:, :, level] >= 0)
            active = walking & (level >= start) & chooser.any(1)
            law = take(p, at + 1)
            nodes = sequences[:, :, level].clamp(min=0)
            x = draft.tokens.gather(1, nodes)
            best = chooser.long().argmax(1, keepdim=True)
            qhat = q = draft.law_of(nodes.gather(1, best).squeeze(1), law)
            # Below children drawn without replacement there is one chain.
            if most > 1 and (level == 0 or draft.drawn == "iid"):
                score, order, up_to = ranking(law, q)
                found = torch.where(chooser, score.gather(1, x), -1)
                highest = found == found.amax(1, keepdim=True)
                best = torch.where(highest, x, -1).argmax(1, keepdim=True)  # ties by id, as in the order
            y, node = x.gather(1, best).squeeze(1), nodes.gather(1, best).squeeze(1)
            if most > 1 and draft.drawn == "iid":
                qhat = skewed(q, up_to, a, j, n, most)
                hi, own = a + j * at_token(up_to, y), j * at_token(q, y)
                a = torch.where(active & (hi > 0), ((hi - own) / hi).clamp(min=0), a)
                j = torch.where(active & (hi > 0), own / hi, j)
            elif most > 1 and level == 0:
                qhat = higher_of_two(q, order)
            # Stopping here, before y: the interior h of block verification (h_0 = 1).
            stops = active & (level == start)
            if level > first_level:
                inside = active & (level > start)
                s = -total(torch.addcmul(qhat, law, credit[:, None].to(law.dtype), value=-1).clamp_(max=0))
                left = s + (1 - credit)
                h = torch.where(inside, torch.where((left > 0) & (credit < 1), s / left, 1.0), 0.0)
                number = level * (level + 1) // 2 + first_level  # the same whatever the width of the batch
                stops = stops | rng.accept(h[:, None], index=number).squeeze(1)
            stop, scale = torch.where(stops, at, stop), torch.where(stops, credit, scale)
            minus = minus.masked_fill(stops, 1)
            law_at_stop = qhat if law_at_stop is None else choose(stops, qhat, law_at_stop)
            # On to y.
            credit = torch.where(active, (credit * ratio(law, qhat, y)).clamp(max=1), credit)
            members = torch.where(active[:, None], chooser & (nodes == node[:, None]), members)
            at = torch.where(active, node, at)
        # The whole path: h_gamma = p_gamma, and the bonus from P_gamma.
        number = first_level * (first_level + 1) // 2 + first_level
        whole = rng.accept(torch.where(walking, credit, 0.0)[:, None], index=number).squeeze(1)
        stop, scale, minus = torch.where(whole, at, stop), scale.masked_fill(whole, 1), minus.masked_fill(whole, 0)
        assert law_at_stop is not None
        weights, _ = residual(take(p, stop + 1), law_at_stop * minus[:, None].to(p.dtype), scale)
        return stop, weights


def at_token(law: Tensor, token: Tensor) -> Tensor:
    """``[B]`` float64: ``law [B, V]`` at ``token [B]``."""
    return law.gather(1, token[:, None]).squeeze(1).double()


def ranking(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P / Q of every token; tokens by it, ascending, ties by id; the mass of Q up to each. All ``[B, V]``.

    Of float32 laws the ratio is rounded to half precision, which halves the time of sorting. The order decides how
    much is accepted, and hardly that; the rule keeps the target's law with any order.
    """
    score = (p / q).nan_to_num_(0.0, posinf=torch.inf)  # 0 / 0
    if score.dtype == torch.float32:
        score = score.half()
    order = ascending(score)
    sums = q.gather(1, order).cumsum(1, dtype=torch.float64)
    return score, order, torch.empty_like(q).scatter_(1, order, sums.to(q.dtype))


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


def higher_of_two(q: Tensor, order: Tensor) -> Tensor:
    """``[B, V]``: the law of the higher of two tokens drawn from ``q [B, V]`` without replacement, by ``order``."""
    sorted_q = q.gather(1, order).double()
    rest = 1 - sorted_q
    odds = torch.where(rest > 0, sorted_q / rest, 0.0)  # of y; as a second token x has q(x) times that of the first
    below, odds_below = sorted_q.cumsum(1) - sorted_q, odds.cumsum(1) - odds
    # A token with all the mass has no sibling.
    factor = torch.where(rest > 0, below / rest + odds_below, 1.0)
    return torch.empty_like(sorted_q).scatter_(1, order, sorted_q * factor).to(q.dtype)


def skewed(q: Tensor, up_to: Tensor, a: Tensor, j: Tensor, n: Tensor, most: int) -> Tensor:
    """Qhat ``[B, V]`` of ``n [B]`` (at most ``most``) sequences, for A and J ``[B]`` as shares of their sum.

    u^n - v^n = (u - v) sum_i u^i v^(n-1-i), so the factor J cancels against the denominator's.
    """
    share = j[:, None].to(q.dtype)
    hi = torch.addcmul(a[:, None].to(q.dtype), up_to, share)
    lo = torch.addcmul(hi, q, share, value=-1).clamp_(min=0)
    top, bottom = torch.ones_like(share), torch.ones_like(a)
    lo_power, a_power = lo, a
    for m in range(1, most):
        if m > 1:
            lo_power, a_power = lo_power * lo, a_power * a
        more = n > m
        top = choose(more, torch.addcmul(lo_power, hi, top), top)
        bottom = torch.where(more, bottom + a_power, bottom)
    return q * top.div_(bottom[:, None].to(q.dtype))
