"""State of one running sequence on the host, and the outcome of a step for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from ..contracts.steps import Response, SequenceStep


class RowOutcome(NamedTuple):
    """Outcome of a step for one row, on the host.

    Attributes:
        tau: accepted tokens.
        nodes, depth: size of the draft.
        target_finite, drafter_finite: True if their logits were free of NaN and infinity.
        resume_matches: `Scores.resume_matches`.
        q: sum of all entries of q, NaN or infinite if one of them is.
        survival: sum of `Verdict.survival`.
        tokens: the accepted tokens and the one after them, then padding.
        logprobs: log p of each of ``tokens`` given those before it; empty if not requested.
    """

    tau: int
    nodes: int
    depth: int
    target_finite: bool
    drafter_finite: bool
    resume_matches: bool
    q: float
    survival: float
    tokens: list[int]
    logprobs: list[float]


@dataclass
class SequenceState:
    """A sequence in a slot of the batch.

    Attributes:
        index, name: index of its prompt, and its name in messages.
        prompt_length: tokens of the prompt.
        max_new_tokens: maximum number of tokens to generate.
        eos: end-of-sequence ids.
        context: maximum number of tokens of prompt and output, or None.
        logprobs: log p of each generated token; None at temperature 0.
        tokens: generated tokens.
        steps: finished steps.
        ended: finish reason set from outside the loop (`Decoder.end`).
        error: error message if its numbers are invalid.
    """

    index: int
    name: str
    prompt_length: int
    max_new_tokens: int
    eos: Collection[int]
    context: int | None
    logprobs: list[float] | None
    tokens: list[int] = field(default_factory=list)
    steps: list[SequenceStep] = field(default_factory=list)
    ended: str | None = None
    error: str | None = None

    def commit(self, outcome: RowOutcome, width: int, limit: int, survival: bool) -> list[int]:
        """Append the tokens of a step up to an end-of-sequence token, and return them.

        Args:
            width, limit: see `SequenceStep`.
            survival: the verifier computes survival.
        """
        count = outcome.tau + 1
        for i, token in enumerate(outcome.tokens[:count]):
            if token in self.eos:
                count = i + 1
                break
        new = outcome.tokens[:count]
        self.tokens += new
        if self.logprobs is not None:
            self.logprobs += outcome.logprobs[:count]
        tau = min(outcome.tau, len(new))
        own = outcome.survival if survival else None
        self.steps.append(SequenceStep(tau, len(new), outcome.nodes, width, limit, own))
        return new

    @property
    def finish_reason(self) -> str | None:
        """Reason to finish now, see `Response.finish_reason`; None if the sequence continues."""
        if self.error is not None:
            return "error"
        if self.ended is not None:
            return self.ended
        if self.tokens and self.tokens[-1] in self.eos:
            return "stop"
        if len(self.tokens) >= self.max_new_tokens:
            return "length"
        if self.context is not None and self.prompt_length + len(self.tokens) >= self.context:
            return "length"
        return None

    @property
    def max_draft_len(self) -> int:
        """Maximum depth of the next draft."""
        left = self.max_new_tokens - len(self.tokens)
        if self.context is not None:
            # The deepest draft token is fed at position length - 1 + depth, which must stay inside the context.
            left = min(left, self.context - self.prompt_length - len(self.tokens))
        return max(left - 1, 0)

    def response(self, finish_reason: str) -> Response:
        return Response(self.index, self.tokens, finish_reason, self.steps, error=self.error, logprobs=self.logprobs)
