"""The single device-to-host copy of a step, and the checks made on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..contracts.draft import Draft, Scores, Verdict
from ..errors import ContractError
from ..util.tensors import counting

#: What is wrong with a q, and what to do.
NOT_FINITE = "reported a q that is NaN or infinite"
FINITE_Q = "every row of q is finite, padding too, because rules multiply it by 0"


class Row(NamedTuple):
    """A row of the batch, on the host.

    Attributes:
        tau: accepted tokens.
        nodes, depth: of what was drafted.
        target_finite, drafter_finite: whether their logits were free of NaN and infinity, as far as they say.
        resume_matches: whether what the target took up from `Draft.resume_from` was this draft.
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
    resume_matches: bool
    q: float
    survival: float
    tokens: list[int]
    logprobs: list[float]


def to_host(
    drafted: Draft, draft: Draft, scores: Scores, finite: Tensor, verdict: Verdict, *, logprobs: bool = False
) -> list[Row]:
    """The step's one synchronisation.

    Args:
        drafted: what the drafter proposed, without probes.
        draft: what of it was judged: a chain is trimmed.
        finite: ``[B]`` bool, False for rows in which the target produced NaN or infinite logits.
        logprobs: of emitted tokens, too. A gather, and no pass over p.
    """
    if verdict.path is None:
        along = draft.tokens
    else:
        along = draft.tokens.gather(1, verdict.path.clamp(0, draft.width - 1)) if draft.width else draft.tokens
    emitted = torch.cat([along, verdict.token[:, None]], 1)
    # A length beyond the path is found on the host; until then nothing may be written beyond the table.
    emitted.scatter_(1, verdict.length.clamp(0, along.shape[1])[:, None], verdict.token[:, None])
    columns = {"tau": verdict.length, "nodes": drafted.count, "target_finite": finite}
    if not drafted.is_chain and draft.width:
        if draft.sequences is None:
            columns["depth"] = (draft.depth * draft.valid).amax(1)
        else:
            columns["depth"] = (draft.sequences >= 0).sum(2).amax(1)
    if draft.finite is not None:
        columns["drafter_finite"] = draft.finite
    if scores.resume_matches is not None:
        columns["resume_matches"] = scores.resume_matches
    if draft.q is not None:
        columns["q"] = draft.q.sum((1, 2)).double()  # with one float64 all are, which holds every token id exactly
    if verdict.survival is not None:
        columns["survival"] = verdict.survival.sum(1).double()
    parts = [torch.stack(list(columns.values()), 1), emitted]
    if logprobs:
        parts.append(_logprobs(emitted, verdict, scores))
    ends = len(columns), len(columns) + emitted.shape[1]
    return [
        _row(dict(zip(columns, row, strict=False)), row[slice(*ends)], row[ends[1] :])
        for row in torch.cat(parts, 1).tolist()
    ]


def _row(columns: Mapping[str, float], tokens: list[float], logprobs: list[float]) -> Row:
    """Build a `Row` from the copied columns; a missing one has its normal value; a chain is as deep as its nodes."""
    nodes = int(columns["nodes"])
    return Row(
        tau=int(columns["tau"]),
        nodes=nodes,
        depth=int(columns.get("depth", nodes)),
        target_finite=bool(columns["target_finite"]),
        drafter_finite=bool(columns.get("drafter_finite", True)),
        resume_matches=bool(columns.get("resume_matches", True)),
        q=columns.get("q", 1.0),
        survival=columns.get("survival", 1.0),
        tokens=[int(token) for token in tokens],
        logprobs=logprobs,
    )


def _logprobs(emitted: Tensor, verdict: Verdict, scores: Scores) -> Tensor:
    """``[B, D + 1]`` float64: log p of each of ``emitted [B, D + 1]``, which follow the root and a path."""
    (_, laws, vocab), width = scores.logits.shape, emitted.shape[1]
    if verdict.path is None:
        after = counting(width, emitted.device).expand_as(emitted)
    else:
        after = functional.pad(verdict.path + 1, (1, 0))[:, :width].clamp_(0, laws - 1)
    # A verdict that names no token is found on the host.
    return scores.prob_of(after, emitted.clamp(0, vocab - 1)).double().log_()


def kept_path(draft: Draft, verdict: Verdict) -> Tensor | None:
    """Indices, in the grown tree, of the root and accepted nodes, -1 behind them; None if they are its first ones."""
    if verdict.path is None:
        return None
    inside = verdict.path.clamp(-1, draft.width - 1)  # rows whose numbers are wrong may name any node
    return functional.pad(inside + (inside >= 0), (1, 0))


def failures(rows: Sequence[Row], where: Mapping[int, str], drafter: str) -> dict[int, str]:
    """Return an error message for each row with invalid numbers; ``where`` names the occupied slots and positions."""
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
        if not row.resume_matches:
            advice = "draft.resume_from is a fork that was fed the root and then the draft's own tokens, in their order"
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
