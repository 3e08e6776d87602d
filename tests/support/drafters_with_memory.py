"""Drafters with a memory that make one mistake each, from the ``lag``-th observed token on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from crossdraft import Draft, Drafter, DraftTraits, Sampling, StrategyConfig
from crossdraft.framework.contracts.draft_kind import CHAIN


class Successors(Drafter):
    """Honest: draws from the counts of tokens that followed the last token in this sequence."""

    name = "successors"

    class Config(StrategyConfig):
        gamma: int = 2
        lag: int = Field(default=12, description="observed tokens before the mistake")

    config: Config

    def __init__(self, config: Config | None = None, context: Any = None):
        self.counts: dict[int, Tensor] = {}
        self.seen: dict[int, int] = {}
        super().__init__(config, context)

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=False, nodes=config.gamma, waits=2 * config.gamma)

    def start(self, row: int, prompt: Sequence[int], hidden: Any = None) -> None:
        vocab_size = self.context.vocab_size
        self.counts[row], self.seen[row] = torch.zeros(vocab_size, vocab_size, dtype=torch.float64), 0
        self.enter(row, prompt, 1)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self.counts.pop(row, None)

    def enter(self, row: int, history: Sequence[int], start: int) -> None:
        for before, token in zip(history[start - 1 :], history[start:], strict=False):
            self.counts[row][before, token] += 1

    def observe(self, sequences: Any, draft: Any, verdict: Any, accepted: Sequence[int], scores: Any) -> None:
        for row, history in enumerate(sequences.history):
            if history and row in self.counts:
                self.enter(row, history, len(history) - accepted[row] - 1)
                self.seen[row] += accepted[row] + 1

    def late(self, row: int) -> bool:
        return self.seen.get(row, 0) >= self.config.lag

    def propose(self, sequences: Any, rng: Any) -> Draft:
        last = [history[-1] if history else 0 for history in sequences.history]
        drafted, reported, lengths = [], [], [0] * len(last)
        for i in range(self.config.gamma):
            q, output = [], []
            for row, token in enumerate(last):
                counts = self.table(row)
                known = (
                    counts is not None and i < sequences.limit[row] and lengths[row] == i and counts[token].sum() > 0
                )
                lengths[row] += known
                probs = counts[token] / counts[token].sum() if known else torch.eye(self.context.vocab_size)[0].double()
                q.append(self.drawn_from(probs, row) if known else probs)
                output.append(self.reported(probs, row, i) if known else probs)
            tokens = self.draw(torch.stack(q), rng, i)
            last = tokens.tolist()
            drafted.append(tokens)
            reported.append(torch.stack(output))
        lengths = [self.length(row, [int(d[row]) for d in drafted[:n]]) for row, n in enumerate(lengths)]
        return Draft.chain(torch.stack(drafted, 1), lengths, torch.stack(reported, 1)[:, : max(lengths)])

    def table(self, row: int) -> Tensor | None:
        return self.counts.get(row)

    def drawn_from(self, probs: Tensor, row: int) -> Tensor:
        return probs

    def reported(self, probs: Tensor, row: int, i: int) -> Tensor:
        return probs

    def draw(self, probs: Tensor, rng: Any, i: int) -> Tensor:
        return rng.draw(probs, "draft", i)

    def length(self, row: int, tokens: list[int]) -> int:
        return len(tokens)


def _power(probs: Tensor, power: float) -> Tensor:
    powers = torch.where(probs > 0, probs**power, 0.0)
    return powers / powers.sum()


class Squared(Successors):
    def reported(self, probs: Tensor, row: int, i: int) -> Tensor:
        return _power(probs, 2.0) if self.late(row) else probs


class Flattened(Successors):
    def reported(self, probs: Tensor, row: int, i: int) -> Tensor:
        return _power(probs, 0.5) if self.late(row) else probs


class Uniform(Successors):
    def reported(self, probs: Tensor, row: int, i: int) -> Tensor:
        return _power(probs, 0.0) if self.late(row) else probs


class StaleTable(Successors):
    """q follows the table as it was at the lag."""

    def reported(self, probs: Tensor, row: int, i: int) -> Tensor:
        if not self.late(row):
            self.old = dict(getattr(self, "old", {})) | {row: probs}
            return probs
        old = getattr(self, "old", {}).get(row)
        return probs if old is None else (probs + old) / 2


class PreviousStep(Successors):
    """q is that of the step before."""

    def reported(self, probs: Tensor, row: int, i: int) -> Tensor:
        if not hasattr(self, "before"):
            self.before: dict[tuple[int, int], Tensor] = {}
        old, self.before[row, i] = self.before.get((row, i), probs), probs
        return (probs + old) / 2 if self.late(row) else probs

    def start(self, row: int, prompt: Sequence[int], hidden: Any = None) -> None:
        super().start(row, prompt)
        self.before = {key: q for key, q in getattr(self, "before", {}).items() if key[0] != row}


class OtherRow(Successors):
    """Drafts by the table of the first slot."""

    def table(self, row: int) -> Tensor | None:
        return self.counts.get(0 if self.late(row) else row)


class OtherRowsQ(Successors):
    """Reports the q of the first slot mixed with its own."""

    def reported(self, probs: Tensor, row: int, i: int) -> Tensor:
        if row == 0:
            self.first = probs
        return (probs + getattr(self, "first", probs)) / 2 if self.late(row) else probs


class KeptAfterStart(Successors):
    """Sequences add to the table of their slot."""

    def start(self, row: int, prompt: Sequence[int], hidden: Any = None) -> None:
        old = self.kept.pop(row, None) if hasattr(self, "kept") else None
        super().start(row, prompt)
        if old is not None:
            self.counts[row] += old

    def free(self, row: int, finish_reason: str | None = None) -> None:
        if self.late(row) and row in self.counts:
            self.kept = getattr(self, "kept", {}) | {row: self.counts[row]}
        super().free(row)


class CutByContent(Successors):
    """A drawn token 0 ends the draft in front of it."""

    def length(self, row: int, tokens: list[int]) -> int:
        return tokens.index(0) if self.late(row) and 0 in tokens else len(tokens)


class CutAfterUnlikely(Successors):
    """A drawn last token 1 is dropped."""

    def length(self, row: int, tokens: list[int]) -> int:
        return len(tokens) - (self.late(row) and tokens[-1:] == [1])


class ArgmaxAsSample(Successors):
    def drawn_from(self, probs: Tensor, row: int) -> Tensor:
        return torch.eye(len(probs)).double()[probs.argmax()] if self.late(row) else probs


class Smoothed(Successors):
    """Tokens that never followed are drawn, too, and q does not have them."""

    def drawn_from(self, probs: Tensor, row: int) -> Tensor:
        return 0.9 * probs + 0.1 / len(probs) if self.late(row) else probs


class OwnRandomNumbers(Successors):
    def draw(self, probs: Tensor, rng: Any, i: int) -> Tensor:
        drawn = rng.draw(probs, "draft", i)
        return torch.multinomial(probs, 1)[:, 0] if any(map(self.late, self.counts)) else drawn


#: Drafter -> words of the fault that the certificate and the contract kit report.
MISTAKES: dict[type[Successors], str] = {
    Squared: "q is not the distribution that tokens are drawn from",
    Flattened: "q is not the distribution that tokens are drawn from",
    Uniform: "q is not the distribution that tokens are drawn from",
    StaleTable: "q is not the distribution that tokens are drawn from",
    PreviousStep: "q is not the distribution that tokens are drawn from",
    OtherRow: "rows share state",
    OtherRowsQ: "rows share state",
    KeptAfterStart: "a slot keeps state of its last sequence",
    CutByContent: "a token was dropped depending on its value",
    CutAfterUnlikely: "a token was dropped depending on its value",
    ArgmaxAsSample: "tokens are the argmax of q",
    Smoothed: "q is not the distribution that tokens are drawn from",
    OwnRandomNumbers: "takes random numbers outside of rng",
}


class Commonest(Successors):
    """Draws one of the ten commonest tokens of the sequence, and reports all."""

    def table(self, row: int) -> Tensor | None:
        counts = super().table(row)
        return None if counts is None else counts.sum(0).expand_as(counts)

    def drawn_from(self, probs: Tensor, row: int) -> Tensor:
        top = probs.topk(min(10, len(probs))).indices
        return _power(torch.zeros_like(probs).index_copy(0, top, probs[top]), 1.0)


class Warped(Successors):
    """Draws at the target's temperature, and reports counts."""

    def drawn_from(self, probs: Tensor, row: int) -> Tensor:
        return _power(probs, 1 / (self.context.sampling.temperature or 1))


class ThirdSequence(Commonest):
    """Makes its mistake from the third sequence of a slot on."""

    def start(self, row: int, prompt: Sequence[int], hidden: Any = None) -> None:
        super().start(row, prompt)
        self.starts = getattr(self, "starts", {}) | {row: getattr(self, "starts", {}).get(row, 0) + 1}

    def drawn_from(self, probs: Tensor, row: int) -> Tensor:
        return super().drawn_from(probs, row) if self.starts[row] > 2 else probs


class LongPrompt(Commonest):
    """Makes its mistake after prompts of more than 32 tokens."""

    def start(self, row: int, prompt: Sequence[int], hidden: Any = None) -> None:
        super().start(row, prompt)
        self.long = getattr(self, "long", {}) | {row: len(prompt) > 32}

    def drawn_from(self, probs: Tensor, row: int) -> Tensor:
        return super().drawn_from(probs, row) if self.long[row] else probs


class AfterWholeDrafts(Commonest):
    """Makes its mistake after three whole drafts in a row."""

    def observe(self, sequences: Any, draft: Any, verdict: Any, accepted: Sequence[int], scores: Any) -> None:
        super().observe(sequences, draft, verdict, accepted, scores)
        whole, before = draft.count.tolist(), getattr(self, "streak", {})
        self.streak = {r: before.get(r, 0) + 1 if n and n == whole[r] else 0 for r, n in enumerate(accepted)}

    def drawn_from(self, probs: Tensor, row: int) -> Tensor:
        return _power(probs, 3) if getattr(self, "streak", {}).get(row, 0) > 2 else probs


class EighthStep(Successors):
    """Makes its mistake in every eighth step of a sequence."""

    def start(self, row: int, prompt: Sequence[int], hidden: Any = None) -> None:
        super().start(row, prompt)
        self.steps = getattr(self, "steps", {}) | {row: 0}

    def observe(self, sequences: Any, draft: Any, verdict: Any, accepted: Sequence[int], scores: Any) -> None:
        super().observe(sequences, draft, verdict, accepted, scores)
        self.steps = {row: steps + 1 for row, steps in self.steps.items()}

    def reported(self, probs: Tensor, row: int, i: int) -> Tensor:
        return _power(probs, 2.0) if self.steps[row] % 8 == 7 else probs


class SmallLimit(Successors):
    """Makes its mistake where the limit is below gamma."""

    def propose(self, sequences: Any, rng: Any) -> Draft:
        self.limits = list(sequences.limit)
        return super().propose(sequences, rng)

    def reported(self, probs: Tensor, row: int, i: int) -> Tensor:
        return _power(probs, 2.0) if self.limits[row] < self.config.gamma else probs


#: Drafters and lags that no enumeration reaches.
LATER: tuple[tuple[type[Successors], int], ...] = (
    (Squared, 100),
    (CutByContent, 50),
    (Commonest, 0),
    (Warped, 0),
    (ThirdSequence, 0),
    (AfterWholeDrafts, 0),
    (LongPrompt, 0),
    (Uniform, 100),
    (PreviousStep, 100),
    (EighthStep, 0),
    (SmallLimit, 0),
)
