"""Scoring of drafters with a `TextDistribution`: one pass of each draft model, and at most one of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from crossdraft.framework.contracts.drafter import DraftContext, TextDistribution
from crossdraft.framework.errors import NumericalError
from crossdraft.framework.util.tensors import on_device

from ..response import Response
from .draft_scores import DraftScores, shifted_windows
from .draft_traces import context_length_of, mask_past_end, max_draft_len
from .iid_chains import ChainSums, sums
from .model_pass import prefill_chunks


@dataclass(frozen=True)
class TextScoring:
    """A drafter to score from its text distribution.

    Attributes:
        name: of the drafter; ``maximum``: its maximum draft length.
        depth, sequences, tops: see `scoring.ScoringRequest`.
    """

    name: str
    distribution: TextDistribution
    maximum: int
    depth: int
    sequences: int
    tops: bool


class _TextScores:
    """Scores of one drafter along a group of texts, computed chunk by chunk."""

    def __init__(self, request: TextScoring, batch: Sequence[Response], chunk: int):
        self._request, self._batch, self._chunk = request, batch, chunk
        self._logits = prefill_chunks(request.distribution.lm, batch, chunk)
        self.log_q: list[Tensor] = []
        self.log_top: list[Tensor] = []
        self.stops: list[Tensor] = []
        self.parts: list[list[ChainSums]] = [[] for _ in batch]

    def next(self, i: int, y: Tensor, p: Tensor | None) -> None:
        """Process chunk i with tokens ``y [B, w]`` and target probabilities ``p [B, w, V]``."""
        logits, distribution = next(self._logits)[: len(self._batch)], self._request.distribution
        q = distribution.sampling.probs(logits)
        self.log_q.append(_log_at(q, y))
        model_q = q if distribution.sampling.temperature else logits.float().softmax(-1)
        if self._request.tops:
            self.log_top.append(model_q.amax(-1).double().log())
        if distribution.should_continue is not None:
            flat = (logits.flatten(0, 1), model_q.flatten(0, 1), y.flatten())
            self.stops.append(~distribution.should_continue(*flat).view_as(y))
        if p is not None and self._request.sequences:
            for row, text in enumerate(self._batch):
                n = min(len(text.tokens) - i * self._chunk, self._chunk)
                if n > 0:
                    self.parts[row].append(sums(p[row, :n], q[row, :n], y[row, :n], self._request.sequences))

    def close(self) -> None:
        self._logits.close()


@torch.inference_mode()
def score_texts(
    requests: Sequence[TextScoring],
    context: DraftContext,
    chunk: int,
    batch: Sequence[Response],
    log_p: Sequence[np.ndarray | None],
) -> list[list[DraftScores]]:
    """Scores of each drafter for each of at most B texts, in one pass of the target.

    Args:
        chunk: tokens per chunk.
        log_p: recorded log P of each text or None; the target runs if one is None, or for the sums.
    """
    run_target = context.sampling.temperature > 0 and (
        any(item.sequences for item in requests) or any(item is None for item in log_p)
    )
    lengths = [len(text.tokens) for text in batch]
    longest = max(lengths, default=0)
    x = on_device([[*text.tokens, *[0] * (longest - len(text.tokens))] for text in batch], context.device)
    scorers = [_TextScores(request, batch, chunk) for request in requests]
    target, target_log_p = None, []
    if run_target:
        assert context.target is not None
        target = prefill_chunks(context.target, batch, chunk)
    try:
        for i in range(-(-longest // chunk)):
            y, p = x[:, i * chunk : (i + 1) * chunk], None
            if target is not None:
                p = context.sampling.probs(next(target)[: len(batch)])
                target_log_p.append(_log_at(p, y))
            for scorer in scorers:
                scorer.next(i, y, p)
    finally:
        for generator in (*scorers, *([target] if target is not None else [])):
            generator.close()
    results = []
    for request, scorer in zip(requests, scorers, strict=True):
        row_scores = []
        for row, (text, n) in enumerate(zip(batch, lengths, strict=True)):
            log_q, recorded = _join(scorer.log_q, row, n), log_p[row]
            computed = _join(target_log_p, row, n) if run_target else None
            for label, values in ((f"drafter '{request.name}'", log_q), ("the target", computed)):
                if values is not None and np.isnan(values).any():
                    at = int(np.argmax(np.isnan(values)))
                    raise NumericalError(f"{label} produced NaN at token {at} of {text.place}; try dtype float32")
            own_log_p = None if recorded is None else computed
            if recorded is None:
                assert computed is not None
                recorded = computed
            scores = _draft_scores(request, context_length_of(context), scorer, text, row, log_q, recorded)
            row_scores.append(scores if own_log_p is None else replace(scores, own_log_p=own_log_p))
        results.append(row_scores)
    return results


def _draft_scores(
    request: TextScoring,
    context_length: int | None,
    scorer: _TextScores,
    text: Response,
    row: int,
    log_q: np.ndarray,
    log_p: np.ndarray,
) -> DraftScores:
    """`DraftScores` of a text from the ``log_q [T]`` of its tokens."""
    depth, n, maximum = request.depth, len(log_q), min(request.depth, request.maximum)
    ends = range(len(text.prompt), len(text.prompt) + n)
    lengths = np.array([max_draft_len(maximum, end, context_length) for end in ends], dtype=np.int64)
    if scorer.stops:
        lengths = np.minimum(
            lengths, _tokens_until(torch.cat(scorer.stops, 1)[row, :n].cpu().numpy(), request.distribution.keeps_last)
        )
    windows = shifted_windows(log_q, depth, -np.inf)
    windows = np.where(np.arange(depth) < lengths[:, None], windows, -np.inf)
    joined = ChainSums.joined(scorer.parts[row]) if scorer.parts[row] else None
    best = shifted_windows(_join(scorer.log_top, row, n), depth, -np.inf) if request.tops else None
    return DraftScores(mask_past_end(windows), lengths, log_p, joined, best)


def _log_at(probs: Tensor, tokens: Tensor) -> Tensor:
    """Log of ``probs [B, w, V]`` at ``tokens [B, w]``, float64 ``[B, w]``."""
    return probs.gather(2, tokens[..., None])[..., 0].double().log()


def _join(chunks: Sequence[Tensor], row: int, n: int) -> np.ndarray:
    return torch.cat([chunk[row] for chunk in chunks])[:n].cpu().numpy() if n else np.zeros(0)


def _tokens_until(stops: np.ndarray, keeps_last: bool) -> np.ndarray:
    """``[T]``: tokens from each position to the next of ``stops [T]`` bool, itself included if ``keeps_last``."""
    t = np.arange(len(stops))
    at = np.where(stops, t + keeps_last, t[-1:] + 2**20)
    return np.minimum.accumulate(at[::-1])[::-1] - t
