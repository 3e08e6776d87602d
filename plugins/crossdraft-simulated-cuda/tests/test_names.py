"""The former name of the simulated device, and what the contract kit does without this distribution."""

import sys
from types import SimpleNamespace
from typing import Any

import crossdraft_simulated_cuda
import pytest
import torch

from crossdraft.testing import VerifierContract
from crossdraft.verifiers.token import Token

FORMER = "crossdraft.testing.simulated_cuda"


def test_former_name_is_the_same_device(monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, FORMER, raising=False)
    from crossdraft.testing import simulated_cuda

    for name in simulated_cuda.__all__:
        assert getattr(simulated_cuda, name) is getattr(crossdraft_simulated_cuda, name)


def test_former_name_without_distribution_names_remedy(monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, FORMER, raising=False)
    monkeypatch.setitem(sys.modules, "crossdraft_simulated_cuda", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install plugins/crossdraft-simulated-cuda$"):
        __import__(FORMER)


def test_kit_on_gpu_without_distribution_names_remedy(monkeypatch: Any) -> None:
    contract: Any = type("Contract", (VerifierContract,), {"verifier": Token})()
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True))
    for module in ("crossdraft_simulated_cuda", "crossdraft_simulated_cuda.device_comparison"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(pytest.skip.Exception, match="pip install plugins/crossdraft-simulated-cuda"):
        contract.test_on_cuda()
