"""Teacher-forced scoring of drafters on recorded responses: see `DraftScores`.

Any chain drafter can be scored through its public contract, third-party ones too: `trace_drafters` passes a random
source that draws the recorded tokens. This takes one draft of G tokens at each token, batched over responses, and one
target pass over each token. Heads need it, because their distribution depends on where the step started.

If a token's distribution depends only on the tokens before it (`Drafter.text_distribution`), one pass of the draft
model over the text suffices. The target is then needed only for log P, unless it was recorded, and for the sums that
verifiers of several i.i.d. sequences need.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from crossdraft.framework.api.build import Configured, TargetContext, make_slots
from crossdraft.framework.contracts.draft_kind import INDEPENDENT_SEQUENCES
from crossdraft.framework.contracts.drafter import DraftContext, Drafter, DraftTraits, TextDistribution
from crossdraft.framework.contracts.lm import LM
from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.contracts.options import fault
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError, NumericalError, UsageError
from crossdraft.framework.lm.recomputing_lm import scoring_slots
from crossdraft.framework.util.tensors import on_device

from ..response import Response
from .draft_scores import (
    DraftScores,
    TracedDrafter,
    context_length_of,
    mask_past_end,
    max_draft_len,
    not_replayable,
    shifted_windows,
    trace_drafters,
)
from .iid_chains import ChainSums, sums

DEPTH = 16  # default draft depth
ROWS, BYTES = 32, 512 * 2**20  # maximum batch size, and bytes of the distributions of a step or chunk
MAX_CHUNK = 64  # maximum tokens per chunk
WINDOW = 8  # batches that are sorted by length together

#: ``make(rows, longest, slack)``: a context over ``rows`` new slots of the target, each with capacity for the longest
#: sequence and ``slack`` more tokens.
MakeContext = Callable[[int, int, int], DraftContext]


def context_factory(loaded: LoadedModel, sampling: Sampling, **more: Any) -> MakeContext:
    """Return a `MakeContext` of a loaded target; ``more`` is passed to `TargetContext.of`."""

    def make(rows: int, longest: int, slack: int) -> DraftContext:
        slot = longest + slack
        lm = scoring_slots(loaded, rows, slot, make_slots)
        return TargetContext.of(loaded, lm, sampling, slot=slot, sequence=longest, **more)

    return make


@dataclass(frozen=True)
class ScoringRequest:
    """A drafter to score."""

    drafter: Configured  # class and config. Its ``gamma``, if any, is set to ``depth``: shorter drafts are prefixes
    depth: int = DEPTH  # G, the maximum draft length
    sequences: int = 0  # largest K for which `DraftScores.sums` are computed; 0 = no sums
    tops: bool = False  # compute `DraftScores.log_top`; for point masses, only of drafters with a `TextDistribution`


def score_drafters(
    requests: Sequence[ScoringRequest],
    texts: Sequence[Response],
    make: MakeContext,
    *,
    without: MakeContext | None = None,
    rows: int = ROWS,
) -> Iterator[list[DraftScores]]:
    """Yield for each of ``texts``, in order, the scores of all drafters.

    The target processes each text at most once: for log P, for `DraftScores.sums`, and for drafters that read its
    hidden states. ``without``: as ``make`` without the target, used if log P is recorded (or 0), sums are not
    requested, and all drafters have a `TextDistribution`. ``rows`` is reduced if the distributions exceed `BYTES`.

    Raises UsageError if a drafter cannot be replayed, or a response is not valid for this target; ModelError for a
    model that cannot be loaded; NumericalError for NaN.
    """
    # An online-learning drafter depends on the order of texts, so it is scored by itself.
    online = [i for i, request in enumerate(requests) if _learns(request)]
    parts = [[i for i in range(len(requests)) if i not in online], *([i] for i in online)]
    parts = [part for part in parts if part]
    scorers = [_Scorer([requests[i] for i in part], texts, make, without, rows) for part in parts]
    order = [i for part in parts for i in part]
    for batch in zip(*(scorer.each(scorer.score) for scorer in scorers), strict=True):
        by_index = dict(zip(order, chain(*batch), strict=True))
        yield [by_index[i] for i in range(len(requests))]


def _learns(request: ScoringRequest) -> bool:
    """True if its drafts may depend on earlier sequences."""
    return request.drafter[0].remembers(request.drafter[1])


def sample_drafts(
    drafter: Configured,
    texts: Sequence[Response],
    make: MakeContext,
    *,
    depth: int = DEPTH,
    seed: int = 0,
    without: MakeContext | None = None,
    rows: int = ROWS,
) -> Iterator[DraftScores]:
    """Sample drafts of ``drafter`` at each token of each text: draft lengths, and log Q of the drafted tokens.

    Needed for the number of drafted tokens if the draft length depends on them. Given the tokens before t, the event
    that a step starts at t is independent of the draft there, so the sum over t of Pr(a step starts at t) times
    `DraftScores.lengths` is an unbiased estimate of the tokens drafted in a run.

    Args and errors as of `score_drafters`; log P is not computed. ``seed``: of the sampling.
    """
    scorer = _Scorer([ScoringRequest(drafter, depth, tops=True)], texts, make, without, rows, needs_log_p=False)
    rng = CounterRng(seed)

    def sample(batch: Sequence[Response], indices: Sequence[int]) -> list[DraftScores]:
        return trace_drafters(scorer.traced_drafters(), scorer.context, batch, rng, indices)[0]

    yield from scorer.each(sample)


class _Scorer:
    """Drafters constructed for some texts, over one set of target slots."""

    def __init__(
        self,
        requests: Sequence[ScoringRequest],
        texts: Sequence[Response],
        make: MakeContext,
        without: MakeContext | None,
        rows: int,
        needs_log_p: bool = True,
    ):
        depth = max(request.depth for request in requests)
        if min(request.depth for request in requests) < 1 or rows < 1:
            raise UsageError(f"a replay needs depth and rows of at least 1, not {depth} and {rows}")
        self.requests, self.texts = requests, texts
        configs = [with_gamma(*request.drafter, request.depth) for request in requests]
        longest = max((len(text.prompt) + len(text.tokens) for text in texts), default=1)
        target_free = without is not None and not any(request.sequences for request in requests)
        metadata = without(1, longest, 1) if without is not None and target_free else make(1, longest, 1)
        self.sampling = metadata.sampling
        log_p_known = not needs_log_p or not self.sampling.temperature or all(text.log_p is not None for text in texts)
        self.traits = [
            _checked_traits(request.drafter[0], config, self.sampling)
            for request, config in zip(requests, configs, strict=True)
        ]
        check(texts, metadata.vocab_size, context_length_of(metadata))
        online = _learns(requests[0])
        rows = 1 if online else min(rows, max(len(texts), 1), max(1, BYTES // (12 * depth * metadata.vocab_size)))
        self.chunk = max(1, min(MAX_CHUNK, BYTES // (24 * rows * metadata.vocab_size)))
        self._window = rows if online else WINDOW * rows
        slack = 1 + max(self.chunk, *(traits.nodes for traits in self.traits))
        self.drafters: list[Drafter] = []
        self.text_distributions: list[TextDistribution | None] = []
        target_free = target_free and log_p_known and not any(traits.hidden_layers for traits in self.traits)
        if target_free and without is not None:
            with suppress(ModelError):  # a drafter may require the loaded target
                self._construct(configs, without(rows, longest, slack))
        if not self.text_distributions or (self.context.target is None and None in self.text_distributions):
            self._construct(configs, make(rows, longest, slack))
        for request, distribution, traits in zip(requests, self.text_distributions, self.traits, strict=True):
            name = request.drafter[0].name
            merged = request.sequences or (traits.kind is not None and traits.kind.merged_sequences)
            if distribution is None and merged:
                raise not_replayable(name, "the distribution of its sequences depends on where a step starts")
            sampled = distribution and distribution.sampling.temperature and self.sampling.temperature
            if request.sequences and not sampled:
                raise UsageError(
                    f"drafter '{name}' drafts one chain at temperature 0, not {request.sequences} sequences; use K = 1"
                )

    def _construct(self, configs: Sequence[Any], context: DraftContext) -> None:
        self.context = context
        self.drafters = [
            request.drafter[0](config, context) for request, config in zip(self.requests, configs, strict=True)
        ]
        self.text_distributions = [drafter.text_distribution() for drafter in self.drafters]

    def traced_drafters(self) -> list[TracedDrafter]:
        pairs = zip(self.drafters, self.requests, strict=True)
        return [TracedDrafter(drafter, request.depth, request.tops) for drafter, request in pairs]

    def each(self, score_batch: Callable[[list[Response], list[int]], list[Any]]) -> Iterator[Any]:
        """Yield ``score_batch(texts, indices)`` of every text, in order, in batches sorted by length."""
        for start in range(0, len(self.texts), self._window):
            window = range(start, min(start + self._window, len(self.texts)))
            order = sorted(window, key=lambda index: len(self.texts[index].tokens))
            results: dict[int, Any] = {}
            for first in range(0, len(order), self.context.batch_size):
                indices = order[first : first + self.context.batch_size]
                results.update(zip(indices, score_batch([self.texts[i] for i in indices], indices), strict=True))
            yield from (results[index] for index in window)

    def score(self, batch: list[Response], indices: Sequence[int]) -> list[list[DraftScores]]:
        """Scores of all drafters for each text."""
        scores_of: dict[int, list[DraftScores]] = {}
        traced = [i for i, distribution in enumerate(self.text_distributions) if distribution is None]
        log_p = [self.recorded_log_p(text) for text in batch]
        if traced:
            drafters = self.traced_drafters()
            traces = trace_drafters([drafters[i] for i in traced], self.context, batch)
            computed = [trace.log_p for trace in traces[0]]
            compares = self.context.target is not None and self.sampling.temperature
            own = [c if compares and p is not None else None for c, p in zip(computed, log_p, strict=True)]
            log_p = [c if p is None else p for c, p in zip(computed, log_p, strict=True)]
            for i, of_drafter in zip(traced, traces, strict=True):
                rows = zip(of_drafter, log_p, own, strict=True)
                scores_of[i] = [replace(trace, log_p=p, own_log_p=own_p) for trace, p, own_p in rows]
        scorers = {
            i: _TextScores(self.requests[i], distribution, self.traits[i].depth, batch, self.chunk)
            for i, distribution in enumerate(self.text_distributions)
            if distribution is not None
        }
        if scorers:
            sequences = any(self.requests[i].sequences for i in scorers)
            run_target = self.sampling.temperature > 0 and (sequences or any(p is None for p in log_p))
            text_scores = score_texts([*scorers.values()], self.context, self.chunk, batch, log_p, run_target)
            scores_of |= dict(zip(scorers, text_scores, strict=True))
        return [list(scores) for scores in zip(*(scores_of[i] for i in range(len(self.requests))), strict=True)]

    def recorded_log_p(self, text: Response) -> np.ndarray | None:
        """Recorded log P, or None; always 0 at temperature 0."""
        if not self.sampling.temperature:
            return np.zeros(len(text.tokens))
        if text.log_p is None:
            return None
        log_p = np.asarray(text.log_p, dtype=np.float64)
        if log_p.shape != (len(text.tokens),):
            raise UsageError(f"{text.place}: log P has shape {list(log_p.shape)}, expected [{len(text.tokens)}]")
        return log_p


def _checked_traits(cls: type[Drafter], config: Any, sampling: Sampling) -> DraftTraits:
    """Traits of the drafter. Raises UsageError if it cannot be replayed."""
    traits = cls.traits(config, sampling)
    if traits.adapts:
        raise not_replayable(cls.name, "it adapts to the outcome of earlier steps")
    if not traits.nested:
        raise not_replayable(cls.name, "its shorter drafts are not prefixes of longer ones")
    if traits.kind is not None and INDEPENDENT_SEQUENCES not in traits.kind.capabilities:
        raise not_replayable(cls.name, f"it drafts trees ('{traits.kind}')")
    if traits.temperature_zero_only and sampling.temperature:
        raise UsageError(f"drafter '{cls.name}' requires temperature 0, not {sampling.temperature:g}")
    return traits


def with_gamma(cls: type[Drafter], config: Any, depth: int) -> Any:
    """Return the config with ``gamma`` set to ``depth``, or to None (unlimited) if that is its default."""
    field = cls.Config.model_fields.get("gamma")
    if field is None:
        return config
    gamma = None if field.default is None else depth
    try:
        return cls.Config(**{**config.model_dump(exclude_unset=True), "gamma": gamma})
    except ValidationError as error:
        raise UsageError(f"drafter '{cls.name}' cannot draft {depth} tokens: {fault(error.errors()[0])}") from None


def check(texts: Sequence[Response], vocab_size: int, context_length: int | None) -> None:
    """Raise UsageError for a response that is too long or out of vocabulary for the target."""
    for text in texts:
        ids = [*text.prompt, *text.tokens]
        if not len(text.prompt):
            raise UsageError(f"{text.place}: the prompt is empty; it must have at least one token")
        if context_length is not None and len(ids) > context_length:
            raise UsageError(
                f"{text.place}: prompt and response have {len(ids)} tokens, but the target's context length is "
                f"{context_length}; remove this response"
            )
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            invalid = min(ids) if min(ids) < 0 else max(ids)
            raise UsageError(
                f"{text.place}: token {invalid} is outside of the target's vocabulary of {vocab_size}; set --target to "
                "the model that generated the response"
            )


def prefill_chunks(lm: LM, texts: Sequence[Response], width: int) -> Generator[Tensor]:
    """Yield logits ``[B, w, V]`` of at most B responses in chunks of ``width`` tokens; the last may be narrower.

    Row b of chunk i predicts tokens i * width, i * width + 1, .. of response b; values past its end, and in rows
    without a response, are undefined. Use it under `torch.inference_mode`.
    """
    rows = lm.batch_size
    longest = max((len(text.tokens) for text in texts), default=0)
    lm.hidden_layers = ()
    active = [row for row, text in enumerate(texts) if len(text.tokens)]
    for row in active:
        lm.start(row, list(texts[row].prompt))
    # Inputs are shifted by one token: the prompt's last comes first.
    inputs = [[int(text.prompt[-1]), *map(int, text.tokens[:-1])][: len(text.tokens)] for text in texts]
    padded = [tokens + [0] * (longest - len(tokens)) for tokens in inputs] + [[0] * longest] * (rows - len(inputs))
    tokens = on_device(padded, lm.device)
    try:
        for start in range(0, longest, width):
            logits, _ = lm.forward(tokens[:, start : start + width])
            lm.commit(
                [
                    *(min(max(len(row_inputs) - start, 0), logits.shape[1]) for row_inputs in inputs),
                    *[0] * (rows - len(inputs)),
                ]
            )
            yield logits
            for row in [row for row in active if len(inputs[row]) <= start + width]:
                active.remove(row)
                lm.free(row)
    finally:
        if active:
            lm.commit([0] * rows)
            for row in active:
                lm.free(row)


class _TextScores:
    """Scores of one drafter along a group of texts, computed chunk by chunk.

    ``maximum``: longest draft of the drafter; ``chunk``: tokens per chunk.
    """

    def __init__(
        self,
        request: ScoringRequest,
        distribution: TextDistribution,
        maximum: int,
        batch: Sequence[Response],
        chunk: int,
    ):
        self._depth, self._sequences, self._tops = request.depth, request.sequences, request.tops
        self.name, self._distribution, self._maximum = request.drafter[0].name, distribution, maximum
        self._batch, self._chunk, self._logits = batch, chunk, prefill_chunks(distribution.lm, batch, chunk)
        self.log_q: list[Tensor] = []
        self._log_top: list[Tensor] = []
        self._stops: list[Tensor] = []
        self._parts: list[list[ChainSums]] = [[] for _ in batch]

    def next(self, i: int, y: Tensor, p: Tensor | None) -> None:
        """Process chunk i with tokens ``y [B, w]`` and target probabilities ``p [B, w, V]``."""
        logits, distribution = next(self._logits)[: len(self._batch)], self._distribution
        q = distribution.sampling.probs(logits)
        self.log_q.append(_log_at(q, y))
        model_q = q if distribution.sampling.temperature else logits.float().softmax(-1)
        if self._tops:
            self._log_top.append(model_q.amax(-1).double().log())
        if distribution.should_continue is not None:
            flat = (logits.flatten(0, 1), model_q.flatten(0, 1), y.flatten())
            self._stops.append(~distribution.should_continue(*flat).view_as(y))
        if p is not None and self._sequences:
            for row, text in enumerate(self._batch):
                n = min(len(text.tokens) - i * self._chunk, self._chunk)
                if n > 0:
                    self._parts[row].append(sums(p[row, :n], q[row, :n], y[row, :n], self._sequences))

    def scores(self, row: int, log_q: np.ndarray, log_p: np.ndarray, context_length: int | None) -> DraftScores:
        """`DraftScores` of a text from the ``log_q [T]`` of its tokens."""
        depth, n, start = self._depth, len(log_q), len(self._batch[row].prompt)
        maximum = min(depth, self._maximum)
        lengths = np.array([max_draft_len(maximum, start + t, context_length) for t in range(n)], dtype=np.int64)
        if self._stops:
            stops = torch.cat(self._stops, 1)[row, :n].cpu().numpy()
            lengths = np.minimum(lengths, _tokens_until(stops, self._distribution.keeps_last))
        windows = shifted_windows(log_q, depth, -np.inf)
        windows = np.where(np.arange(depth) < lengths[:, None], windows, -np.inf)
        joined = ChainSums.joined(self._parts[row]) if self._parts[row] else None
        best = shifted_windows(_join(self._log_top, row, n), depth, -np.inf) if self._tops else None
        return DraftScores(mask_past_end(windows), lengths, log_p, joined, best)

    def close(self) -> None:
        self._logits.close()


@torch.inference_mode()
def score_texts(
    scorers: Sequence[_TextScores],
    context: DraftContext,
    chunk: int,
    batch: Sequence[Response],
    log_p: Sequence[np.ndarray | None],
    run_target: bool,
) -> list[list[DraftScores]]:
    """Scores of each drafter for each of at most B texts, in one pass of the target.

    ``log_p``: recorded log P of each text or None; ``run_target``: one of them is None, or sums are requested.
    """
    lengths = [len(text.tokens) for text in batch]
    longest = max(lengths, default=0)
    x = on_device([[*text.tokens, *[0] * (longest - len(text.tokens))] for text in batch], context.device)
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
    results: list[list[DraftScores]] = [[] for _ in scorers]
    for row_scores, scorer in zip(results, scorers, strict=True):
        for row, (text, n, recorded) in enumerate(zip(batch, lengths, log_p, strict=True)):
            log_q, computed = _join(scorer.log_q, row, n), _join(target_log_p, row, n) if run_target else None
            for label, values in ((f"drafter '{scorer.name}'", log_q), ("the target", computed)):
                if values is not None and np.isnan(values).any():
                    at = int(np.argmax(np.isnan(values)))
                    raise NumericalError(f"{label} produced NaN at token {at} of {text.place}; try dtype float32")
            known = computed if recorded is None else recorded
            assert known is not None
            scores = scorer.scores(row, log_q, known, context_length_of(context))
            own = recorded is not None and computed is not None
            row_scores.append(replace(scores, own_log_p=computed) if own else scores)
    return results


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
