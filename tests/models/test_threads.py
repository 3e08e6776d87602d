"""The number of threads is PyTorch's, or that of a plug-in."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from crossdraft.framework import plugins
from crossdraft.framework.contracts.hookspecs import hookimpl
from crossdraft.framework.models.threads import ThreadCount, choose_for_group, disturbance, restored, thread_count


class OneThread(ThreadCount):
    number = 1  # type: ignore[assignment]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A plug-in that decodes with one thread."""
    plugin = SimpleNamespace(crossdraft_thread_count=hookimpl(lambda lm: OneThread()))
    plugins.manager().register(plugin, "one thread")
    yield
    plugins.manager().unregister(plugin)


def test_number_is_that_of_pytorch() -> None:
    count = ThreadCount()
    assert count.number == count.max_threads == torch.get_num_threads() and count.describe() == str(count.number)
    assert list(count.applied([1, 2])) == [1, 2]


@pytest.mark.usefixtures("one_thread")
def test_number_of_a_plug_in_is_taken() -> None:
    with restored():
        torch.set_num_threads(2)
        assert thread_count().number == 1
        chosen = choose_for_group(None, None)
        assert (chosen["number"], chosen["most"], torch.get_num_threads()) == (1, 2, 1)


def test_disturbed_group_gets_sentence() -> None:
    assert disturbance(0.05, 1.0, 2) == "" == disturbance(0.5, 1.0, 1) == disturbance(0.0, 0.0, 2)
    assert "50% of the time" in disturbance(0.5, 1.0, 2)
