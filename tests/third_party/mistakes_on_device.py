"""Drafters and verifiers with one mistake each, which shows on a GPU only."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from crossdraft import (
    CHAIN,
    SINGLE_CHILD,
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
    Verifier,
    VerifierTraits,
    make_verifier,
)


class Chain(Drafter):
    """A chain of the target's own head behind one layer, without a mistake."""

    name = "one-layer"

    class Module(nn.Module):
        """Called as transformers calls a causal LM, without attention."""

        def __init__(self, target: Any):
            super().__init__()
            self.config = target.config
            self.embed, self.head = target.get_input_embeddings(), target.get_output_embeddings()
            self.layer = nn.Linear(16, 16, bias=False)
            nn.init.eye_(self.layer.weight)

        device = property(lambda self: self.layer.weight.device)
        dtype = property(lambda self: self.layer.weight.dtype)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def forward(
            self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
            **_: Any,
        ) -> Any:  # fmt: skip
            hidden = self.changed(self.layer(self.embed(input_ids)))
            return SimpleNamespace(logits=self.head(hidden), hidden_states=(hidden,))

        def changed(self, hidden: Tensor) -> Tensor:
            return hidden

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.module = self.Module(context.target_model).to(context.device).eval()
        self.model = DraftModel(context.slots(self.module))

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(CHAIN, point_mass=sampling.temperature == 0, nodes=3)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.model.start(row, prompt)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        return self.model.chain(sequences, 3, self.context.sampling, rng)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        self.model.commit(verdict, accepted)


class ReadsItsDraft(Chain):
    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        draft = super().propose(sequences, rng)
        return draft if draft.tokens.sum().item() >= 0 else Draft.empty(draft.batch_size, sequences.device)


class ReadsScoresOfLongSequences(Chain):
    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        super().observe(sequences, draft, verdict, accepted, scores)
        if max(map(len, sequences.history)) > 10:
            self.surprise = scores.p.max().tolist()


class MasksOnTheHost(Chain):
    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        draft = super().propose(sequences, rng)
        draft.valid = draft.valid & (torch.arange(draft.width) < 3)
        return draft


class ReadsCopyTooEarly(Chain):
    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        draft = super().propose(sequences, rng)
        count = draft.valid.sum(1).to("cpu", non_blocking=True).tolist()
        draft.valid = draft.valid & (torch.arange(draft.width, device=sequences.device) < count[0])
        return draft


class KeepsStatesOfPass(Chain):
    class Module(Chain.Module):
        def changed(self, hidden: Tensor) -> Tensor:
            self.states = hidden * 1.0
            return hidden


class WaitsInPass(Chain):
    class Module(Chain.Module):
        def changed(self, hidden: Tensor) -> Tensor:
            return hidden if bool(hidden.isfinite().all()) else torch.zeros_like(hidden)


class CountsPasses(Chain):
    class Module(Chain.Module):
        passes = 0

        def changed(self, hidden: Tensor) -> Tensor:
            self.passes += 1
            return -hidden if self.passes % 2 else hidden


class ReplacesItsScale(Chain):
    class Module(Chain.Module):
        def __init__(self, target: Any):
            super().__init__(target)
            self.scale = torch.ones(16, device=target.device)

        def changed(self, hidden: Tensor) -> Tensor:
            return hidden * self.scale

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.module.scale = self.module.scale.clone()
        super().start(row, prompt, hidden)


class MultipliesIntegers(Chain):
    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        draft = super().propose(sequences, rng)
        below = torch.ones(draft.width, draft.width, dtype=torch.long, device=sequences.device).triu()
        draft.valid = (draft.valid.long() @ below) > torch.arange(draft.width, device=sequences.device)
        return draft


class Token(Verifier):
    """Token verification, without a mistake."""

    name = "honest"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}))

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        return make_verifier("token").verify(draft, p, rng)


class ReadsP(Token):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        return super().verify(draft, p * float(p.sum() > 0), rng)


class IndexesByMask(Token):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        verdict = super().verify(draft, p, rng)
        return verdict if len(p[p > 2]) == 0 else Verdict(verdict.length * 0, verdict.token)


class FillsOnTheHost(Token):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        return super().verify(draft, p.masked_fill(torch.zeros(p.shape[2], dtype=torch.bool), 0), rng)


class AddsWhatIsUninitialised(Token):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        return super().verify(draft, p + torch.empty_like(p).clamp(0, 0).nan_to_num(9), rng)
