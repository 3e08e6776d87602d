"""Fixtures of the tests of passes by OpenVINO."""

from collections.abc import Iterator
from typing import Any

import crossdraft_openvino  # noqa: F401 - before openvino, see there
import pytest

from crossdraft.framework import plugins


@pytest.fixture(scope="module")
def passes_by_openvino(tmp_path_factory: Any) -> Iterator[None]:
    """OpenVINO computes passes, with graphs of this module; the companion need not be installed."""
    companion = pytest.importorskip("crossdraft_openvino")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSDRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("CROSSDRAFT_OPENVINO", "1")
        installed = plugins.manager().is_registered(companion)
        if not installed:
            plugins.manager().register(companion, "openvino")
        yield
        if not installed:
            plugins.manager().unregister(name="openvino")


@pytest.fixture(autouse=True)
def fresh_warnings() -> None:
    """Every test sees the warnings of its own models."""
    from crossdraft_openvino import slots

    slots._warn_once.cache_clear()
