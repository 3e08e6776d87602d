"""From logits to a verdict: all rows at once, or, where the target's laws are large, some rows after others.

Rows are independent, and their random numbers are known by the row, so only launches and memory differ: at B = 32,
V = 152 000 and 60 nodes p alone is 1.2 GB, and some rules make as much again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..contracts import tensors
from ..contracts.draft import Draft, Scores, Verdict
from ..contracts.rng import CounterRound, RoundRng
from ..contracts.sampling import Sampling
from ..contracts.verifier import Verifier
from .forms import check_verdict


def scored(
    logits: Tensor,
    hidden: Tensor | None,
    taken_up: Tensor | None,
    draft: Draft,
    sampling: Sampling,
    stateful: bool,
    rng: RoundRng,
) -> Scores:
    """What ``logits [B, N + 1, V]`` say of a draft.

    Large laws are left for `judge` to make, which then finds out what is finite. Not so for a ``stateful`` rule, which
    keeps its state for the whole batch, and for a source that enumerates outcomes, which knows one batch.
    """
    if logits.numel() > tensors.LARGE and len(logits) > 1 and not stateful and isinstance(rng, CounterRound):
        return Scores(sampling.law, torch.ones_like(draft.count, dtype=torch.bool), logits, hidden, taken_up)  # type: ignore[arg-type]
    p, finite = sampling.checked_law(logits)
    return Scores(p, _fine(finite, draft.valid), logits, hidden, taken_up)


def judge(verifier: Verifier, name: str, draft: Draft, scores: Scores, rng: RoundRng, sampling: Sampling) -> Verdict:
    """What ``verifier``, called ``name`` in messages, says of a draft without its probes."""
    judged = draft.candidates
    if scores.made:
        return verifier.verify(judged, scores.p[:, : judged.width + 1], rng)
    assert isinstance(rng, CounterRound)

    def judge_some(rows: slice) -> Verdict:
        p, finite = sampling.checked_law(scores.logits[rows])
        scores.finite[rows] = _fine(finite, draft.valid[rows])
        part = _rows_of(judged, rows)
        verdict = verifier.verify(part, p[:, : judged.width + 1], rng.of_rows(rows))
        check_verdict(part, verdict, verifier=name)
        return verdict

    b, laws, v = scores.logits.shape
    step = max(tensors.PIECE // (laws * v), 1)
    verdicts = [judge_some(slice(first, first + step)) for first in range(0, b, step)]

    def together(name: str) -> Any:
        parts = [getattr(verdict, name) for verdict in verdicts]
        return None if parts[0] is None else torch.cat(parts)

    return Verdict(together("length"), together("token"), together("path"), together("survival"))


def _fine(finite: Tensor, valid: Tensor) -> Tensor:
    """``[B]``: were the root's logits and those of valid nodes finite?

    Rows that are padded past their own draft compute something there that nobody reads.
    """
    return finite[:, 0] & (valid <= finite[:, 1:]).all(1)


def _rows_of(draft: Draft, rows: slice) -> Draft:
    """Some rows of a draft, as views."""
    names = ("tokens", "parents", "valid", "q", "law", "sequences", "finite")
    fields = {name: getattr(draft, name) for name in names}
    return replace(draft, **{name: None if of is None else of[rows] for name, of in fields.items()}, begun=None)
