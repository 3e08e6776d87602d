"""A drafter walked along recorded responses: a round starts at every token, and nothing that it drafts is accepted.

A row of the batch is a response. In round t the drafter drafts, the target reads the last committed token alone, and
x[t] is committed, as if the round had ended before its first drafted token: `Drafter.observe` sees a draft without
nodes. So all that a drafter may ask for is what it would be given (the target's features, its forks, a text that grows
in order), every token's keys and values are computed once, and memory holds one sequence for each row. What is drafted
on the way comes from a random source: `Forcing` returns the response's own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..contracts.draft import Draft, Scores, Sequences, Verdict, on_device, take_rows
from ..contracts.drafter import DraftContext, Drafter
from ..contracts.errors import NumericalError, UsageError
from ..contracts.rng import RngSource, RoundRng
from ..decoding.forms import Watch, check_draft
from ..decoding.validation import validate_draft
from .response import Response


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

    def round(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> ForcedRound:
        assert self.text is not None
        return ForcedRound(self.text, self._drafter)


class ForcedRound:
    """The choices of a round that are to be ``text [B, G]``. ``noted[i]``: the probability ``[B]`` of token i."""

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


@torch.inference_mode()
def walk(
    drafter: Drafter,
    context: DraftContext,
    texts: Sequence[Response],
    depth: int,
    rng: RngSource | None = None,
    streams: Sequence[int] | None = None,
    tops: bool = False,
) -> list[Walked]:
    """Walk ``drafter`` along at most B responses, from every token of each, at most ``depth`` tokens deep.

    Args:
        rng: where the drafter's random numbers come from; by default they make it draft the response. With another
            source, drafts are its own, and so are the tokens whose log Q is told.
        streams: the random stream of each response.
        tops: tell `Walked.log_top`.

    Raises:
        UsageError: a drafter that cannot be forced.
        ContractError, NumericalError: a draft that breaks the contract, or NaN; see `Decoder`.
    """
    target, b, device = context.target, context.batch_size, context.device
    assert target is not None and len(texts) <= b
    name, traits = drafter.name, drafter.traits(drafter.config, context.sampling)
    who, longest = f"drafter '{name}'", max((len(text.tokens) for text in texts), default=0)
    seqs = Sequences(
        history=[[] for _ in range(b)],
        tokens=torch.zeros(b, context.max_length, dtype=torch.long, device=device),
        limit=[0] * b,
        stream=[*(streams or range(len(texts))), *[0] * (b - len(texts))],
    )
    padded = [[*text.tokens, *[0] * (longest + depth - len(text.tokens))] for text in texts]
    x = on_device(padded + [[0] * (longest + depth)] * (b - len(texts)), device)
    cells = _Cells(x, longest, depth, rng is None, tops and not traits.point_mass)
    forcing = Forcing(name) if rng is None else None
    source: RngSource = forcing or rng  # type: ignore[assignment]
    target.hidden_layers = traits.hidden_layers
    nothing = torch.zeros(b, dtype=torch.long, device=device)
    try:
        for row, text in enumerate(texts):
            if len(text.tokens):
                hidden = target.begin(row, list(text.prompt))
                seqs.append(row, list(text.prompt))
                drafter.begin(row, list(text.prompt), hidden)
        for t in range(longest):
            for row, text in enumerate(texts):
                if t < len(text.tokens):  # it knows nothing of the end of the text
                    seqs.limit[row] = room(depth, len(seqs.history[row]), target.context_length)
            if forcing is not None:
                forcing.text = x[:, t : t + depth]
            choices = source.round(seqs.stream, [len(history) for history in seqs.history], device)
            watch = Watch(seqs, False)
            draft = drafter.propose(seqs, choices)
            watch.check(who)
            (validate_draft if t == 0 else check_draft)(draft, traits, seqs, target.vocab_size, drafter=who)
            if not draft.is_chain:
                raise unforced(name, "its drafts are wider than a chain, or have probes")
            cells.add(t, draft, choices)
            root = on_device([[history[-1] if history else 0] for history in seqs.history], device)
            logits, hidden = target.grow(root)
            p, finite = context.sampling.checked_law(logits)
            cells.said(t, p)
            target.keep([int(bool(history)) for history in seqs.history])
            for row, text in enumerate(texts):
                if t < len(text.tokens):
                    seqs.append(row, [int(text.tokens[t])])
            verdict = Verdict(nothing, x[:, t])
            scores = Scores(p, finite.all(1), logits, hidden)
            drafter.observe(seqs, draft.trimmed(0), verdict, [0] * b, scores)
            for row, text in enumerate(texts):
                if t == len(text.tokens) - 1:
                    _free(seqs, row)
                    target.retire(row)
                    drafter.retire(row, "length")
    finally:  # an error leaves the slots clean for the next responses
        left = [row for row, history in enumerate(seqs.history) if history]
        if left:
            for row in left:
                _free(seqs, row)
            target.keep([0] * b)
            for row in left:
                target.retire(row)
                drafter.retire(row)
    return cells.walked(texts, name, context.sampling.temperature)


def room(depth: int, length: int, context_length: int | None) -> int:
    """How deep a draft may be after ``length`` tokens, at most ``depth``: the target's context has to hold it."""
    return depth if context_length is None else max(0, min(depth, context_length - length - 1))


def _free(seqs: Sequences, row: int) -> None:
    seqs.history[row], seqs.limit[row] = [], 0


class _Cells:
    """What rounds leave, on the device until all are over: nobody waits for it in between."""

    def __init__(self, x: Tensor, rounds: int, depth: int, forced: bool, tops: bool):
        b, like = len(x), {"dtype": torch.float64, "device": x.device}
        self._x, self._depth, self._follows = x, depth, forced
        self._log_top = torch.full((rounds, b, depth), -math.inf, **like) if tops else None
        self._log_q = torch.full((rounds, b, depth), -math.inf, **like)
        self._log_p = torch.zeros(rounds, b, **like)
        self._count = torch.zeros(rounds, b, dtype=torch.long, device=x.device)
        self._fine = torch.ones(rounds, b, dtype=torch.bool, device=x.device)
        self._forced = torch.ones(rounds, b, dtype=torch.bool, device=x.device)

    def add(self, t: int, draft: Draft, choices: RoundRng) -> None:
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
            laws = draft.q[:, :n] if draft.law is None else take_rows(draft.q, draft.law[:, :n])
            q = laws.gather(2, x[..., None])[..., 0]
            if self._log_top is not None:
                self._log_top[t, :, :n] = torch.where(valid, laws.amax(-1).double().log(), -math.inf)
            self._fine[t] &= (q.isfinite() | ~valid).all(1)
            before = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1).cumprod(1).bool()
            self._forced[t] &= ~(before & valid & ~same & (q > 0)).any(1)
        self._log_q[t, :, :n] = torch.where(valid & same, q.double().log(), -math.inf)

    def said(self, t: int, p: Tensor) -> None:
        """``p [B, 1, V]``, the target's law of token t."""
        self._log_p[t] = p[:, 0].gather(1, self._x[:, t : t + 1])[:, 0].double().log()

    def walked(self, texts: Sequence[Response], name: str, temperature: float) -> list[Walked]:
        log_top = None if self._log_top is None else self._log_top.cpu().numpy()
        log_q, log_p = self._log_q.cpu().numpy(), self._log_p.cpu().numpy()
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
