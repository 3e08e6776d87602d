"""Scoring and verification: draft to logits, target distributions and verdict, in chunks of rows if p is large.

Rows are independent and their random numbers are keyed by row, so chunks do not change the tokens. At B = 32,
V = 152 000 and 60 nodes p takes 1.2 GB, and some verifiers allocate as much again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..contracts.draft import Draft, Verdict
from ..contracts.lm import LM
from ..contracts.rng import CounterStepRng, StepRng
from ..contracts.sampling import Sampling
from ..contracts.scores import ChunkedScores, DenseScores, Scores
from ..util import tensors
from .compiled_verifier import VerifyFunction
from .structural_checks import check_verdict


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
    logits: Tensor, hidden: Tensor | None, resume_matches: Tensor | None, sampling: Sampling, *, chunked: bool
) -> tuple[Scores, Tensor | None]:
    """Scores from ``logits [B, N + 1, V]``, and ``[B, N + 1]`` bool, True for finite rows of logits.

    For ``chunked`` scores the second is ``None``: `verify` computes it.
    """
    if chunked:
        return ChunkedScores(sampling.probs, logits, hidden, resume_matches), None
    p, finite = sampling.checked_probs(logits)
    return DenseScores(p, logits, hidden, resume_matches), finite


def needs_chunks(logits: Tensor, rng: StepRng, *, stateful: bool) -> bool:
    """True if the distributions of ``logits`` are large and their rows can be verified in chunks.

    A ``stateful`` verifier keeps its state for the whole batch, and so does a source that enumerates outcomes.
    """
    return logits.numel() > tensors.LARGE and len(logits) > 1 and not stateful and isinstance(rng, CounterStepRng)


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
