"""Scoring of model-free drafters on recorded responses, streamed, without a target.

A drafter may implement a fast path, `Drafter.response_drafts`; that of prompt lookup is in `prompt_lookup`. Otherwise
it is traced, see `scoring`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, tee
from typing import Any

import numpy as np
import torch

from crossdraft import DraftContext, Drafter, ModelError, Sampling, UsageError
from crossdraft.framework import plugins

from ...prompt_lookup import response_drafts
from ..response import Response
from .scoring import DraftScores, TracedDrafter, trace_drafters

WINDOW = 64  # texts per batch of comparisons
VOCABULARY = 2**24  # nominal vocabulary size without a model


def is_model_free(cls: type[Drafter], config: Any, sampling: Sampling) -> bool:
    """True if the drafts are point-mass chains that do not need a model."""
    traits = plugins.traits_of("drafters", cls, config, sampling)
    if not traits.is_chain or not traits.point_mass or traits.hidden_layers or traits.adapts:
        return False
    try:
        cls(config, _context(sampling, 1, 1))
    except ModelError:  # it requested a model
        return False
    return True


def score_model_free(
    cls: type[Drafter], config: Any, texts: Iterable[Response], depth: int, sampling: Sampling
) -> Iterator[DraftScores]:
    """Yield the scores of a drafter with `is_model_free` for each text, ``depth`` tokens deep.

    ``log_p`` is 0: the acceptance of a point mass does not depend on P.

    Raises ContractError: the drafter fails, or returns invalid drafts. Raises UsageError: the drafter remembers earlier
    sequences and does not implement ``response_drafts``.
    """
    texts, texts_again = tee(texts)
    pairs = ((text.prompt, text.tokens) for text in texts_again)
    with plugins.guarded("drafters", cls.name, "response_drafts()"):
        drafts = response_drafts(cls, config, pairs, depth)
    del pairs, texts_again  # an unread iterator would keep all responses alive
    if drafts is None and cls.remembers(config):
        raise UsageError(
            f"drafter '{cls.name}' remembers earlier sequences without implementing response_drafts, so it cannot be "
            "replayed; measure it with crossdraft run, or, if it is stateless with these options, let its classmethod "
            "remembers(config) return False"
        )
    drafts, texts = None if drafts is None else iter(drafts), iter(texts)
    while window := list(islice(texts, WINDOW)):
        if drafts is None:
            yield from _traced(cls, config, window, depth, sampling)
            continue
        result = []
        for text in window:
            item, t = _next_draft(drafts, cls.name), len(text.tokens)
            if not isinstance(item, np.ndarray) or item.shape != (t, depth) or item.dtype.kind != "i":
                shape = f"int64 [{t}, {depth}]"
                raise plugins.unusable("drafters", cls.name, f"response_drafts() must yield {shape} for each text")
            result.append(item)
        yield from score_chains(result, [text.tokens for text in window])


def score_chains(drafts: Sequence[np.ndarray], responses: Sequence[Sequence[int]]) -> list[DraftScores]:
    """`DraftScores` of point-mass drafts ``[T, depth]``, -1 past their end, one array per response."""
    depth = drafts[0].shape[1]
    sizes, separator = np.array([len(tokens) for tokens in responses]), np.full(depth, -2)
    flat = np.concatenate([part for tokens in responses for part in (np.asarray(tokens, dtype=np.int64), separator)])
    starts = np.arange(sizes.sum()) + np.repeat(depth * np.arange(len(sizes)), sizes)
    all_drafts = np.concatenate(drafts)
    log_q = np.where(all_drafts == flat[starts[:, None] + np.arange(depth)], 0.0, -np.inf)
    lengths = np.logical_and.accumulate(all_drafts >= 0, axis=1).sum(1)
    log_p, ends = np.zeros(len(all_drafts)), np.cumsum(sizes)
    slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [DraftScores(log_q[part], lengths[part], log_p[part]) for part in slices]


def _next_draft(drafts: Iterator[np.ndarray], name: str) -> np.ndarray | None:
    """Next draft of a plug-in; the slow error guard is set up only after an error."""
    try:
        return next(drafts, None)
    except BaseException as error:
        with plugins.guarded("drafters", name, "response_drafts()"):
            raise error


def _context(sampling: Sampling, rows: int, length: int) -> DraftContext:
    return DraftContext(sampling, rows, length, VOCABULARY, torch.device("cpu"))


def _traced(
    cls: type[Drafter], config: Any, texts: Sequence[Response], depth: int, sampling: Sampling
) -> list[DraftScores]:
    """The scores by ``propose`` at every token."""
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    context = _context(sampling, len(texts), longest + depth + 1)
    with plugins.guarded("drafters", cls.name, "propose()"):
        return trace_drafters([TracedDrafter(cls(config, context), depth)], context, texts)[0]
