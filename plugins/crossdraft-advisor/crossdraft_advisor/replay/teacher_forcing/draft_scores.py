"""Teacher-forced scores of a drafter on recorded responses, from its drafts at every token, by its public contract.

Each row of the batch is a response. In step t the drafter proposes, the target reads the last committed token, and x[t]
is committed as if the step had accepted nothing: `Drafter.observe` receives a draft without nodes. The drafter gets
the same inputs as in decoding (target features, forks, a growing text), keys and values of each token are computed
once, and the cache holds one sequence per row. `TeacherForcingRng` makes the drafter propose the response's own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from crossdraft.framework.api.build import TargetContext
from crossdraft.framework.contracts.draft import DenseScores, Draft, Sequences, Verdict
from crossdraft.framework.contracts.drafter import DraftContext, Drafter, DraftTraits
from crossdraft.framework.contracts.rng import RngSource, StepRng
from crossdraft.framework.engine.checks import check_draft, check_unchanged, snapshot
from crossdraft.framework.engine.validation import validate_draft
from crossdraft.framework.errors import NumericalError, UsageError
from crossdraft.framework.util.tensors import on_device, take_rows

from ..response import Response
from .iid_chains import ChainSums


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
    depth = max(traced.depth for traced in drafters)
    seqs = Sequences(
        history=[[] for _ in range(b)],
        tokens=torch.zeros(b, context.max_length, dtype=torch.long, device=device),
        limit=[0] * b,
        stream=[*(streams or range(len(texts))), *[0] * (b - len(texts))],
    )
    padded = [[*text.tokens, *[0] * (longest + depth - len(text.tokens))] for text in texts]
    x = on_device(padded + [[0] * (longest + depth)] * (b - len(texts)), device)
    traits = [traced.drafter.traits(traced.drafter.config, context.sampling) for traced in drafters]
    layers = tuple(dict.fromkeys(layer for each in traits for layer in each.hidden_layers))
    tracers = [_Tracer(*pair, context, x, longest, rng, layers) for pair in zip(drafters, traits, strict=True)]
    if target is not None:
        target.hidden_layers = layers
    zeros = torch.zeros(b, dtype=torch.long, device=device)
    log_p = torch.zeros(longest, b, dtype=torch.float64, device=device)
    no_scores = DenseScores(torch.zeros(b, 1, 0, device=device), torch.zeros(b, 1, 0, device=device))
    try:
        for row, text in enumerate(texts):
            if len(text.tokens):
                hidden = None if target is None else target.start(row, list(text.prompt))
                seqs.append(row, list(text.prompt))
                for tracer in tracers:
                    tracer.drafter.start(row, list(text.prompt), tracer.own(hidden))
        for t in range(longest):
            drafts = [tracer.propose(t, seqs, texts) for tracer in tracers]
            scores = no_scores
            if target is not None:
                root = on_device([[history[-1] if history else 0] for history in seqs.history], device)
                logits, hidden = target.forward(root)
                p, _ = context.sampling.checked_probs(logits)
                log_p[t] = p[:, 0].gather(1, x[:, t : t + 1])[:, 0].double().log()
                target.commit([int(bool(history)) for history in seqs.history])
                scores = DenseScores(p, logits, hidden)
            for row, text in enumerate(texts):
                if t < len(text.tokens):
                    seqs.append(row, [int(text.tokens[t])])
            verdict = Verdict(zeros, x[:, t])
            for tracer, draft in zip(tracers, drafts, strict=True):
                own = replace(scores, hidden=tracer.own(scores.hidden))
                tracer.drafter.observe(seqs, draft.trimmed(0), verdict, [0] * b, own)
            for row, text in enumerate(texts):
                if t == len(text.tokens) - 1:
                    _free(seqs, row)
                    if target is not None:
                        target.free(row)
                    for tracer in tracers:
                        tracer.drafter.free(row, "length")
    finally:  # free the slots after an error
        left = [row for row, history in enumerate(seqs.history) if history]
        for row in left:
            _free(seqs, row)
        if left and target is not None:
            target.commit([0] * b)
            for row in left:
                target.free(row)
        for row in left:
            for tracer in tracers:
                tracer.drafter.free(row)
    return [
        tracer.buffers.traces(texts, log_p, tracer.drafter.name, context.sampling.temperature) for tracer in tracers
    ]


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


def _free(seqs: Sequences, row: int) -> None:
    seqs.history[row], seqs.limit[row] = [], 0


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
        self, texts: Sequence[Response], target_log_p: Tensor, name: str, temperature: float
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
            if temperature and np.isnan(log_p[:n, row]).any():
                position = int(np.argmax(np.isnan(log_p[:n, row])))
                raise NumericalError(f"the target produced NaN at token {position} of {text.place}; try dtype float32")
            row_log_p = log_p[:n, row] if temperature else np.zeros(n)
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
