"""What the host learns of a round, in its one transfer, and what is checked of that in every round, on every device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..contracts.draft import Draft, Scores, Verdict
from ..contracts.errors import ContractError

#: What is wrong with a q, and what to do.
NOT_FINITE = "reported a q that is NaN or infinite"
FINITE_Q = "every row of q is finite, padding too, because rules multiply it by 0"


class Row(NamedTuple):
    """A row of the batch, on the host.

    Attributes:
        tau: accepted tokens.
        nodes, depth: of what was drafted.
        target_finite, drafter_finite: whether their logits were free of NaN and infinity, as far as they say.
        taken_up: whether what the target took up from `Draft.begun` was this draft.
        q: the sum of all its q, which is NaN or infinite where one of them is.
        survival: the sum of `Verdict.survival`.
        tokens: those on the accepted path and the one that follows; behind them whatever there was.
        logprobs: log p of each of ``tokens`` after those before it; empty if nobody wants to know.
    """

    tau: int
    nodes: int
    depth: int
    target_finite: bool
    drafter_finite: bool
    taken_up: bool
    q: float
    survival: float
    tokens: list[int]
    logprobs: list[float]


def to_host(drafted: Draft, draft: Draft, scores: Scores, verdict: Verdict, *, logprobs: bool = False) -> list[Row]:
    """The round's one synchronisation.

    Args:
        drafted: what the drafter proposed, without probes.
        draft: what of it was judged: a chain is trimmed.
        logprobs: of emitted tokens, too. A gather, and no pass over p.
    """
    if draft.width:
        order = torch.arange(draft.width, device=draft.tokens.device).expand_as(draft.tokens)
        path = order if verdict.path is None else verdict.path.clamp(0, draft.width - 1)
        along = draft.tokens.gather(1, path)
    else:
        along = draft.tokens
    emitted = torch.cat([along, torch.zeros_like(verdict.token)[:, None]], 1)
    # A length beyond the path is found on the host; until then nothing may be written beyond the table.
    emitted.scatter_(1, verdict.length.clamp(0, along.shape[1])[:, None], verdict.token[:, None])
    chain = drafted.is_chain or not draft.width
    depth = drafted.count if chain else torch.where(draft.valid, draft.depth, 0).amax(1)
    fine = torch.ones_like(scores.finite)
    drafter_finite = fine if draft.finite is None else draft.finite
    taken_up = fine if scores.taken_up is None else scores.taken_up
    q = fine if draft.q is None else draft.q.sum((1, 2))
    survival = fine if verdict.survival is None else verdict.survival.sum(1)
    # float64 holds every token id exactly.
    meta = [verdict.length, drafted.count, depth, scores.finite, drafter_finite, taken_up, q, survival]
    parts = [torch.stack(meta, 1).double(), emitted.double()]
    if logprobs:
        parts.append(_logprobs(emitted, verdict, scores))
    width, host = emitted.shape[1], torch.cat(parts, 1).tolist()
    return [
        Row(
            *(int(tau), int(nodes), int(depth), bool(target), bool(drafter), bool(taken_up), q, survival),
            [int(token) for token in rest[:width]],
            rest[width:],
        )
        for tau, nodes, depth, target, drafter, taken_up, q, survival, *rest in host
    ]


def _logprobs(emitted: Tensor, verdict: Verdict, scores: Scores) -> Tensor:
    """``[B, D + 1]`` float64: log p of each of ``emitted [B, D + 1]``, which follow the root and a path."""
    (_, laws, vocab), width = scores.p.shape, emitted.shape[1]
    if verdict.path is None:
        after = torch.arange(width, device=emitted.device)
    else:
        after = functional.pad(verdict.path + 1, (1, 0))[:, :width].clamp(0, laws - 1)
    # A verdict that names no token is found on the host.
    index = after * vocab + emitted.clamp(0, vocab - 1)
    return scores.p.flatten(1).gather(1, index).double().log()


def kept_path(draft: Draft, verdict: Verdict) -> Tensor | None:
    """Indices, in the grown tree, of the root and the accepted nodes; None if they are its first ones."""
    if verdict.path is None:
        return None
    root = torch.zeros_like(verdict.token)[:, None]
    inside = verdict.path.clamp(max=draft.width - 1)  # rows whose numbers are wrong may name any node
    return torch.cat([root, torch.where(inside >= 0, inside + 1, -1)], 1)


def failures(rows: Sequence[Row], where: Mapping[int, str], drafter: str) -> dict[int, str]:
    """What is wrong with the numbers of rows, a sentence for each; ``where`` names the occupied slots and positions."""
    failed = {}
    for index, place in where.items():
        row = rows[index]
        if not row.target_finite or not row.drafter_finite:
            who = drafter if row.target_finite else "the target"
            advice = "try dtype float32, another attention implementation, or check the weights"
            failed[index] = f"{who} produced NaN or infinite logits for {place}; {advice}"
        elif not math.isfinite(row.q):
            failed[index] = f"{drafter} {NOT_FINITE} for {place}; {FINITE_Q}"
    return failed


def check_rows(
    rows: Sequence[Row], where: Mapping[int, str], limits: Sequence[int], vocab_size: int, drafter: str, verifier: str
) -> None:
    """Raise ContractError for counts and tokens that cannot be, in the slots of ``where``."""
    for index, place in where.items():
        row, limit = rows[index], limits[index]
        most = min(row.depth, len(row.tokens) - 1)
        strange = [token for token in row.tokens[: row.tau + 1] if not 0 <= token < vocab_size]
        if not row.taken_up:
            advice = "draft.begun is a fork that was fed the root and then the draft's own tokens, in their order"
            raise ContractError(
                f"{drafter} drafted other tokens than it fed to a fork in slot {index} ({place}); {advice}"
            )
        if row.depth > limit:
            advice = "propose() must not exceed the limit of each row"
            raise ContractError(f"{drafter} {too_deep(row.depth, limit)} in slot {index} ({place}); {advice}")
        if not 0 <= row.tau <= most:
            what = accepted_too_many(row.tau, most)
        elif strange:
            what = emitted_outside(strange[0], vocab_size)
        elif not -1 < row.survival < row.depth + 2:
            what = f"reported a survival that sums to {row.survival:.6g}"
        else:
            continue
        raise ContractError(f"{verifier} {what} in slot {index} ({place}); see what Verdict promises")


def too_deep(depth: int, limit: int) -> str:
    return f"drafted {depth} tokens deep, but sequences.limit allows {limit},"


def emitted_outside(token: int, vocab_size: int) -> str:
    return f"emitted the token {token}, outside of the vocabulary of {vocab_size},"


def accepted_too_many(tau: int, depth: int) -> str:
    return f"accepted {tau} tokens of a draft that is {depth} deep"
