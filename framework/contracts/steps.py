"""Outcome of a step for one sequence, finished sequences, and the event that `on_step` receives."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import NumericalError
from .draft import Draft, Scores, Verdict


@dataclass
class SequenceStep:
    """Outcome of one step for one row.

    Attributes:
        tau: accepted draft tokens (an accepted end-of-sequence token cuts what follows it).
        emitted: tokens committed, correction or bonus included.
        nodes: drafted tokens the target evaluated for this row.
        width: nodes of the widest row of the batch: the target evaluated ``width + 1`` positions for this row.
        limit: how deep the draft was allowed to be (``sequences.limit``): where that is less than the drafter could
            go, the end of the sequence cut the step, not the pair.
        survival: sum over i of Pr(tau >= i | the first i drafted tokens), if the verifier knows it.
    """

    tau: int
    emitted: int
    nodes: int
    width: int
    limit: int
    survival: float | None = None


class Request(NamedTuple):
    """A prompt that waits for a slot.

    Attributes:
        prompt: its token ids.
        index: the number by which it is told apart from others.
        stream: its random stream, at least 0 and below 2^32.
        name: what messages call it.
        most: most tokens to generate; None: as many as the decoder says.
        eos: ids that end it; None: the decoder's.
    """

    prompt: Sequence[int]
    index: int = 0
    stream: int = 0
    name: str = "the prompt"
    most: int | None = None
    eos: Collection[int] | None = None


@dataclass
class Response:
    """One finished sequence.

    Attributes:
        index: which prompt it answers (its position in the run).
        tokens: the generated tokens, a final end-of-sequence token included.
        finish_reason: ``"stop"`` (an end-of-sequence token or a stop string), ``"length"`` (max_new_tokens reached, or
            the context is full), ``"abort"``, or ``"error"`` (NaN; only with ``on_error="finish"`` of `Decoder.run`).
        steps: its steps, in order.
        text: the decoded tokens, filled in by :func:`crossdraft.generate`.
        error: what went wrong, a sentence, where ``finish_reason`` is ``"error"``.
        logprobs: log P of each of ``tokens`` given those before it, by the target's law as it is sampled from
            (temperature and all); -inf where a lossy rule said what the target never does. ``None`` at temperature 0,
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
        index: which prompt it answers.
        tokens: new tokens, at least one; none only in the last piece of a sequence that failed.
        text: new text. It never splits a character, and what may become a stop string is held back, so it may be
            empty and may lag behind the tokens. All texts of a prompt, joined, are ``response.text``. ``None`` where
            the target has no tokenizer.
        logprobs: log P of each of ``tokens``, see `Response`; ``None`` at temperature 0.
        response: the whole answer, with its last piece; ``None`` before.
    """

    index: int
    tokens: list[int]
    text: str | None
    logprobs: list[float] | None
    response: Response | None = None


def raise_failed(responses: Sequence[Response]) -> None:
    """Raise NumericalError if a sequence ended in an error; ``responses`` go with it, the finished ones whole."""
    failed = [response.error for response in responses if response.error is not None]
    if failed:
        more = f"; {len(failed) - 1} more of {len(responses)} inputs failed" if len(failed) > 1 else ""
        error = NumericalError(f"{failed[0]}{more}")
        error.responses = responses
        raise error


@dataclass(frozen=True)
class StepEvent:
    """A step that is over, as ``Decoder(on_step=...)`` tells it: for traces, progress, studies of acceptance.

    The tensors are the step's own and are not copied: keep what you need, write into nothing.

    Attributes:
        draft: what was drafted, probes included.
        scores: the target's laws after the root and every node.
        verdict: what the verifier decided.
        prompts: per slot, the index of the prompt that it decodes; ``None`` for a free slot.
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
