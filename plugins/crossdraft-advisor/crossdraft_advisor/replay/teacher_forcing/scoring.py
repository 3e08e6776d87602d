"""Teacher-forced scoring of drafters on recorded responses: see `DraftScores`.

Any chain drafter can be scored through its public contract, third-party ones too: `trace_drafters` passes a random
source that draws the recorded tokens. This takes one draft of G tokens at each token, batched over responses, and one
target pass over each token. Heads need it, because their distribution depends on where the step started.

If a token's distribution depends only on the tokens before it (`Drafter.text_distribution`), one pass of the draft
model over the text suffices. The target is then needed only for log P, unless it was recorded, and for the sums that
verifiers of several i.i.d. sequences need.

If a drafter is traced, each row of the batch is a response. In step t the drafter proposes, the target reads the last
committed token, and x[t] is committed as if the step had accepted nothing: `Drafter.observe` receives a draft without
nodes. The drafter gets the same inputs as in decoding (target features, forks, a growing text), keys and values of each
token are computed once, and the cache holds one sequence per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from crossdraft import (
    INDEPENDENT_SEQUENCES,
    LM,
    CounterRng,
    DenseScores,
    Draft,
    DraftContext,
    Drafter,
    DraftTraits,
    LoadedModel,
    ModelError,
    NumericalError,
    Sampling,
    Sequences,
    StepRng,
    TextDistribution,
    UsageError,
    Verdict,
    on_device,
    take_rows,
)
from crossdraft.commands import fault
from crossdraft.framework.contracts.rng import RngSource
from crossdraft.framework.engine.checks import check_draft, check_unchanged, snapshot
from crossdraft.framework.engine.validation import validate_draft
from crossdraft.models import Configured, TargetContext, make_slots, scoring_slots

from ..response import Response, check_text
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
class DraftScores:
    """Scores of a drafter on a response of T tokens x, for a step of G drafted tokens that starts at each token.

    A step that starts at t has committed x[:t]; token j (from 0) of its draft is at the position of x[t + j]. Entries
    with t + j >= T are undefined.
    """

    # float64 [T, G], log Q(x[t + j] | prompt, x[:t + j]) of a step that started at t and drafted x up to there; for
    # point masses 0 if the drafted token is x[t + j] and -inf otherwise
    log_q: np.ndarray
    # int64 [T], drafted tokens of a step at t if they equal x: at most G, fewer if the drafter proposes fewer or its
    # length policy stops. Those of `trace_drafters` include tokens past the end of the response.
    lengths: np.ndarray
    log_p: np.ndarray  # float64 [T], log P(x[t] | prompt, x[:t]) of the target as sampled; 0 at temperature 0
    # `iid_chains.sums` for verifiers of several i.i.d. sequences; None if they were not requested.
    sums: ChainSums | None = None
    # float64 [T, G], the largest log-probability of the distribution of each drafted token (at temperature 0, of the
    # model's softmax), for confidence policies (`step_chain`). None if it was not requested.
    log_top: np.ndarray | None = None
    # float64 [T], log P computed by the target if ``log_p`` is the recorded one and the target was run
    own_log_p: np.ndarray | None = None


def shifted_windows(values: np.ndarray, depth: int, beyond: float = 0.0) -> np.ndarray:
    """``[T, depth]`` with ``values[t + j]`` at (t, j), padded with ``beyond``."""
    padded = np.concatenate([values, np.full(depth, beyond)])
    return np.lib.stride_tricks.sliding_window_view(padded, depth)[: len(values)]


class TeacherForcingRng:
    """Random source that draws the tokens of the recorded responses.

    A response token with Q = 0 is replaced by the most probable one, because drafters may rely on Q > 0 for the drawn
    token; later tokens of that draft are ignored.
    """

    def __init__(self, drafter: str):
        self._drafter = drafter
        self.text: Tensor | None = None

    def for_step(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> TeacherForcingStepRng:
        assert self.text is not None
        return TeacherForcingStepRng(self.text, self._drafter)


class TeacherForcingStepRng:
    """Random numbers of one step, which draw ``text [B, G]``. ``probs[i]``: the probability ``[B]`` of token i."""

    def __init__(self, text: Tensor, drafter: str):
        self._text, self._drafter = text, drafter
        self.probs: dict[int, Tensor] = {}

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        if purpose != "draft":
            raise self._unsupported(f"draws random numbers for the purpose '{purpose}'")
        best = weights.argmax(-1)
        if not 0 <= index < self._text.shape[1]:
            return best
        token = self._text[:, index]
        weight = weights.gather(1, token[:, None])[:, 0]
        self.probs[index] = weight / weights.sum(1)
        return torch.where(weight > 0, token, best)

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        raise self._unsupported("makes random accept decisions")

    def _unsupported(self, reason: str) -> UsageError:
        return not_replayable(self._drafter, f"it {reason} while drafting")


def not_replayable(drafter: str, reason: str) -> UsageError:
    """Error for a drafter whose drafts do not follow from the text and the draws of its tokens."""
    return UsageError(f"drafter '{drafter}' cannot be replayed: {reason}; measure it with crossdraft run")


class TracedDrafter(NamedTuple):
    """A drafter to trace, at most ``depth`` tokens deep; ``tops``: compute `DraftScores.log_top`."""

    drafter: Drafter
    depth: int
    tops: bool = False


@torch.inference_mode()
def trace_drafters(
    drafters: Sequence[TracedDrafter],
    context: DraftContext,
    texts: Sequence[Response],
    rng: RngSource | None = None,
    streams: Sequence[int] | None = None,
) -> list[list[DraftScores]]:
    """Trace drafters along at most B responses, with a step at every token; one target pass serves all drafters.

    Without a target in ``context``, log P is 0 and drafters observe empty scores: for those whose distribution follows
    from the text. With another ``rng`` than one that draws the responses, log Q is that of the drafted tokens;
    ``streams``: random stream of each response. Raises UsageError if a drafter cannot be replayed, ContractError and
    NumericalError as `Decoder`.
    """
    target, b, device = context.target, context.batch_size, context.device
    assert len(texts) <= b
    longest = max((len(text.tokens) for text in texts), default=0)
    pad = [0] * (longest + max(traced.depth for traced in drafters))
    seqs = Sequences(
        history=[[] for _ in range(b)],
        tokens=torch.zeros(b, context.max_length, dtype=torch.long, device=device),
        limit=[0] * b,
        stream=[*(streams or range(len(texts))), *[0] * (b - len(texts))],
    )
    padded = [[*text.tokens, *pad[len(text.tokens) :]] for text in texts]
    x = on_device(padded + [pad] * (b - len(texts)), device)
    traits = [traced.drafter.traits(traced.drafter.config, context.sampling) for traced in drafters]
    layers = tuple(dict.fromkeys(layer for each in traits for layer in each.hidden_layers))
    tracers = [_Tracer(*pair, context, x, longest, rng, layers) for pair in zip(drafters, traits, strict=True)]
    if target is not None:
        target.hidden_layers = layers
    log_p = torch.zeros(longest, b, dtype=torch.float64, device=device)
    no_scores = DenseScores(torch.zeros(b, 1, 0, device=device), torch.zeros(b, 1, 0, device=device))

    def free(row: int, reason: str | None = None) -> None:
        seqs.history[row], seqs.limit[row] = [], 0
        if target is not None:
            target.free(row)
        for tracer in tracers:
            tracer.drafter.free(row, reason)

    try:
        for row, prompt in ((row, list(text.prompt)) for row, text in enumerate(texts) if len(text.tokens)):
            hidden = None if target is None else target.start(row, prompt)
            seqs.append(row, prompt)
            for tracer in tracers:
                tracer.drafter.start(row, list(prompt), tracer.own(hidden))
        for t in range(longest):
            drafts = [tracer.propose(t, seqs, texts) for tracer in tracers]
            scores = no_scores if target is None else _next_scores(target, context.sampling, seqs)
            if target is not None:
                log_p[t] = scores.p[:, 0].gather(1, x[:, t : t + 1])[:, 0].double().log()
            for row, text in enumerate(texts):
                if t < len(text.tokens):
                    seqs.append(row, [int(text.tokens[t])])
            for tracer, draft in zip(tracers, drafts, strict=True):
                own = replace(scores, hidden=tracer.own(scores.hidden))
                tracer.drafter.observe(
                    seqs, draft.trimmed(0), Verdict(torch.zeros_like(x[:, t]), x[:, t]), [0] * b, own
                )
            for row, text in enumerate(texts):
                if t == len(text.tokens) - 1:
                    free(row, "length")
    finally:  # free the slots after an error
        left = [row for row, history in enumerate(seqs.history) if history]
        if left and target is not None:
            target.commit([0] * b)
        for row in left:
            free(row)
    return [tracer.buffers.traces(texts, log_p, tracer.drafter.name, context.sampling) for tracer in tracers]


def _next_scores(target: LM, sampling: Sampling, seqs: Sequences) -> DenseScores:
    """Scores of the target at the last token of each row, which it commits."""
    last = on_device([[history[-1] if history else 0] for history in seqs.history], seqs.device)
    logits, hidden = target.forward(last)
    p, _ = sampling.checked_probs(logits)
    target.commit([int(bool(history)) for history in seqs.history])
    return DenseScores(p, logits, hidden)


class _Tracer:
    """State of one traced drafter."""

    def __init__(
        self,
        traced: TracedDrafter,
        traits: DraftTraits,
        context: DraftContext,
        x: Tensor,
        steps: int,
        rng: RngSource | None,
        layers: Sequence[float],
    ):
        self.drafter, self._depth, self._traits = traced.drafter, traced.depth, traits
        self._context, self._x, self._label = context, x, f"drafter '{traced.drafter.name}'"
        self.buffers = _TraceBuffers(x, steps, traced.depth, rng is None, traced.tops and not self._traits.point_mass)
        self._forcing = TeacherForcingRng(traced.drafter.name) if rng is None else None
        self._source: RngSource = self._forcing or rng  # type: ignore[assignment]
        own_layers = self._traits.hidden_layers
        self._layers = None if tuple(own_layers) == tuple(layers) else [layers.index(layer) for layer in own_layers]

    def own(self, hidden: Tensor | None) -> Tensor | None:
        """Select the layers requested by this drafter from hidden states ``[.., L, H]``."""
        if hidden is None or self._layers is None:
            return hidden
        return hidden[..., self._layers, :] if self._layers else None

    def propose(self, t: int, seqs: Sequences, texts: Sequence[Response]) -> Draft:
        context_length, name = context_length_of(self._context), self.drafter.name
        for row, text in enumerate(texts):
            if t < len(text.tokens):  # not limited by the end of the response
                seqs.limit[row] = max_draft_len(self._depth, len(seqs.history[row]), context_length)
        if self._forcing is not None:
            self._forcing.text = self._x[:, t : t + self._depth]
        choices = self._source.for_step(seqs.stream, [len(history) for history in seqs.history], seqs.device)
        before = snapshot(seqs, False)
        draft = self.drafter.propose(seqs, choices)
        check_unchanged(seqs, before, self._label, False)
        check = validate_draft if t == 0 else check_draft
        check(draft, self._traits, seqs, self._context.vocab_size, drafter=self._label)
        if not draft.is_chain:
            raise not_replayable(name, "its drafts are not plain chains")
        self.buffers.add(t, draft, choices)
        return draft


def context_length_of(context: DraftContext) -> int | None:
    """Context length of the target, from its metadata if the target is not loaded."""
    if context.target is not None:
        return context.target.context_length
    return context.loaded.context_length if isinstance(context, TargetContext) else None


def max_draft_len(depth: int, length: int, context_length: int | None) -> int:
    """Maximum draft length, at most ``depth``, after ``length`` tokens of the target's context."""
    return depth if context_length is None else max(0, min(depth, context_length - length - 1))


class _TraceBuffers:
    """Results of all steps, kept on the device until the end to avoid host synchronisation."""

    def __init__(self, x: Tensor, steps: int, depth: int, follow: bool, tops: bool):
        b, like = len(x), {"dtype": torch.float64, "device": x.device}
        self._x, self._depth, self._follow = x, depth, follow
        self._log_top = torch.full((steps, b, depth), -math.inf, **like) if tops else None
        self._log_q = torch.full((steps, b, depth), -math.inf, **like)
        self._count = torch.zeros(steps, b, dtype=torch.long, device=x.device)
        self._finite = torch.ones(steps, b, dtype=torch.bool, device=x.device)
        self._follows_text = torch.ones(steps, b, dtype=torch.bool, device=x.device)

    def add(self, t: int, draft: Draft, choices: StepRng) -> None:
        n = min(draft.width, self._depth)
        if not n:
            return
        tokens, valid = draft.tokens[:, :n], draft.valid[:, :n]
        x = self._x[:, t : t + n] if self._follow else tokens
        same = tokens == x
        self._count[t] = draft.count.clamp(max=self._depth)
        if draft.finite is not None:
            self._finite[t] = draft.finite
        if draft.q is None:
            q = torch.ones_like(x, dtype=torch.float64)
            for i, probs in getattr(choices, "probs", {}).items():
                if i < n:  # a drawn point mass must have probability 0 or 1
                    self._follows_text[t] &= ~valid[:, i] | (probs < 1e-6) | (probs > 1 - 1e-6)
        else:
            probs = draft.q[:, :n] if draft.q_index is None else take_rows(draft.q, draft.q_index[:, :n])
            q = probs.gather(2, x[..., None])[..., 0]
            if self._log_top is not None:
                self._log_top[t, :, :n] = torch.where(valid, probs.amax(-1).double().log(), -math.inf)
            self._finite[t] &= (q.isfinite() | ~valid).all(1)
            prefix_same = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1).cumprod(1).bool()
            self._follows_text[t] &= ~(prefix_same & valid & ~same & (q > 0)).any(1)
        self._log_q[t, :, :n] = torch.where(valid & same, q.double().log(), -math.inf)

    def traces(
        self, texts: Sequence[Response], target_log_p: Tensor, name: str, sampling: Sampling
    ) -> list[DraftScores]:
        log_top = None if self._log_top is None else self._log_top.cpu().numpy()
        log_q, log_p = self._log_q.cpu().numpy(), target_log_p.cpu().numpy()
        counts, finite, follows_text = (
            values.cpu().numpy() for values in (self._count, self._finite, self._follows_text)
        )
        result = []
        for row, text in enumerate(texts):
            n = len(text.tokens)
            if not finite[:n, row].all():
                position = int(np.argmin(finite[:n, row]))
                raise NumericalError(
                    f"drafter '{name}' produced NaN or infinite numbers at token {position} of {text.place}; try dtype "
                    "float32, another attention implementation, or check the weights"
                )
            if self._follow and not follows_text[:n, row].all():
                raise not_replayable(name, "its tokens differ from the draws of its random source")
            if sampling.temperature and np.isnan(log_p[:n, row]).any():
                position = int(np.argmax(np.isnan(log_p[:n, row])))
                raise NumericalError(f"the target produced NaN at token {position} of {text.place}; try dtype float32")
            row_log_p = log_p[:n, row] if sampling.temperature else np.zeros(n)
            row_log_q = mask_past_end(log_q[:n, row]) if self._follow else log_q[:n, row]
            result.append(
                DraftScores(
                    row_log_q, counts[:n, row], row_log_p, log_top=log_top[:n, row] if log_top is not None else None
                )
            )
        return result


def mask_past_end(log_q: np.ndarray) -> np.ndarray:
    """``log_q [T, G]`` with -inf past the end of the response, and after the first -inf of each row."""
    t, depth = log_q.shape
    inside = np.arange(t)[:, None] + np.arange(depth) < t
    alive = np.logical_and.accumulate(inside & ~np.isneginf(log_q), axis=1)
    return np.where(alive, log_q, -np.inf)


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
        context_length = context_length_of(metadata)
        for text in texts:
            check_text(text.place, text.prompt, text.tokens, metadata.vocab_size, context_length)
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
            t = np.arange(n)  # tokens from each position to the next stop
            at = np.where(stops, t + self._distribution.keeps_last, n + 2**20)
            lengths = np.minimum(lengths, np.minimum.accumulate(at[::-1])[::-1] - t)
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
