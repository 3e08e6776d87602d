"""The contract kit on strategies that make one mistake each: it has to fail, and to name the mistake."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdraft import (
    ContractError,
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
    TextDistribution,
    Verdict,
    Verifier,
    VerifierTraits,
    make_verifier,
    on_device,
)
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.rows import certify_row
from crossdraft.framework.certificate.toys import built_in_toys
from crossdraft.framework.contracts.draft_kind import CHAIN, SINGLE_CHILD
from crossdraft.testing import DrafterContract, VerifierContract


class Chain(Drafter):
    """An honest chain of two tokens; its children change one thing each."""

    name = "chain-of-two"

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
            drawn_from, reported = self.distributions(logits)
            distributions.append(reported)
            tokens.append(rng.draw(drawn_from, "draft", i))
            if i + 1 < steps:
                logits = self.model.forward(tokens[-1][:, None])[:, 0]
        length = on_device(sequences.limit, sequences.device).clamp(max=steps)
        return self.finished(Draft.chain(torch.stack(tokens, 1), length, torch.stack(distributions, 1)))

    def distributions(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sampled and reported distributions."""
        probs = logits.softmax(-1)
        return probs, probs

    def finished(self, draft: Draft) -> Draft:
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        self.model.commit(verdict, accepted)


class OtherTemperature(Chain):
    def distributions(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return (logits / 0.7).softmax(-1), logits.softmax(-1)


class DropsWhatItLookedAt(Chain):
    def finished(self, draft: Draft) -> Draft:
        assert draft.q is not None
        sure = draft.q.gather(2, draft.tokens[..., None]).squeeze(2) > 0.25
        draft.valid = draft.valid & sure.long().cumprod(1).bool()
        return draft


class SharesState(Chain):
    """Drafts depend on the first slot."""

    def distributions(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        probs = logits[:1].softmax(-1).expand_as(logits)
        return probs, probs


class LeavesSomething(Chain):
    """Every sequence in a slot is drafted more flatly than the one before it."""

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.resume_from = torch.zeros(context.batch_size, 1)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        super().start(row, prompt)
        self.resume_from[row] += 1

    def distributions(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        probs = (logits / self.resume_from.clamp(min=1)).softmax(-1)
        return probs, probs


class OutOfVocabulary(Chain):
    def finished(self, draft: Draft) -> Draft:
        draft.tokens = draft.tokens + self.context.vocab_size
        return draft


class ShapeOffByOne(Chain):
    def finished(self, draft: Draft) -> Draft:
        draft.parents = draft.parents[:, :-1]
        return draft


class LawsOffByOne(Chain):
    def finished(self, draft: Draft) -> Draft:
        assert draft.q is not None
        draft.q = draft.q[:, :-1]
        return draft


class TooDeep(Chain):
    def finished(self, draft: Draft) -> Draft:
        draft.valid = torch.ones_like(draft.valid)
        return draft


class Waits(Chain):
    def finished(self, draft: Draft) -> Draft:
        return draft if int(draft.tokens.sum()) >= 0 else Draft.empty(draft.batch_size)


class OtherTextLaw(Chain):
    def text_distribution(self) -> TextDistribution:
        return TextDistribution(self.model.lm, Sampling(temperature=2))


class Forgets(Chain):
    """Its memory can be turned off, and is by default."""

    class Config(StrategyConfig):
        memory: bool = False

    def reset(self) -> None:
        """A reset without effect."""


class SaysThatItForgets(Forgets):
    @classmethod
    def remembers(cls, config: Any) -> bool:
        return config.memory


def drafter_contract(cls: type[Drafter]) -> DrafterContract:
    return type("Contract", (DrafterContract,), {"drafter": cls, "temperatures": (1.0,)})()


def verifier_contract(cls: type[Verifier]) -> VerifierContract:
    return type("Contract", (VerifierContract,), {"verifier": cls})()


@cache
def pass_honest(test: str, verifier: bool = False) -> None:
    """Run a test of the kit on the honest strategy, once for all mistakes that it names."""
    getattr(verifier_contract(Honest) if verifier else drafter_contract(Chain), test)()


@pytest.mark.parametrize(
    "cls, test, sentence",
    [
        (OtherTemperature, "test_output_follows_the_target", "q is not the distribution that tokens are drawn"),
        (DropsWhatItLookedAt, "test_output_follows_the_target", "a token was dropped depending on its value"),
        (SharesState, "test_rows_do_not_share_state", "rows share state"),
        (LeavesSomething, "test_drafts_depend_on_sequences_and_rng_only", "a slot keeps state of its last sequence"),
        (OutOfVocabulary, "test_every_draft_keeps_the_contract", "outside of the vocabulary"),
        (ShapeOffByOne, "test_every_draft_keeps_the_contract", "draft.parents of shape .*: a shape is off"),
        (LawsOffByOne, "test_every_draft_keeps_the_contract", "too few rows .*: a shape is off"),
        (TooDeep, "test_limits", "but sequences.limit allows"),
        (OtherTextLaw, "test_text_distribution", r"text_distribution\(\) differs from the drafts"),
        (Forgets, "test_remembers", r"define the classmethod remembers\(config\), or replay rejects"),
        (Waits, "test_no_device_synchronization", r"propose\(\) waits for the device"),
    ],
)
def test_drafters_mistake_is_named(cls: type[Drafter], test: str, sentence: str) -> None:
    with pytest.raises((AssertionError, ContractError), match=sentence):
        getattr(drafter_contract(cls), test)()
    pass_honest(test)


def test_memory_trait_matches_test_class() -> None:
    drafter_contract(SaysThatItForgets).test_remembers()
    for cls, options, remembers in ((SaysThatItForgets, {"memory": True}, True), (Forgets, {}, True)):
        own = {"drafter": cls, "options": options, "remembers": remembers}
        type("Contract", (DrafterContract,), own)().test_remembers()
    with pytest.raises(AssertionError, match=r"remembers\(config\) is False .* has remembers = True"):
        type("Contract", (DrafterContract,), {"drafter": Chain, "remembers": True})().test_remembers()


class Honest(Verifier):
    """Token verification; its children change one thing each."""

    name = "honest"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}))

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        return make_verifier("token").verify(draft, p, rng)


class TooKind(Honest):
    """Accepts a little more often than it may."""

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        if not draft.width:
            return super().verify(draft, p, rng)
        kinder = p.clone()
        kinder[:, :-1].scatter_reduce_(
            2, draft.tokens[..., None], kinder.new_full(draft.tokens.shape, 0.5)[..., None], "amax"
        )
        return super().verify(draft, kinder, rng)


class NumbersByWidth(Honest):
    """Another random number in a wider batch."""

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        rng.accept(p.new_full((draft.batch_size, draft.batch_size), 0.5), "other")
        kept = rng.accept(p.new_full((draft.batch_size, 1), 0.5), "other", draft.batch_size).squeeze(1)
        verdict = super().verify(draft, p, rng)
        return Verdict(verdict.length, torch.where(kept, verdict.token, 0))


class BeyondTheVocabulary(Honest):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        verdict = super().verify(draft, p, rng)
        return Verdict(verdict.length, verdict.token + p.shape[2])


class Column(Honest):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        verdict = super().verify(draft, p, rng)
        return Verdict(verdict.length[:, None], verdict.token)


class LongerThanTheDraft(Honest):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        verdict = super().verify(draft, p, rng)
        return Verdict(verdict.length + 1, verdict.token)


class WritesIntoP(Honest):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        verdict = super().verify(draft, p, rng)
        p[:, 0] = 0
        return verdict


class ManyTokens(Honest):
    """Draws from p itself, not from the residual, above a thousand tokens."""

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        if p.shape[2] <= 1000:
            return super().verify(draft, p, rng)
        verdict = super().verify(draft, p, rng)
        after = p.gather(1, verdict.length[:, None, None].expand(-1, 1, p.shape[2]))[:, 0]
        return Verdict(verdict.length, rng.draw(after, "other"))


class ShortIds(Honest):
    """Keeps ids of tokens in 16 bits, signed or not: wrong for tokens above 32,767 or 65,535 only."""

    BITS = 2**15

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        verdict = super().verify(draft, p, rng)
        return Verdict(verdict.length, verdict.token % self.BITS)


class UnsignedShortIds(ShortIds):
    BITS = 2**16


class OtherDevice(Honest):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        return super().verify(draft, p * torch.ones(p.shape[2], device="cpu"), rng)


class Looks(Honest):
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        return super().verify(draft, p * float(p.sum() > 0), rng)


@pytest.mark.parametrize(
    "cls, test, sentence",
    [
        (TooKind, "test_lossless_by_enumeration", "'honest' is not lossless"),
        (NumbersByWidth, "test_rows_do_not_share_state", "index depends on the number of rows of the batch"),
        (BeyondTheVocabulary, "test_verdicts_keep_the_contract", "outside of the vocabulary"),
        (Column, "test_verdicts_keep_the_contract", "a shape is off"),
        (LongerThanTheDraft, "test_verdicts_keep_the_contract", r"accepted 4 tokens of a draft that is 3 deep"),
        (WritesIntoP, "test_rows_do_not_share_state", "writes into p"),
        (ManyTokens, "test_large_vocabulary", "depends on the size of the vocabulary"),
        (ShortIds, "test_large_vocabulary", "depends on the size of the vocabulary"),
        (UnsignedShortIds, "test_large_vocabulary", "depends on the size of the vocabulary"),
        (OtherDevice, "test_no_device_synchronization", "mixes devices"),
        (Looks, "test_no_device_synchronization", "waits for the device"),
    ],
)
def test_verifiers_mistake_is_named(cls: type[Verifier], test: str, sentence: str) -> None:
    with pytest.raises((AssertionError, ContractError), match=sentence):
        getattr(verifier_contract(cls), test)()
    pass_honest(test, verifier=True)


def test_certificate_tries_large_vocabulary() -> None:
    toy = next(toy for toy in built_in_toys() if toy.name == "G1")
    for cls in (ManyTokens, ShortIds, UnsignedShortIds):
        row = certify_row(toy, "chain", DRAFTS["chain"], cls)
        assert row.failed and row.fault is not None and "depends on the size of the vocabulary" in row.fault
    assert certify_row(toy, "chain", DRAFTS["chain"], Honest).lossless
