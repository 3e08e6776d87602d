"""The drafters that read the target's hidden states through the contract kit, with random heads of a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from head_checkpoints import write_heads
from head_contract import Heads

from crossdraft.testing import TinyModel


@pytest.fixture(scope="module")
def heads(tmp_path_factory: Any) -> Path:
    """Directories with heads of every kind."""
    root = tmp_path_factory.mktemp("heads")
    write_heads(root, TinyModel.model(), target_ids=torch.tensor([0, 1, 2, 3, 4, 5, 7, 8, 11]))
    return root


class TestMedusa(Heads):
    drafter = "medusa"


@pytest.mark.slow
class TestMedusaTree(Heads):
    drafter = "medusa"
    options = {"branching": [2, 2]}


@pytest.mark.slow  # as EAGLE-3
class TestEagle(Heads):
    drafter = "eagle"
    options = {"gamma": 3}


@pytest.mark.slow
class TestEagleUnderAConfidencePolicy(Heads):
    drafter = "eagle"
    options = {"gamma": 3, "policy": {"name": "confidence", "threshold": 0.3}}


@pytest.mark.slow
class TestEagleUnderTheHeuristic(Heads):
    drafter = "eagle"
    options = {"gamma": 4, "policy": "heuristic"}


@pytest.mark.slow
class TestEagleTree(Heads):
    drafter = "eagle"
    options = {"tree": "static", "siblings": "without-replacement", "branching": [2, 1]}


@pytest.mark.slow
class TestEagle3(Heads):
    drafter = "eagle3"
    options = {"gamma": 2, "layers": [2, 3, 1]}


@pytest.mark.slow  # TestDynamicTree is the quicker one
class TestEagle3DynamicTree(Heads):
    drafter = "eagle3"
    options = {"tree": "dynamic", "depth": 3, "top_k": 2, "nodes": 5, "layers": [2, 3, 1]}
