"""The device work of a step: draft to logits, target distributions, verdict, and one copy of the outcome to the host.

If p is large, it is computed and verified in chunks of rows. Rows are independent and their random numbers are keyed by
row, so chunks do not change the tokens. At B = 32, V = 152 000 and 60 nodes p takes 1.2 GB, and some verifiers allocate
as much again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..contracts.draft import ChunkedScores, DenseScores, Draft, Scores, Verdict
from ..contracts.lm import LM
from ..contracts.rng import CounterStepRng, StepRng
from ..contracts.sampling import Sampling
from ..util import tensors
from ..util.tensors import counting
from .checks import check_verdict
from .compiled_verifier import VerifyFunction
from .sequence import RowOutcome


@dataclass
class Step:
    """State of one step; the phases of `Decoder.step` set the fields in order.

    Attributes:
        rng: random numbers of the step.
        validated: True if the values of the draft and the verdict are checked, False if only their structure is.
        proposed: output of the drafter.
        draft: the nodes to score: ``proposed``, a chain cut to the largest ``sequences.limit``.
        candidates: the nodes to verify: ``draft`` without probes.
        scores: output of the target.
        finite: True if the target's logits are finite, see `make_scores` and `verify`.
        verdict: output of the verifier.
        rows: the outcome of each row, on the host.
        active: rows with a sequence that did not fail.
        committed: new tokens of each row.
    """

    rng: StepRng
    validated: bool
    proposed: Draft = field(init=False)
    draft: Draft = field(init=False)
    candidates: Draft = field(init=False)
    scores: Scores = field(init=False)
    finite: Tensor | None = field(init=False)
    verdict: Verdict = field(init=False)
    rows: list[RowOutcome] = field(init=False)
    active: list[int] = field(init=False)
    committed: list[list[int]] = field(init=False)


def draft_forward(target: LM, root: Tensor, draft: Draft) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One pass of the target over ``root [B, 1]`` and all nodes, probes included, resumed from a fork if possible.

    Returns:
        logits, hidden states, and `Scores.resume_matches`.
    """
    tokens = torch.cat([root, draft.tokens], 1)
    # Node 0 of the scored tree is the root.
    parents = None if draft.is_chain else functional.pad(draft.parents + 1, (1, 0), value=-1)
    if (fork := draft.resume_from) is None or (fed := fork.fed) is None:
        return *target.forward(tokens, parents), None
    width = min(fed.shape[1], tokens.shape[1])
    same = fed[:, :width] == tokens[:, :width]
    resume_matches = same[:, 0] & (same[:, 1:] | ~draft.valid[:, : width - 1]).all(1)
    return *target.forward(tokens, parents, resume_from=fork), resume_matches


def make_scores(
    logits: Tensor,
    hidden: Tensor | None,
    resume_matches: Tensor | None,
    sampling: Sampling,
    rng: StepRng,
    *,
    stateful: bool,
) -> tuple[Scores, Tensor | None]:
    """Scores from ``logits [B, N + 1, V]``, and ``[B, N + 1]`` bool, True for finite rows of logits.

    Scores are chunked if their distributions are large and their rows can be verified in chunks; then the second is
    ``None``, and `verify` computes it. A ``stateful`` verifier keeps its state for the whole batch, and so does a
    source of random numbers that enumerates outcomes.
    """
    large = logits.numel() > tensors.LARGE and len(logits) > 1
    if large and not stateful and isinstance(rng, CounterStepRng):
        return ChunkedScores(sampling.probs, logits, hidden, resume_matches), None
    p, finite = sampling.checked_probs(logits)
    return DenseScores(p, logits, hidden, resume_matches), finite


def verify(
    function: VerifyFunction,
    name: str,
    draft: Draft,
    candidates: Draft,
    scores: Scores,
    finite: Tensor | None,
    rng: StepRng,
    sampling: Sampling,
) -> tuple[Verdict, Tensor]:
    """The verdict on ``candidates``, and ``[B]`` bool, False for rows with NaN or infinite logits.

    Args:
        function: the verify step of a verifier; ``name``: its name in messages.
        draft: the scored draft; ``candidates``: the draft without probes.
        finite: second output of `make_scores`.

    Raises:
        ContractError: a verdict of a chunk breaks the contract.
    """
    if finite is not None:
        return function(candidates, scores.p[:, : candidates.width + 1], rng), _rows_finite(finite, draft.valid)
    assert isinstance(rng, CounterStepRng)

    def verify_chunk(rows: slice) -> tuple[Verdict, Tensor]:
        p, finite = sampling.checked_probs(scores.logits[rows])
        part = candidates.map_rows(lambda tensor: tensor[rows])
        verdict = function(part, p[:, : candidates.width + 1], rng.of_rows(rows))
        check_verdict(part, verdict, verifier=name)
        return verdict, _rows_finite(finite, draft.valid[rows])

    b, positions, v = scores.logits.shape
    step = max(tensors.PIECE // (positions * v), 1)
    verdicts, finite_rows = zip(*(verify_chunk(slice(i, i + step)) for i in range(0, b, step)), strict=True)

    def joined(field: str) -> Any:
        parts = [getattr(verdict, field) for verdict in verdicts]
        return None if parts[0] is None else torch.cat(parts)

    return Verdict(joined("length"), joined("token"), joined("path"), joined("survival")), torch.cat(finite_rows)


def _rows_finite(finite: Tensor, valid: Tensor) -> Tensor:
    """``[B]``: True if the logits of the root and of all valid nodes are finite; padding is ignored."""
    return finite[:, 0] & (valid <= finite[:, 1:]).all(1)


def to_host(
    drafted: Draft, draft: Draft, scores: Scores, finite: Tensor, verdict: Verdict, *, logprobs: bool = False
) -> list[RowOutcome]:
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
    names, first, end = list(columns), len(columns), len(columns) + emitted.shape[1]
    outcomes = []
    for row in torch.cat(parts, 1).tolist():
        values = dict(zip(names, row, strict=False))
        outcomes.append(
            RowOutcome(
                tau=int(values["tau"]),
                nodes=int(values["nodes"]),
                depth=int(values.get("depth", values["nodes"])),
                target_finite=bool(values["target_finite"]),
                drafter_finite=bool(values.get("drafter_finite", True)),
                resume_matches=bool(values.get("resume_matches", True)),
                q=values.get("q", 1.0),
                survival=values.get("survival", 1.0),
                tokens=list(map(int, row[first:end])),
                logprobs=row[end:],
            )
        )
    return outcomes


def _logprobs(emitted: Tensor, verdict: Verdict, scores: Scores) -> Tensor:
    """``[B, D + 1]`` float64: log p of each of ``emitted [B, D + 1]`` given the root and the path."""
    (_, positions, vocab), width = scores.logits.shape, emitted.shape[1]
    if verdict.path is None:
        after = counting(width, emitted.device).expand_as(emitted)
    else:
        after = functional.pad(verdict.path + 1, (1, 0))[:, :width].clamp_(0, positions - 1)
    # Clamped: invalid tokens are reported on the host.
    return scores.prob_of(after, emitted.clamp(0, vocab - 1)).double().log_()


def path_in_scored_tree(path: Tensor, width: int) -> Tensor:
    """``[B, D + 1]`` indices of root and accepted nodes in the scored tree, padded with -1.

    Args:
        path: see `Verdict`; ``width``: nodes of the verified draft.
    """
    inside = path.clamp(-1, width - 1)  # paths of failed rows are arbitrary
    return functional.pad(inside + (inside >= 0), (1, 0))
