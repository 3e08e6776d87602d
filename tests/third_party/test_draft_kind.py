"""A kind of draft that the framework does not know, with a drafter and a verifier for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import save_model

from crossdraft import (
    CHAIN,
    IID,
    ContractError,
    Draft,
    Drafter,
    DraftKind,
    DraftTraits,
    StrategyConfig,
    UsageError,
    Verdict,
    Verifier,
    VerifierTraits,
    generate,
    load_model,
)
from crossdraft.framework.certificate.certify import certify
from crossdraft.framework.certificate.toys import built_in_toys

#: Several guesses of the next token, none of which has children: only the root is followed by drafted tokens.
STAR = DraftKind("star", frozenset({"one-level"}))


class Neighbours(Drafter):
    """Drafts the ids on either side of the last token."""

    name = "neighbours"

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(STAR, point_mass=True, nodes=2, levels=1)

    def propose(self, sequences: Any, rng: Any) -> Draft:
        vocab = self.context.vocab_size
        last = torch.tensor([[history[-1] if history else 0] for history in sequences.history], device=sequences.device)
        tokens = (last + torch.tensor([[1, 2]], device=sequences.device)) % vocab
        valid = torch.tensor([[limit > 0] * 2 for limit in sequences.limit], device=sequences.device)
        return Draft(tokens, torch.full_like(tokens, -1), valid, kind=STAR, levels=1)


class StarMatch(Verifier):
    """Samples the target after the root and keeps the child that carries the sampled token."""

    name = "star-match"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(frozenset({"one-level"}))

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        rows = torch.arange(draft.batch_size, device=p.device)
        first = rng.draw(p[:, 0], index=0)
        if not draft.width:
            return Verdict(torch.zeros_like(first), first)
        match = (draft.tokens == first[:, None]) & draft.valid
        result, node = match.any(1), match.long().argmax(1)
        second = rng.draw(p[rows, node + 1], index=1)
        path = torch.where(result, node, -1)[:, None]
        return Verdict(result.long(), torch.where(result, second, first), path)


class KeepsTheFirst(StarMatch):
    """Always accepts the first child."""

    name = "keeps-the-first"

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        verdict = super().verify(draft, p, rng)
        if not draft.width:
            return verdict
        second = rng.draw(p[:, 1], index=2)
        used = draft.valid[:, 0]
        path = torch.where(used, 0, -1)[:, None]
        return Verdict(used.long(), torch.where(used, second, verdict.token), path)


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> Any:
    return load_model(save_model(tmp_path_factory.mktemp("target")), dtype="float32")


def test_greedy_text_is_targets(target: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0}
    plain = generate(target, [[5, 6, 7], [8]], drafter="none", **options)
    starred = generate(target, [[5, 6, 7], [8]], drafter=Neighbours, verifier=StarMatch, **options)
    assert [item.tokens for item in starred] == [item.tokens for item in plain]
    assert any(step.nodes == 2 for item in starred for step in item.steps)


@pytest.mark.parametrize("rule, lossless", [(StarMatch, True), (KeepsTheFirst, False)])
def test_certificate_takes_it(rule: type[Verifier], lossless: bool) -> None:
    toy = next(toy for toy in built_in_toys() if toy.name == "T0")
    certificate = certify(toy, lambda context, gamma: Neighbours(StrategyConfig(), context), rule, gamma=1)
    assert (certificate.tv < 1e-12) is lossless, certificate


def test_other_verifiers_refuse_it_and_it_refuses_other_drafts(target: Any) -> None:
    with pytest.raises(UsageError, match="makes 'star' drafts, but verifier 'block' accepts only: chain"):
        generate(target, [[5]], drafter=Neighbours, verifier="block")
    with pytest.raises(UsageError, match="accepts only: drafts with one-level"):
        generate(target, [[5]], drafter="prompt-lookup", verifier=StarMatch)
    with pytest.raises(UsageError, match="name the verifier"):
        generate(target, [[5]], drafter=Neighbours, temperature=1)
    assert not StarMatch.traits(None).kinds and not StarMatch.traits(None).accepts_kind(CHAIN)


def test_draft_of_another_kind_is_named(target: Any) -> None:
    class Wrong(Neighbours):
        def propose(self, sequences: Any, rng: Any) -> Draft:
            draft = super().propose(sequences, rng)
            draft.kind = IID
            return draft

    with pytest.raises(ContractError, match=r"made a draft 'iid', but traits.kind is 'star'"):
        generate(target, [[5, 6]], drafter=Wrong, verifier=StarMatch, max_new_tokens=4)
