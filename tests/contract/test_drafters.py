"""Every built-in drafter, and every option that changes what it drafts, through the contract kit."""

import pytest

from crossdraft.testing import DrafterContract


class TestNone(DrafterContract):
    drafter = "none"


class TestPromptLookup(DrafterContract):
    drafter = "prompt-lookup"
    options = {"gamma": 3}


class TestTokenRecycling(DrafterContract):
    drafter = "token-recycling"
    options = {"nodes": 6, "width": 3}
    remembers = True


@pytest.mark.slow
class TestTokenRecyclingChain(DrafterContract):
    drafter = "token-recycling"
    options = {"width": 1}
    remembers = True


class TestSmallLM(DrafterContract):
    drafter = "small-lm"
    options = {"model": "toy", "gamma": 3}


@pytest.mark.slow
class TestSmallLMAtItsOwnTemperature(DrafterContract):
    drafter = "small-lm"
    options = {"model": "toy", "gamma": 3, "temperature": 0.6}


@pytest.mark.slow
class TestConfidencePolicy(DrafterContract):
    drafter = "small-lm"
    options = {"model": "toy", "gamma": 3, "policy": {"name": "confidence", "threshold": 0.35}}
    asks_device = True


@pytest.mark.slow
class TestConfidencePolicyBefore(DrafterContract):
    drafter = "small-lm"
    options = {"model": "toy", "gamma": 3, "policy": {"name": "confidence", "stop": "before", "threshold": 0.5}}
    asks_device = True


@pytest.mark.slow
class TestHeuristicPolicy(DrafterContract):
    drafter = "small-lm"
    options = {"model": "toy", "gamma": 3, "policy": "heuristic"}


class TestDynamicThreshold(DrafterContract):
    drafter = "dynamic-threshold"
    options = {"model": "toy", "gamma": 3, "threshold": 0.35}
    asks_device = True


class TestHeuristicSchedule(DrafterContract):
    drafter = "heuristic-schedule"
    options = {"model": "toy", "gamma": 3}


class TestIid(DrafterContract):
    drafter = "small-lm-iid"
    options = {"model": "toy", "gamma": 2, "K": 2}
    asks_device = True  # once a draft: how many nodes differ


class TestTreeWithoutReplacement(DrafterContract):
    drafter = "small-lm-tree"
    options = {"model": "toy", "branching": [2, 2]}


@pytest.mark.slow
class TestTreeOfGreedySiblings(DrafterContract):
    drafter = "small-lm-tree"
    options = {"model": "toy", "branching": [2, 1], "siblings": "greedy"}


@pytest.mark.slow
class TestTopKTree(DrafterContract):
    drafter = "small-lm-tree"
    options = {"model": "toy", "choices": [[0], [1], [0, 0], [0, 2]], "siblings": "top-k"}


class TestDynamicTree(DrafterContract):
    drafter = "small-lm-dynamic-tree"
    options = {"model": "toy", "depth": 3, "top_k": 2, "nodes": 5}
