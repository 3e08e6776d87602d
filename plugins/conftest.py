"""Fixtures that the tests of companions share with those of the core."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from fixture_modules import pytest_configure

__all__ = ["pytest_configure"]


@pytest.fixture(autouse=True, scope="module")
def own_package(request: Any) -> Iterator[None]:
    """Register the package beside a test file; `suite_fixtures` leaves out those that nothing of crossdraft needs."""
    from crossdraft.framework.plugins import manager

    name = request.path.parent.name.replace("-", "_")
    package = import_module(name) if (request.path.parent / name).is_dir() else None
    if package is None or manager().is_registered(package):
        yield
        return
    manager().register(package)
    yield
    manager().unregister(package)
