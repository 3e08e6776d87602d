"""Drafters with one mistake each, which a failed certificate must name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossdraft import (
    Draft,
    DraftContext,
    Drafter,
    DraftModel,
    DraftTraits,
    Sampling,
    Scores,
    Sequences,
    StepRng,
    StrategyConfig,
    Verdict,
    on_device,
)
from crossdraft.framework.contracts.draft_kind import CHAIN


class Honest(Drafter):
    """A chain of two tokens; its children change one thing each."""

    name = "faulty"

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.model = DraftModel(context.load_lm("toy"))

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=False, nodes=2)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.model.start(row, prompt)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self.model.free(row)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        steps = min(2, max(sequences.limit))
        if not steps:
            return Draft.empty(sequences.batch_size, sequences.device)
        logits, tokens, distributions = self.model.root(sequences), [], []
        for i in range(steps):
            drawn_from, reported = self.distributions(logits, sequences, i)
            distributions.append(reported)
            tokens.append(self.draw(rng, drawn_from, i))
            if i + 1 < steps:
                logits = self.model.forward(tokens[-1][:, None])[:, 0]
        length = on_device(sequences.limit, sequences.device).clamp(max=steps)
        return self.finished(Draft.chain(torch.stack(tokens, 1), length, torch.stack(distributions, 1)))

    def distributions(self, logits: Tensor, sequences: Sequences, i: int) -> tuple[Tensor, Tensor]:
        """Sampled and reported distributions."""
        probs = self.context.sampling.probs(logits)
        return probs, probs

    def draw(self, rng: StepRng, probs: Tensor, i: int) -> Tensor:
        return rng.draw(probs, "draft", i)

    def finished(self, draft: Draft) -> Draft:
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        self.model.commit(verdict, accepted)


class OtherTemperature(Honest):
    def distributions(self, logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return (logits / 0.5).softmax(-1), logits.softmax(-1)


class WithoutWarping(Honest):
    """Right at temperature 1 without truncation."""

    def distributions(self, logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return self.context.sampling.probs(logits), logits.softmax(-1)


class ArgmaxAsSample(Honest):
    def draw(self, rng: StepRng, probs: Tensor, i: int) -> Tensor:
        return probs.argmax(-1)


class FromAnotherPosition(Honest):
    """Every token is drawn from the distribution at the root."""

    def distributions(self, logits: Tensor, sequences: Sequences, i: int) -> tuple[Tensor, Tensor]:
        probs = self.context.sampling.probs(logits)
        if not i:
            self.first = probs
        return self.first, probs


class QShifted(Honest):
    def finished(self, draft: Draft) -> Draft:
        assert draft.q is not None
        draft.q = draft.q.flip(1)
        return draft


class DropsWhatItLookedAt(Honest):
    def finished(self, draft: Draft) -> Draft:
        assert draft.q is not None
        sure = draft.q.gather(2, draft.tokens[..., None]).squeeze(2) > 0.4
        draft.valid = draft.valid & sure.long().cumprod(1).bool()
        return draft


class BestOfTwo(Honest):
    def draw(self, rng: StepRng, probs: Tensor, i: int) -> Tensor:
        drawn = rng.draw(probs, "draft", i)
        return drawn if i else torch.maximum(drawn, rng.draw(probs, "draft", 5))


class Multinomial(Honest):
    def draw(self, rng: StepRng, probs: Tensor, i: int) -> Tensor:
        return torch.multinomial(probs, 1).squeeze(1)


class UncommittedTokens(Honest):
    """Flattens q by what stands behind the committed tokens."""

    def distributions(self, logits: Tensor, sequences: Sequences, i: int) -> tuple[Tensor, Tensor]:
        behind = torch.stack([sequences.tokens[row, len(history)] for row, history in enumerate(sequences.history)])
        probs = (logits / (1 + behind[:, None])).softmax(-1)
        return probs, logits.softmax(-1)


class TakesTheVerifiersNumbers(Honest):
    def draw(self, rng: StepRng, probs: Tensor, i: int) -> Tensor:
        return rng.draw(probs, "residual", i)


class SharesState(Honest):
    """Draws by the first slot's distribution."""

    def distributions(self, logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return logits[:1].softmax(-1).expand_as(logits), logits.softmax(-1)


class Crashes(Honest):
    def finished(self, draft: Draft) -> Draft:
        raise KeyError("boom")


class ResetWithoutRemembers(Honest):
    """Defines reset(), and its test class does not have remembers = True."""

    def reset(self) -> None:
        """A reset without effect."""


#: Drafter -> verdict, and words of the diagnosis.
FAULTY: dict[type[Drafter], tuple[str, list[str]]] = {
    OtherTemperature: ("FAILED", ["q is not the distribution", "at 0.5 times the temperature of q"]),
    WithoutWarping: ("FAILED", ["q is not the distribution", "temperature 0.6"]),
    ArgmaxAsSample: ("FAILED", ["q is not the distribution", "argmax of q, so they are point masses"]),
    FromAnotherPosition: ("FAILED", ["q is not the distribution", "from the q of another position"]),
    QShifted: ("FAILED", ["q is not the distribution", "after the drafted tokens ["]),
    DropsWhatItLookedAt: ("FAILED", ["a token was dropped depending on its value"]),
    BestOfTwo: ("FAILED", ["q is not the distribution"]),
    Multinomial: ("FAILED", ["drafter 'faulty' takes random numbers outside of rng", "torch.multinomial at "]),
    UncommittedTokens: ("FAILED", ["reads sequences.tokens after the committed tokens"]),
    TakesTheVerifiersNumbers: ("ERROR", ["for 'residual' were already used this step"]),
    SharesState: ("FAILED", ["rows share state"]),
    Crashes: ("ERROR", ["KeyError: 'boom'", "faulty_drafters.py:", "in finished"]),
}
