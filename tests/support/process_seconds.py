"""Seconds that each test spends on all cores, child processes included, in the file that an environment names.

``CROSSDRAFT_TEST_SECONDS=FILE pytest`` appends a line for each test: seconds, a tab, its path.
``.ci/dearest FILE`` sums by file.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

FILE = os.environ.pop("CROSSDRAFT_TEST_SECONDS", "")  # not for processes that tests start


def spent() -> float:
    """Seconds of this process and of its finished children, of users and of the system."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Append the seconds of set-up, call and teardown; short lines of several processes do not mix."""
    before = spent()
    result: Any = yield
    if FILE:
        with open(FILE, "a", encoding="utf-8") as file:
            file.write(f"{spent() - before:.3f}\t{item.nodeid.partition('::')[0]}\n")
    return result
