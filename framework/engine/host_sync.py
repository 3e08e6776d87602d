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

#: Error message for a q with NaN, and its advice.
NOT_FINITE = "reported a q that is NaN or infinite"
FINITE_Q = "every row of q must be finite, padding too, because verifiers multiply it by 0"


class Row(NamedTuple):
    """A row of the batch, on the host.

    Attributes:
        tau: accepted tokens.
        nodes, depth: size of the draft.
        target_finite, drafter_finite: True if their logits were free of NaN and infinity.
        resume_matches: `Scores.resume_matches`.
        q: sum of all entries of q, NaN or infinite if one of them is.
        survival: sum of `Verdict.survival`.
        tokens: the accepted tokens and the one after them, then padding.
        logprobs: log p of each of ``tokens`` given those before it; empty if not requested.
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
    """Copy the outcome of the step to the host: the only synchronisation of a step.

    Args:
        drafted: the proposed draft, without probes.
        draft: the verified draft: a chain may have been trimmed.
        finite: ``[B]`` bool, False for rows in which the target produced NaN or infinite logits.
        logprobs: include log p of the emitted tokens, by one gather.
    """
    if verdict.path is None or not draft.width:
        path_tokens = draft.tokens
    else:
        path_tokens = draft.tokens.gather(1, verdict.path.clamp(0, draft.width - 1))
    emitted = torch.cat([path_tokens, verdict.token[:, None]], 1)
    # Clamped: invalid lengths are reported on the host.
    emitted.scatter_(1, verdict.length.clamp(0, path_tokens.shape[1])[:, None], verdict.token[:, None])
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
        columns["q"] = draft.q.sum((1, 2)).double()  # float64 holds every token id exactly
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
    """Build a `Row` from the copied columns, with defaults for missing ones."""
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
    """``[B, D + 1]`` float64: log p of each of ``emitted [B, D + 1]`` given the root and the path."""
    (_, positions, vocab), width = scores.logits.shape, emitted.shape[1]
    if verdict.path is None:
        after = counting(width, emitted.device).expand_as(emitted)
    else:
        after = functional.pad(verdict.path + 1, (1, 0))[:, :width].clamp_(0, positions - 1)
    # Clamped: invalid tokens are reported on the host.
    return scores.prob_of(after, emitted.clamp(0, vocab - 1)).double().log_()


def path_in_scored_tree(draft: Draft, verdict: Verdict) -> Tensor | None:
    """``[B, D + 1]`` indices of root and accepted nodes in the scored tree, padded with -1; None for a prefix."""
    if verdict.path is None:
        return None
    inside = verdict.path.clamp(-1, draft.width - 1)  # paths of failed rows are arbitrary
    return functional.pad(inside + (inside >= 0), (1, 0))


def failures(rows: Sequence[Row], places: Mapping[int, str], drafter: str) -> dict[int, str]:
    """Return an error message per row with invalid numbers; ``places``: sequence and position of each occupied slot."""
    failed = {}
    for index, place in places.items():
        row = rows[index]
        if not row.target_finite or not row.drafter_finite:
            who = drafter if row.target_finite else "the target"
            advice = "try dtype float32, another attention implementation, or check the weights"
            failed[index] = f"{who} produced NaN or infinite logits for {place}; {advice}"
        elif not math.isfinite(row.q):
            failed[index] = f"{drafter} {NOT_FINITE} for {place}; {FINITE_Q}"
    return failed


def check_rows(
    rows: Sequence[Row], places: Mapping[int, str], limits: Sequence[int], vocab_size: int, drafter: str, verifier: str
) -> None:
    """Raise ContractError for invalid counts or tokens in the slots of ``places``."""
    for index, place in places.items():
        row, limit = rows[index], limits[index]
        most = min(row.depth, len(row.tokens) - 1)
        outside = [token for token in row.tokens[: row.tau + 1] if not 0 <= token < vocab_size]
        if not row.resume_matches:
            advice = "draft.resume_from must be a fork that was fed the root and then the draft's tokens, in order"
            raise ContractError(
                f"{drafter} drafted other tokens than it fed to a fork in slot {index} ({place}); {advice}"
            )
        if row.depth > limit:
            advice = "propose() must not exceed the limit of each row"
            raise ContractError(f"{drafter} {too_deep(row.depth, limit)} in slot {index} ({place}); {advice}")
        if not 0 <= row.tau <= most:
            what = accepted_too_many(row.tau, most)
        elif outside:
            what = emitted_outside(outside[0], vocab_size)
        elif not -1 < row.survival < row.depth + 2:
            what = f"reported a survival that sums to {row.survival:.6g}"
        else:
            continue
        raise ContractError(f"{verifier} {what} in slot {index} ({place}); see the docstring of Verdict")


def too_deep(depth: int, limit: int) -> str:
    return f"drafted {depth} tokens deep, but sequences.limit allows {limit},"


def emitted_outside(token: int, vocab_size: int) -> str:
    return f"emitted the token {token}, outside of the vocabulary of {vocab_size},"


def accepted_too_many(tau: int, depth: int) -> str:
    return f"accepted {tau} tokens of a draft that is {depth} deep"
