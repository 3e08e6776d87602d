"""Steps are decoded with PyTorch's number of threads, or as a plug-in wraps them."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossdraft import generate, load_model
from crossdraft.framework import plugins
from crossdraft.framework.contracts.hookspecs import hookimpl
from crossdraft.framework.runs.threads import disturbance, one_thread, restored


@pytest.fixture
def one_thread_a_step() -> Iterator[None]:
    """A plug-in that decodes every step with one thread."""

    def applied(lm: Any, steps: Iterator[Any]) -> Iterator[Any]:
        while True:
            with one_thread():
                try:
                    item = next(steps)
                except StopIteration:
                    return
            yield item

    plugin = SimpleNamespace(crossdraft_decoding_steps=hookimpl(applied))
    plugins.manager().register(plugin, "one thread")
    yield
    plugins.manager().unregister(plugin)


@pytest.mark.usefixtures("one_thread_a_step")
def test_plug_in_wraps_the_steps(models: dict[str, str]) -> None:
    inside: list[int] = []
    with restored():
        torch.set_num_threads(2)
        generate(
            load_model(models["target"], device="cpu"),
            [[1, 2, 3]],
            drafter="none",
            max_new_tokens=3,
            ignore_eos=True,
            on_step=lambda _: inside.append(torch.get_num_threads()),
        )
        assert (inside, torch.get_num_threads()) == ([1, 1, 1], 2)


def test_disturbed_group_gets_sentence() -> None:
    with restored():
        torch.set_num_threads(1)
        assert disturbance(0.5, 1.0) == ""
        torch.set_num_threads(2)
        assert disturbance(0.05, 1.0) == "" == disturbance(0.0, 0.0)
        assert "50% of the time" in disturbance(0.5, 1.0)
