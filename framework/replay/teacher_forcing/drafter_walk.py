"""A drafter walked along recorded responses: a step starts at every token, and nothing that it drafts is accepted.

A row of the batch is a response. In step t the drafter drafts, the target reads the last committed token alone, and
x[t] is committed, as if the step had ended before its first drafted token: `Drafter.observe` sees a draft without
nodes. So all that a drafter may ask for is what it would be given (the target's features, its forks, a text that grows
in order), every token's keys and values are computed once, and memory holds one sequence for each row. What is drafted
on the way comes from a random source: `Forcing` returns the response's own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...api.build import TargetContext
from ...contracts.draft import DenseScores, Draft, Sequences, Verdict, on_device, take_rows
from ...contracts.drafter import DraftContext, Drafter, DraftTraits
from ...contracts.rng import RngSource, StepRng
from ...contracts.sampling import Sampling
from ...engine.structural_checks import MutationGuard, check_draft
from ...engine.validation import validate_draft
from ...errors import NumericalError, UsageError
from ..response import Response


@dataclass(frozen=True)
class Walked:
    """What a drafter drafted along one response of T tokens.

    Attributes:
        log_q: float64 [T, G], see `Forced`; -inf behind a draft's end, the end of the text and a token that the drafter
            would not have drafted.
        lengths: int64 [T], tokens drafted from each on; what is drafted behind the end of the text counts.
        log_p: float64 [T], of the target as it samples.
        log_top: float64 [T, G], see `Forced`; None where it was not asked for, and of point masses.
    """

    log_q: np.ndarray
    lengths: np.ndarray
    log_p: np.ndarray
    log_top: np.ndarray | None = None


class Forcing:
    """A random source whose drafts are the recorded responses, wherever the drafter's law allows them.

    A token that it gives no probability is not forced on it: it gets its most probable one, as it may rely on tokens
    that it could have drawn. No later token of that draft matters.
    """

    def __init__(self, drafter: str):
        self._drafter = drafter
        self.text: Tensor | None = None

    def for_step(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> ForcedStepRng:
        assert self.text is not None
        return ForcedStepRng(self.text, self._drafter)


class ForcedStepRng:
    """The choices of a step that are to be ``text [B, G]``. ``noted[i]``: the probability ``[B]`` of token i."""

    def __init__(self, text: Tensor, drafter: str):
        self._text, self._drafter = text, drafter
        self.noted: dict[int, Tensor] = {}

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        if purpose != "draft":
            raise self._refused(f"draws for the purpose '{purpose}'")
        best = weights.argmax(-1)
        if not 0 <= index < self._text.shape[1]:
            return best
        token = self._text[:, index]
        weight = weights.gather(1, token[:, None])[:, 0]
        self.noted[index] = weight / weights.sum(1)
        return torch.where(weight > 0, token, best)

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        raise self._refused("tosses coins")

    def _refused(self, what: str) -> UsageError:
        return unforced(self._drafter, f"it {what} while it drafts")


def unforced(drafter: str, reason: str) -> UsageError:
    """For drafters whose draft does not follow from the text and the draws of its tokens."""
    return UsageError(f"drafter '{drafter}' cannot be replayed: {reason}; measure it with crossdraft run")


def walk(
    drafter: Drafter,
    context: DraftContext,
    texts: Sequence[Response],
    depth: int,
    rng: RngSource | None = None,
    streams: Sequence[int] | None = None,
    tops: bool = False,
) -> list[Walked]:
    """`walk_together` of one drafter."""
    return walk_together([Walker(drafter, depth, tops)], context, texts, rng, streams)[0]


@dataclass(frozen=True)
class Walker:
    """A drafter to walk, at most ``depth`` tokens deep; ``tops``: tell `Walked.log_top`."""

    drafter: Drafter
    depth: int
    tops: bool = False

    def traits(self, sampling: Sampling) -> DraftTraits:
        """Of the drafter for a target sampled like this."""
        return self.drafter.traits(self.drafter.config, sampling)


@torch.inference_mode()
def walk_together(
    walkers: Sequence[Walker],
    context: DraftContext,
    texts: Sequence[Response],
    rng: RngSource | None = None,
    streams: Sequence[int] | None = None,
) -> list[list[Walked]]:
    """Walk drafters side by side along at most B responses, from every token of each: one pass of the target for all.

    Args:
        context: that all of them were made with. Without a target in it none is asked, log P is 0 and what drafters
            observe says nothing: for drafters whose law follows from the text.
        rng: where the drafters' random numbers come from; by default they make them draft the response. With another
            source, drafts are their own, and so are the tokens whose log Q is told.
        streams: the random stream of each response.

    Raises:
        UsageError: a drafter that cannot be forced.
        ContractError, NumericalError: a draft that breaks the contract, or NaN; see `Decoder`.
    """
    target, b, device = context.target, context.batch_size, context.device
    assert len(texts) <= b
    longest = max((len(text.tokens) for text in texts), default=0)
    depth = max(walker.depth for walker in walkers)
    seqs = Sequences(
        history=[[] for _ in range(b)],
        tokens=torch.zeros(b, context.max_length, dtype=torch.long, device=device),
        limit=[0] * b,
        stream=[*(streams or range(len(texts))), *[0] * (b - len(texts))],
    )
    padded = [[*text.tokens, *[0] * (longest + depth - len(text.tokens))] for text in texts]
    x = on_device(padded + [[0] * (longest + depth)] * (b - len(texts)), device)
    layers = tuple(
        dict.fromkeys(layer for walker in walkers for layer in walker.traits(context.sampling).hidden_layers)
    )
    cursors = [_Steps(walker, context, x, longest, rng, layers) for walker in walkers]
    if target is not None:
        target.hidden_layers = layers
    nothing = torch.zeros(b, dtype=torch.long, device=device)
    said = torch.zeros(longest, b, dtype=torch.float64, device=device)
    silent = DenseScores(torch.zeros(b, 1, 0, device=device), torch.zeros(b, 1, 0, device=device))
    try:
        for row, text in enumerate(texts):
            if len(text.tokens):
                hidden = None if target is None else target.start(row, list(text.prompt))
                seqs.append(row, list(text.prompt))
                for one in cursors:
                    one.drafter.start(row, list(text.prompt), one.own(hidden))
        for t in range(longest):
            drafts = [one.propose(t, seqs, texts) for one in cursors]
            scores = silent
            if target is not None:
                root = on_device([[history[-1] if history else 0] for history in seqs.history], device)
                logits, hidden = target.forward(root)
                p, _ = context.sampling.checked_probs(logits)
                said[t] = p[:, 0].gather(1, x[:, t : t + 1])[:, 0].double().log()
                target.commit([int(bool(history)) for history in seqs.history])
                scores = DenseScores(p, logits, hidden)
            for row, text in enumerate(texts):
                if t < len(text.tokens):
                    seqs.append(row, [int(text.tokens[t])])
            verdict = Verdict(nothing, x[:, t])
            for one, draft in zip(cursors, drafts, strict=True):
                own = replace(scores, hidden=one.own(scores.hidden))
                one.drafter.observe(seqs, draft.trimmed(0), verdict, [0] * b, own)
            for row, text in enumerate(texts):
                if t == len(text.tokens) - 1:
                    _free(seqs, row)
                    if target is not None:
                        target.free(row)
                    for one in cursors:
                        one.drafter.free(row, "length")
    finally:  # an error leaves the slots clean for the next responses
        left = [row for row, history in enumerate(seqs.history) if history]
        for row in left:
            _free(seqs, row)
        if left and target is not None:
            target.commit([0] * b)
            for row in left:
                target.free(row)
        for row in left:
            for one in cursors:
                one.drafter.free(row)
    return [one.cells.walked(texts, said, one.drafter.name, context.sampling.temperature) for one in cursors]


class _Steps:
    """What one drafter does on the way."""

    def __init__(
        self,
        walker: Walker,
        context: DraftContext,
        x: Tensor,
        steps: int,
        rng: RngSource | None,
        layers: Sequence[float],
    ):
        self.drafter, self._depth, self._traits = walker.drafter, walker.depth, walker.traits(context.sampling)
        self._context, self._x, self._who = context, x, f"drafter '{walker.drafter.name}'"
        self.cells = _Cells(x, steps, walker.depth, rng is None, walker.tops and not self._traits.point_mass)
        self._forcing = Forcing(walker.drafter.name) if rng is None else None
        self._source: RngSource = self._forcing or rng  # type: ignore[assignment]
        mine = self._traits.hidden_layers
        self._layers = None if tuple(mine) == tuple(layers) else [layers.index(layer) for layer in mine]

    def own(self, hidden: Tensor | None) -> Tensor | None:
        """Of the hidden states ``[.., L, H]`` those of the layers that this drafter asked for."""
        if hidden is None or self._layers is None:
            return hidden
        return hidden[..., self._layers, :] if self._layers else None

    def propose(self, t: int, seqs: Sequences, texts: Sequence[Response]) -> Draft:
        context_length, name = context_length_of(self._context), self.drafter.name
        for row, text in enumerate(texts):
            if t < len(text.tokens):  # it knows nothing of the end of the text
                seqs.limit[row] = room(self._depth, len(seqs.history[row]), context_length)
        if self._forcing is not None:
            self._forcing.text = self._x[:, t : t + self._depth]
        choices = self._source.for_step(seqs.stream, [len(history) for history in seqs.history], seqs.device)
        watch = MutationGuard(seqs, False)
        draft = self.drafter.propose(seqs, choices)
        watch.check(self._who)
        check = validate_draft if t == 0 else check_draft
        check(draft, self._traits, seqs, self._context.vocab_size, drafter=self._who)
        if not draft.is_chain:
            raise unforced(name, "its drafts are wider than a chain, or have probes")
        self.cells.add(t, draft, choices)
        return draft


def context_length_of(context: DraftContext) -> int | None:
    """Of the target, which may not be there: its context says it, then."""
    if context.target is not None:
        return context.target.context_length
    return context.loaded.context_length if isinstance(context, TargetContext) else None


def room(depth: int, length: int, context_length: int | None) -> int:
    """How deep a draft may be after ``length`` tokens, at most ``depth``: the target's context has to hold it."""
    return depth if context_length is None else max(0, min(depth, context_length - length - 1))


def _free(seqs: Sequences, row: int) -> None:
    seqs.history[row], seqs.limit[row] = [], 0


class _Cells:
    """What steps leave, on the device until all are over: nobody waits for it in between."""

    def __init__(self, x: Tensor, steps: int, depth: int, forced: bool, tops: bool):
        b, like = len(x), {"dtype": torch.float64, "device": x.device}
        self._x, self._depth, self._follows = x, depth, forced
        self._log_top = torch.full((steps, b, depth), -math.inf, **like) if tops else None
        self._log_q = torch.full((steps, b, depth), -math.inf, **like)
        self._count = torch.zeros(steps, b, dtype=torch.long, device=x.device)
        self._fine = torch.ones(steps, b, dtype=torch.bool, device=x.device)
        self._forced = torch.ones(steps, b, dtype=torch.bool, device=x.device)

    def add(self, t: int, draft: Draft, choices: StepRng) -> None:
        n = min(draft.width, self._depth)
        if not n:
            return
        tokens, valid = draft.tokens[:, :n], draft.valid[:, :n]
        x = self._x[:, t : t + n] if self._follows else tokens
        same = tokens == x
        self._count[t] = draft.count.clamp(max=self._depth)
        if draft.finite is not None:
            self._fine[t] = draft.finite
        if draft.q is None:
            q = torch.ones_like(x, dtype=torch.float64)
            for i, noted in getattr(choices, "noted", {}).items():
                if i < n:  # a point mass that was drawn has to be one
                    self._forced[t] &= ~valid[:, i] | (noted < 1e-6) | (noted > 1 - 1e-6)
        else:
            laws = draft.q[:, :n] if draft.q_index is None else take_rows(draft.q, draft.q_index[:, :n])
            q = laws.gather(2, x[..., None])[..., 0]
            if self._log_top is not None:
                self._log_top[t, :, :n] = torch.where(valid, laws.amax(-1).double().log(), -math.inf)
            self._fine[t] &= (q.isfinite() | ~valid).all(1)
            before = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1).cumprod(1).bool()
            self._forced[t] &= ~(before & valid & ~same & (q > 0)).any(1)
        self._log_q[t, :, :n] = torch.where(valid & same, q.double().log(), -math.inf)

    def walked(self, texts: Sequence[Response], said: Tensor, name: str, temperature: float) -> list[Walked]:
        log_top = None if self._log_top is None else self._log_top.cpu().numpy()
        log_q, log_p = self._log_q.cpu().numpy(), said.cpu().numpy()
        counts, fine, followed = (values.cpu().numpy() for values in (self._count, self._fine, self._forced))
        found = []
        for row, text in enumerate(texts):
            n = len(text.tokens)
            if not fine[:n, row].all():
                at = int(np.argmin(fine[:n, row]))
                raise NumericalError(
                    f"drafter '{name}' produced NaN or infinite numbers at token {at} of {text.where}; try dtype "
                    "float32, another attention implementation, or check the weights"
                )
            if self._follows and not followed[:n, row].all():
                raise unforced(name, "its tokens are not those that its random source drew from the law it reports")
            if temperature and np.isnan(log_p[:n, row]).any():
                at = int(np.argmax(np.isnan(log_p[:n, row])))
                raise NumericalError(f"the target produced NaN at token {at} of {text.where}; try dtype float32")
            own = log_p[:n, row] if temperature else np.zeros(n)
            cells = ended(log_q[:n, row]) if self._follows else log_q[:n, row]
            found.append(Walked(cells, counts[:n, row], own, None if log_top is None else log_top[:n, row]))
        return found


def ended(log_q: np.ndarray) -> np.ndarray:
    """``log_q [T, G]`` with -inf behind the end of the text, and in each row behind its first -inf."""
    t, depth = log_q.shape
    inside = np.arange(t)[:, None] + np.arange(depth) < t
    alive = np.logical_and.accumulate(inside & ~np.isneginf(log_q), axis=1)
    return np.where(alive, log_q, -np.inf)
