"""Contract tests compute tiny tensors: in the process of whoever inherits them, they use one of PyTorch's threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from crossdraft.framework.testing.settings import OneThread
from crossdraft.testing import DrafterContract, VerifierContract


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """All threads, as in a process without test setup; the contracts restore them after each test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == 2


class TestOneThread(OneThread):
    def test_contracts_use_one_thread(self) -> None:
        assert torch.get_num_threads() == 1
        assert issubclass(DrafterContract, OneThread) and issubclass(VerifierContract, OneThread)
