"""Every built-in drafter, and every option that changes what it drafts, through the contract kit."""

from typing import Any

import pytest
from token_automata import Automaton

from crossdraft.framework.engine.decoder import Decoder
from crossdraft.testing import DrafterContract


class TestNone(DrafterContract):
    drafter = "none"


class TestGrammar(DrafterContract):
    """Without a constraint it drafts nothing, so one test sets one; it permits a single token after token 1."""

    drafter = "grammar"
    options = {"gamma": 3}
    constraint: Automaton | None = None

    def decoder(self, batch_size: int, temperature: float, **loop: Any) -> Decoder:
        return super().decoder(batch_size, temperature, **{"constraint": self.constraint, **loop})

    def test_every_draft_keeps_the_contract(self) -> None:
        self.constraint = Automaton({0: {0: 0, 1: 1, 2: 0}, 1: {3: 2}, 2: {2: 0, 3: 1}}, 5, final=[0])
        super().test_every_draft_keeps_the_contract()


class TestPromptLookup(DrafterContract):
    drafter = "prompt-lookup"
    options = {"gamma": 3}


class TestDraftModel(DrafterContract):
    drafter = "draft-model"
    options = {"model": "toy", "gamma": 3}


@pytest.mark.slow
class TestDraftModelAtItsOwnTemperature(DrafterContract):
    drafter = "draft-model"
    options = {"model": "toy", "gamma": 3, "temperature": 0.6}


@pytest.mark.thorough  # as the chain above, with ragged lengths
class TestConfidencePolicy(DrafterContract):
    drafter = "draft-model"
    options = {"model": "toy", "gamma": 3, "policy": {"name": "confidence", "threshold": 0.35}}


@pytest.mark.slow
class TestConfidencePolicyBefore(DrafterContract):
    drafter = "draft-model"
    options = {"model": "toy", "gamma": 3, "policy": {"name": "confidence", "stop": "before", "threshold": 0.5}}


@pytest.mark.slow
class TestHeuristicPolicy(DrafterContract):
    drafter = "draft-model"
    options = {"model": "toy", "gamma": 3, "policy": "heuristic"}


class TestIid(DrafterContract):
    drafter = "draft-model-iid"
    options = {"model": "toy", "gamma": 2, "K": 2}


@pytest.mark.slow  # as without a delay
class TestDelayedIid(DrafterContract):
    drafter = "draft-model-iid"
    options = {"model": "toy", "gamma": 3, "K": 2, "delay": 1}


class TestTreeWithoutReplacement(DrafterContract):
    drafter = "draft-model-tree"
    options = {"model": "toy", "branching": [2, 2]}


@pytest.mark.slow
class TestTreeOfGreedySiblings(DrafterContract):
    drafter = "draft-model-tree"
    options = {"model": "toy", "branching": [2, 1], "siblings": "greedy"}


@pytest.mark.slow
class TestTopKTree(DrafterContract):
    drafter = "draft-model-tree"
    options = {"model": "toy", "choices": [[0], [1], [0, 0], [0, 2]], "siblings": "top-k"}


@pytest.mark.thorough  # drawn as the tree above
class TestSequoia(DrafterContract):
    drafter = "draft-model-tree"
    options = {"model": "toy", "growth": "sequoia", "nodes": 5, "depth": 3, "acceptance": [0.5, 0.3]}


class TestOptTree(DrafterContract):
    drafter = "draft-model-tree"
    options = {"model": "toy", "growth": "opt-tree", "nodes": 5, "depth": 3, "threshold": 0.05}


class TestDynamicTree(DrafterContract):
    drafter = "draft-model-dynamic-tree"
    options = {"model": "toy", "depth": 3, "top_k": 2, "nodes": 5}


@pytest.mark.slow
class TestLearntThresholdPolicy(DrafterContract):
    drafter = "draft-model"
    options = {"model": "toy", "gamma": 3, "policy": {"name": "learnt-threshold", "threshold": 0.35}}
    remembers = True


@pytest.mark.slow
class TestBatchSizePolicy(DrafterContract):
    drafter = "draft-model"
    options = {"model": "toy", "gamma": 3, "policy": {"name": "batch-size", "lengths": [[1, 3], [2, 2], [3, 1]]}}
    remembers = True  # a sequence's drafts depend on how many there are beside it
