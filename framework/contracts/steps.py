"""Outcome of a step for one sequence, finished sequences, and the event that `on_step` receives."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import NumericalError
from .constraint import Grammar
from .draft import Draft, Scores, Verdict


@dataclass
class SequenceStep:
    """Outcome of one step for one row.

    Attributes:
        tau: accepted draft tokens, up to an end-of-sequence token.
        emitted: tokens committed, correction or bonus included.
        nodes: drafted tokens the target evaluated for this row.
        width: nodes of the widest row of the batch: the target evaluated ``width + 1`` positions for this row.
        limit: maximum depth of the draft (``sequences.limit``); if it is below the drafter's own, the end of the
            sequence shortened the step.
        survival: sum over i of Pr(tau >= i | the first i drafted tokens), if the verifier computes it.
    """

    tau: int
    emitted: int
    nodes: int
    width: int
    limit: int
    survival: float | None = None


class Request(NamedTuple):
    """A prompt waiting for a slot.

    Attributes:
        prompt: token ids.
        index: number that identifies it.
        stream: number of its random stream, at least 0 and below 2^32.
        name: its name in messages.
        max_new_tokens: maximum number of tokens to generate; None: the decoder's.
        eos: end-of-sequence ids; None: the decoder's.
        constraint: language of the response; None: the decoder's.
    """

    prompt: Sequence[int]
    index: int = 0
    stream: int = 0
    name: str = "the prompt"
    max_new_tokens: int | None = None
    eos: Collection[int] | None = None
    constraint: Grammar | None = None


@dataclass
class Response:
    """One finished sequence.

    Attributes:
        index: index of its prompt (the position in the run).
        tokens: the generated tokens, a final end-of-sequence token included.
        finish_reason: ``"stop"`` (an end-of-sequence token or a stop string), ``"length"`` (max_new_tokens reached, or
            the context is full), ``"abort"``, or ``"error"`` (NaN, only with ``on_error="finish"`` of `Decoder.run`; a
            dead end or a failure of the constraint).
        steps: its steps, in order.
        text: the decoded tokens, filled in by :func:`crossdraft.generate`.
        error: error message if ``finish_reason`` is ``"error"``.
        logprobs: log P of each of ``tokens`` given those before it, under the target distribution after temperature,
            top-k and top-p; -inf for a token of target probability 0 (lossy verifiers). ``None`` at temperature 0,
            where each is 0.
    """

    index: int
    tokens: list[int]
    finish_reason: str
    steps: list[SequenceStep]
    text: str | None = None
    error: str | None = None
    logprobs: list[float] | None = None


@dataclass(frozen=True)
class Chunk:
    """Output of a sequence in one step, as :func:`crossdraft.stream` yields it.

    Attributes:
        index: index of its prompt.
        tokens: new tokens, at least one; empty only in the last chunk of a failed sequence.
        text: new text, of whole characters. A possible beginning of a stop string is withheld, so the text may be empty
            and lag behind the tokens. The joined texts of a prompt are ``response.text``. ``None`` if the target
            has no tokenizer.
        logprobs: log P of each of ``tokens``, see `Response`; ``None`` at temperature 0.
        response: the complete response, in the last chunk; ``None`` before.
    """

    index: int
    tokens: list[int]
    text: str | None
    logprobs: list[float] | None
    response: Response | None = None


def raise_failed(responses: Sequence[Response]) -> None:
    """Raise NumericalError, with ``responses`` attached, if a sequence ended in an error."""
    failed = [response.error for response in responses if response.error is not None]
    if failed:
        more = f"; {len(failed) - 1} more of {len(responses)} inputs failed" if len(failed) > 1 else ""
        error = NumericalError(f"{failed[0]}{more}")
        error.responses = responses
        raise error


@dataclass(frozen=True)
class StepEvent:
    """Data of a finished step for ``Decoder(on_step=...)``: traces, progress, acceptance statistics.

    The tensors are those of the step, not copies: treat them as read-only.

    Attributes:
        draft: the scored draft, probes included.
        scores: target distributions after the root and every node.
        verdict: output of the verifier.
        prompts: per slot, the index of its prompt; ``None`` for a free slot.
        accepted: per slot, tau.
        emitted: per slot, the tokens committed; empty for a free slot.
        logprobs: per slot, log P of each of them, see `Response`; empty at temperature 0.
    """

    draft: Draft
    scores: Scores
    verdict: Verdict
    prompts: list[int | None]
    accepted: list[int]
    emitted: list[list[int]]
    logprobs: list[list[float]]
