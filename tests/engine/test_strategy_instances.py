"""Strategies as objects: a drafter that its user holds keeps what it learnt, and serves one run at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from crossdraft_server.custom_generate import custom_generate
from tiny_models import save_model

from crossdraft import (
    Draft,
    DraftContext,
    Drafter,
    DraftTraits,
    LoadedModel,
    StrategyConfig,
    UsageError,
    Verifier,
    generate,
    load_model,
    make_verifier,
)
from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup
from crossdraft.framework.api.build import TargetContext, build_decoder, configured, make_slots, slot_length
from crossdraft.framework.contracts.draft_kind import CHAIN, DETERMINISTIC
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.errors import ContractError


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> LoadedModel:
    return load_model(save_model(tmp_path_factory.mktemp("models") / "target"), dtype="float32", device="cpu")


class Echo(Drafter):
    """Drafts scripted tokens, and records the finish reasons."""

    name = "echo"

    class Config(StrategyConfig):
        gamma: int = 2

    config: Config

    def __init__(self, config: StrategyConfig | None = None, context: DraftContext | None = None):
        super().__init__(config, context)
        self.ends: list[str | None] = []
        self.contexts = 0

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        self.contexts = getattr(self, "contexts", 0) + 1

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma)

    def propose(self, sequences: Any, rng: Any) -> Draft:
        rows = [[7] * min(self.config.gamma, limit) for limit in sequences.limit]
        return Draft.copied(rows, sequences.device)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self.ends.append(finish_reason)


class Bound(Echo):
    """One that is made for a context, as most drafters with a model are."""

    name = "bound"
    attach = Drafter.attach

    def __init__(self, config: StrategyConfig | None = None, context: DraftContext | None = None):
        super().__init__(config, context)
        self.rows = context.batch_size if context is not None else 0


def test_class_instance_name_and_mapping_are_equal(target: LoadedModel) -> None:
    prompts, request = [[5, 9, 5, 9], [6, 6]], {"max_new_tokens": 6, "seed": 1}
    config = PromptLookup.Config(gamma=3)
    arguments: list[Any] = [PromptLookup(config), (PromptLookup, config), {"name": "prompt-lookup", "gamma": 3}]
    outputs = [[r.tokens for r in generate(target, prompts, drafter=drafter, **request)] for drafter in arguments]
    assert outputs[0] == outputs[1] == outputs[2]
    outputs = [
        [r.tokens for r in generate(target, prompts, drafter=d, **request)] for d in (PromptLookup, "prompt-lookup")
    ]
    assert outputs[0] == outputs[1]


def test_instance_lives_through_runs_of_any_size(target: LoadedModel) -> None:
    drafter = Echo(Echo.Config(gamma=3))
    for calls, prompts in enumerate([[[5]], [[5], [6], [7]], [[8, 9]]], 1):
        responses = generate(target, prompts, drafter=drafter, max_new_tokens=3)
        assert drafter.contexts == calls and drafter.context.batch_size == len(prompts)
        assert len(responses) == len(prompts)
    assert drafter.ends == ["length"] * 5
    inputs = torch.tensor([[5, 6, 7]])
    target.model.generate(inputs, max_new_tokens=3, custom_generate=custom_generate, drafter=drafter)
    assert drafter.contexts == 4 and len(drafter.ends) == 6


def test_verifier_may_be_instance(target: LoadedModel) -> None:
    events: list[int] = []

    class Watched(type(make_verifier("token"))):
        def verify(self, draft: Any, p: Any, rng: Any) -> Any:
            events.append(draft.width)
            return super().verify(draft, p, rng)

    tokens = [
        generate(target, [[5, 9, 5]], drafter=Echo, verifier=verifier, max_new_tokens=5, seed=2)[0].tokens
        for verifier in (Watched(), "token")
    ]
    assert tokens[0] == tokens[1] and events


def refused(target: LoadedModel, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        generate(target, [[5]], **{"max_new_tokens": 2, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def context(target: LoadedModel) -> TargetContext:
    lm = make_slots(target, 1, 40)
    return TargetContext.of(target, lm, Sampling(), slot=40, sequence=32)


def test_instances_that_cannot_be_used_are_refused(target: LoadedModel) -> None:
    bound = Bound(Bound.Config(), context(target))
    assert "this Bound was made for one context and cannot draft in another" in refused(target, drafter=bound)
    assert refused(target, drafter=(Echo(), Echo.Config(gamma=3))).startswith("this Echo already has a config")
    assert "must be" in refused(target, drafter=Echo(), max_new_tokens=0)
    assert "a drafter is given by its name" in refused(target, drafter=make_verifier("token"))
    assert "a verifier is given by its name" in refused(target, verifier=Echo())
    odd = Echo(PromptLookup.Config())
    assert "the config of drafter 'echo' is" in refused(target, drafter=odd)
    assert len(generate(target, [[5]], drafter=Bound(), max_new_tokens=2)) == 1, "it was made for no context"


@pytest.mark.parametrize("which", ["drafter", "verifier"])
def test_two_runs_at_time_are_refused(target: LoadedModel, which: str) -> None:
    """An instance that is handed on while a run is under way would mix the two."""
    drafter, verifier = Echo(), make_verifier("greedy-block")
    pair = drafter, verifier

    def decoder() -> Decoder:
        ours = [
            item if kind == which else type(item)() for kind, item in zip(("drafter", "verifier"), pair, strict=True)
        ]
        loop = build_decoder(context(target), configured("drafters", ours[0]), ours[1], max_new_tokens=8)
        return loop

    first = decoder()
    responses = first.run([[5, 9], [6, 6]])
    next(responses)
    second = decoder()
    with pytest.raises(UsageError, match="is used by another run"):
        next(responses)
    assert [len(r.tokens) for r in second.run([[5, 9]])] == [8]
    with pytest.raises(UsageError, match="is used by another run"):
        list(first.run([[5]]))


def test_traits_that_raise_are_reported_by_name(target: LoadedModel) -> None:
    class Broken(Echo):
        name = "broken"

        @classmethod
        def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
            raise SystemExit("bye")

    for call in (
        lambda: generate(target, [[5]], drafter=Broken, max_new_tokens=2),
        lambda: slot_length(5, [(Broken, Broken.Config())], Sampling()),
    ):
        with pytest.raises(ContractError, match=r"the drafter 'broken' is unusable: traits\(\) raised SystemExit: bye"):
            call()

    class Odd(type(make_verifier("token"))):
        name = "odd"

        @classmethod
        def traits(cls, config: Any) -> Any:
            return None

    with pytest.raises(ContractError, match=r"the verifier 'odd' is unusable: traits\(\) must return"):
        generate(target, [[5]], drafter=Echo, verifier=Odd, max_new_tokens=2)


def test_lists_become_chains() -> None:
    rows: list[Sequence[int]] = [[4, 5, 6], [], (7,)]
    draft = Draft.copied(rows, "cpu")
    assert draft.is_chain and draft.point_mass and draft.tokens.tolist() == [[4, 5, 6], [0, 0, 0], [7, 0, 0]]
    assert draft.valid.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    for nothing in ([[], []], []):
        assert Draft.copied(nothing, "cpu").tokens.shape == (len(nothing), 0)


def test_lists_with_parents_become_trees() -> None:
    draft = Draft.copied([[4, 5, 6, 7], [], [8]], "cpu", [[-1, 0, 0, 2], [], [-1]])
    assert draft.kind is DETERMINISTIC and draft.point_mass and draft.levels == 3
    assert draft.tokens.tolist() == [[4, 5, 6, 7], [0] * 4, [8, 0, 0, 0]]
    assert draft.parents.tolist() == [[-1, 0, 0, 2], [-1] * 4, [-1] * 4]
    assert draft.count.tolist() == [4, 0, 1] and draft.depth[0].tolist() == [1, 2, 2, 3]
    assert Draft.copied([[], []], "cpu", [[], []]).tokens.shape == (2, 0)


def test_verifier_may_have_attribute_of_any_name(target: LoadedModel) -> None:
    class Named(type(make_verifier("token"))):
        rule = "what a rule calls its own"

    assert issubclass(Named, Verifier)
    assert len(generate(target, [[5]], drafter=Echo, verifier=Named, max_new_tokens=3)[0].tokens) == 3
