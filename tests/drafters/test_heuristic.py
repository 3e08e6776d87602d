"""The policy ``heuristic``: its schedule of draft lengths, and an unchanged output."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from crossdraft.drafters.draft_model.draft_model import DraftModelChain
from crossdraft.drafters.none import NoDrafter
from crossdraft.framework import plugins
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.steps import Response
from crossdraft.framework.contracts.verifier import incompatible
from crossdraft.verifiers.greedy import Greedy
from crossdraft.verifiers.token import Token

PROMPTS = [[5, 9, 9, 13], [3, 1], [7, 7, 2], [11], [4, 4, 8, 2, 6]]
NEW = 40


@pytest.fixture
def responses(decoder: Callable, tiny_model: Callable) -> Callable[..., list[Response]]:
    """``responses(verifier, noise, batch_size, ...)`` of a draft model: the target with noise on its weights."""

    def run(
        verifier: Any, noise: float, batch_size: int, temperature: float = 0.0, gamma: int = 20, **policy: int
    ) -> list[Response]:
        loop = decoder(
            tiny_model("llama"),
            DraftModelChain,
            {"model": "noisy", "gamma": gamma, "policy": {"name": "heuristic", **policy}},
            verifier,
            drafting=tiny_model("llama", noise=noise) if noise else tiny_model("llama"),
            temperature=temperature,
            batch_size=batch_size,
            max_new_tokens=NEW,
            rng=CounterRng(7),
        )
        return sorted(loop.run(PROMPTS), key=lambda response: response.index)

    return run


def expected(response: Response, start: int, maximum: int) -> list[int]:
    """Expected length of each draft, from the outcome of the ones before it."""
    length, left, lengths = start, NEW, []
    for r in response.steps:
        drafted = min(length, left - 1)
        lengths.append(drafted)
        if drafted:
            length = min(drafted + 2, maximum) if r.tau == drafted else max(length - 1, 1)
        left -= r.emitted
    return lengths


def test_perfect_drafter_drafts_ever_more(responses: Callable[..., list[Response]]) -> None:
    for response in responses(Greedy, 0.0, 3):
        assert [r.nodes for r in response.steps] == [5, 7, 9, 11, 3]  # the last for want of tokens to draft
    for response in responses(Greedy, 0.0, 3, gamma=3):  # the first draft is no longer than gamma either
        assert [r.nodes for r in response.steps][:2] == [3, 3]
    for response in responses(Greedy, 0.0, 3, gamma=8, start_length=3):
        assert [r.nodes for r in response.steps][:4] == [3, 5, 7, 8]


@pytest.mark.parametrize("batch_size, temperature", [(1, 1.0), (2, 0.0), (8, 1.0)])
def test_lengths_per_sequence(responses: Callable[..., list[Response]], batch_size: int, temperature: float) -> None:
    visited = set()
    for response in responses(Token, 0.02, batch_size, temperature, start_length=3, gamma=6):
        lengths = [r.nodes for r in response.steps]
        assert lengths == expected(response, 3, 6)
        visited |= set(lengths)
    assert {1, 2, 3, 5} <= visited, "the drafter must be right at times and wrong at times"


def test_output_is_target_s(decoder: Callable, tiny_model: Callable, responses: Callable) -> None:
    plain = decoder(tiny_model("llama"), NoDrafter, {}, Greedy, batch_size=2, max_new_tokens=NEW)
    outputs = {response.index: response.tokens for response in plain.run(PROMPTS)}
    for response in responses(Greedy, 0.02, 2):
        assert response.tokens == outputs[response.index]


def test_rule_that_needs_fixed_length_refuses_it() -> None:
    sampling = Sampling(temperature=1)
    config = DraftModelChain.Config.model_validate({"model": "m", "gamma": 20, "policy": "heuristic"})
    traits = DraftModelChain.traits(config, sampling)
    assert traits.nodes == 20
    outputs = {
        name: incompatible(
            "draft-model",
            traits,
            name,
            plugins.get("verifiers", name).traits(plugins.get("verifiers", name).Config()),
            sampling,
        )
        for name in ("greedy-block", "token", "block")
    }
    assert outputs["greedy-block"] is not None and "fixed length" in outputs["greedy-block"]
    assert outputs["token"] is None and outputs["block"] is None


def test_first_draft_longer_than_any_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"start_length \(9\) is more than gamma \(8\)"):
        DraftModelChain.Config.model_validate(
            {"model": "m", "gamma": 8, "policy": {"name": "heuristic", "start_length": 9}}
        )
