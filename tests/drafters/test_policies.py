"""Length policies: replayability and the limits of their options."""

from typing import Any

import pytest
from pydantic import ValidationError

from crossdraft import generate
from crossdraft.framework import plugins
from crossdraft.framework.contracts.sampling import Sampling


def test_only_static_length_is_replayable() -> None:
    drafter = plugins.get("drafters", "draft-model")
    for policy, replayable in (("static", True), ("heuristic", False), ("confidence", False)):
        config = drafter.Config(model="m", policy=policy)
        assert drafter.traits(config, Sampling()).replayable is replayable


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("draft-model", {"policy": "heuristc"}, "heuristc"),
        ("draft-model", {"policy": {"name": "confidence", "treshold": 0.3}}, "treshold"),
        ("draft-model", {"policy": {"name": "static", "threshold": 0.3}}, "threshold"),
        ("draft-model", {"policy": {"name": "confidence", "threshold": 2}}, "less than or equal to 1"),
        ("draft-model", {"gamma": 3, "policy": {"name": "heuristic", "start_length": 4}}, "more than gamma"),
        ("eagle", {"tree": "dynamic", "policy": "heuristic"}, "policy belongs to a chain"),
        ("eagle3", {"gamma": 5000}, "less than or equal to 1024"),
        ("draft-model-tree", {"branching": [200, 200, 200]}, "8040200 nodes; the maximum is 4096"),
        ("draft-model-tree", {"branching": [1000, 1000, 1000]}, "1000 children of a node; the maximum is 256"),
        ("draft-model-tree", {"branching": [256] * 1024}, "more than 10.12 nodes; the maximum is 4096"),
        ("draft-model-tree", {"branching": [1] * 1025}, "1025 levels; the maximum is 1024"),
        (
            "draft-model-tree",
            {"choices": [[10**9]], "siblings": "top-k"},
            "1000000001 ranks of siblings; the maximum is 256",
        ),
        ("draft-model-iid", {"K": 4000}, "less than or equal to 256"),
        ("draft-model-iid", {"K": 200, "gamma": 200}, "40000 nodes; the maximum is 4096"),
        ("draft-model", {"gamma": True}, "should be a valid integer"),
        ("draft-model", {"temperature": float("inf")}, "should be a finite number"),
    ],
)
def test_policy_that_does_not_fit_is_refused(name: str, options: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        plugins.get("drafters", name).Config(model="m", **options)


def test_generate_checks_context_of_drafting_model(models: dict[str, str]) -> None:
    """As recipes do: a drafter whose positions end earlier would draft nonsense without a word."""
    from crossdraft import ModelError

    drafter = {"name": "draft-model", "model": models["short"]}
    with pytest.raises(ModelError, match=r"has a context of 16 tokens, but sequences reach \d+ here"):
        generate(models["target"], ["w5 w6 w7"], drafter=drafter, max_new_tokens=32)


def test_dynamic_tree_reserves_fed_nodes(models: dict[str, str]) -> None:
    """Five levels of eight nodes are fed, twelve are kept."""
    drafter = {"name": "draft-model-dynamic-tree", "model": models["same"], "depth": 5, "top_k": 8, "nodes": 12}
    separate = generate(models["target"], ["w5 w6 w7"], drafter="none", temperature=0, max_new_tokens=24)
    responses = generate(models["target"], ["w5 w6 w7"], drafter=drafter, temperature=0, max_new_tokens=24)
    assert responses[0].tokens == separate[0].tokens and max(r.tau for r in responses[0].steps) > 1
