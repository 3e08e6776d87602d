"""Import path of the helpers of these tests, and the plug-in, registered if it is not installed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import crossdraft_llamacpp
import pytest

from crossdraft.framework.plugins import entries, manager

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    absent = "llama.cpp" not in entries("backends")
    if absent:
        manager().register(crossdraft_llamacpp, "llamacpp")
    yield
    if absent:
        manager().unregister(crossdraft_llamacpp)
