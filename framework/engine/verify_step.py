"""The verification step: logits to target distributions to a verdict, for all rows at once or in chunks of rows.

Rows are independent and their random numbers are keyed by row, so chunks change memory and the number of launches, not
the tokens: at B = 32, V = 152 000 and 60 nodes p alone is 1.2 GB, and some verifiers allocate as much again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contracts.draft import Draft, Verdict
from ..contracts.rng import CounterStepRng, StepRng
from ..contracts.sampling import Sampling
from ..contracts.scores import ChunkedScores, DenseScores, Scores
from ..util import tensors
from .compiled_verifier import VerifyFunction
from .structural_checks import check_verdict


def make_scores(
    logits: Tensor, hidden: Tensor | None, resume_matches: Tensor | None, sampling: Sampling, *, chunked: bool
) -> tuple[Scores, Tensor | None]:
    """Scores from ``logits [B, N + 1, V]``, and ``[B, N + 1]`` bool, whether each row of logits is finite.

    ``chunked`` scores leave that to `verify`, which reads every row once (``None``).
    """
    if chunked:
        return ChunkedScores(sampling.probs, logits, hidden, resume_matches), None
    p, finite = sampling.checked_probs(logits)
    return DenseScores(p, logits, hidden, resume_matches), finite


def needs_chunks(logits: Tensor, rng: StepRng, *, stateful: bool) -> bool:
    """True if the distributions of ``logits`` are large and their rows can be verified in chunks.

    A ``stateful`` verifier keeps its state for the whole batch, and a source that enumerates outcomes knows one batch.
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
        function: the verify step of a verifier, called ``name`` in messages.
        draft: what was scored; ``candidates``: the same without probes.
        finite: of `make_scores`.

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
    """``[B]``: True if the logits of the root and of all valid nodes are finite; padding is not read by anyone."""
    return finite[:, 0] & (valid <= finite[:, 1:]).all(1)
