"""Recordings: what is recorded, what makes way, what fails with one warning, and which models get graphs."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda_graphs import NEW, PROMPTS, Recorder

from crossdraft.framework import plugins
from crossdraft.framework.lm import cuda_graphs
from crossdraft.framework.lm.cuda_graphs import (
    CaptureLimits,
    CudaGraphRunner,
    missed_passes,
    recording,
    runner_for,
)
from crossdraft.framework.lm.transformers_lm import TransformersLM

pytestmark = pytest.mark.usefixtures("small_buckets")


def double(constant: int, x: torch.Tensor, y: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return 2 * x + constant, y


def test_called_shape_is_recorded() -> None:
    recorder = Recorder()
    call = CudaGraphRunner(recorder, "test")
    events = []
    for i in range(4):
        out, nothing = call(double, {"x": torch.full((2,), i)}, 1)
        assert out.tolist() == [2 * i + 1] * 2 and nothing is None
        events.append((recorder.recorded, recorder.replayed, len(call)))
    assert events == [(1, 0, 1), (1, 1, 1), (1, 2, 1), (1, 3, 1)]
    # Another constant, shape, dtype or set of tensors is another recording.
    x = torch.zeros(2, dtype=torch.long)
    for tensors, constant in (({"x": x}, 2), ({"x": x[:1]}, 1), ({"x": x.float()}, 1), ({"x": x, "y": x}, 1)):
        call(double, tensors, constant)
    assert (recorder.recorded, recorder.replayed) == (5, 3)


def test_inputs_may_be_expanded_views() -> None:
    call, x = CudaGraphRunner(Recorder(), "test"), torch.arange(2)
    for i in range(3):
        assert call(double, {"x": (x + i).expand(3, 2)}, 0)[0].tolist() == [[2 * i, 2 * i + 2]] * 3  # type: ignore[union-attr]


def test_recordings_are_kept() -> None:
    """Neither another warm-up nor other calls take their place."""
    call, missed = CudaGraphRunner(Recorder(), "test"), missed_passes()
    for sizes in ((1, 2, 3), (3, 4, 5, 6)):
        with recording(CaptureLimits(depth=1, nodes=1)):
            for size in sizes:
                call(double, {"x": torch.ones(size)}, 0)
    for size in range(7, 400):
        call(double, {"x": torch.ones(size)}, 0)
    assert len(call) == 399
    with recording(None):
        for size in range(1, 400):
            assert call(double, {"x": torch.ones(size)}, 0)[0].tolist() == [2] * size  # type: ignore[union-attr]
        assert missed_passes() == missed
        call(double, {"x": torch.ones(400)}, 0)
    assert missed_passes() == missed + 1


@pytest.mark.parametrize("when", ["warm_up", "record"])
def test_failed_recording_warns_once(
    tiny_model: Callable, decoder: Callable, caplog: Any, fresh_warnings: None, when: str
) -> None:
    refused = []

    class Refusing(Recorder):
        def refuse(self, run: Callable) -> Any:
            refused.append(self)
            run()
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    setattr(Refusing, when, Refusing.refuse)

    class RefusedLM(TransformersLM):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments, graphs=CudaGraphRunner(Refusing(), "LlamaForCausalLM"))

    def run(lm: type[TransformersLM]) -> list:
        small, greedy = plugins.get("drafters", "draft-model"), plugins.get("verifiers", "greedy")
        options = {"model": "noisy", "gamma": 3}
        models: Any = dict(drafting=tiny_model("llama", noise=0.05), lm=lm)
        loop = decoder(tiny_model("llama"), small, options, greedy, batch_size=3, max_new_tokens=NEW, **models)
        return sorted((r.index, r.tokens) for r in loop.run(PROMPTS))

    with caplog.at_level(logging.WARNING):
        assert run(RefusedLM) == run(TransformersLM)
    assert len(refused) == len(set(refused)) == 2, "target and drafter are asked once each"
    assert [r.getMessage() for r in caplog.records if r.name == cuda_graphs.__name__] == [
        "crossdraft: LlamaForCausalLM runs without CUDA graphs, which makes its passes slower: "
        "operation not permitted when stream is capturing"
    ]


class SomeModel:
    def __init__(self, device: str, **attributes: Any):
        self.device = torch.device(device)
        self.weights: list[Any] = []
        vars(self).update(attributes)

    def parameters(self) -> list[Any]:
        return self.weights


def test_models_with_graphs(monkeypatch: Any, caplog: Any, fresh_warnings: None) -> None:
    monkeypatch.delenv("CROSSDRAFT_CUDA_GRAPHS", raising=False)
    assert not runner_for(SomeModel("cpu")).records
    assert runner_for(SomeModel("cuda")).records
    assert runner_for(SomeModel("cuda", hf_device_map={"": 0})).records
    assert not caplog.records
    assert not runner_for(SomeModel("cuda", hf_device_map={"model.layers.0": 0, "model.layers.1": 1})).records
    assert "SomeModel runs without CUDA graphs" in caplog.text and "spread over 2 devices" in caplog.text
    assert not runner_for(SomeModel("cuda", weights=[SimpleNamespace(placements=())])).records
    monkeypatch.setenv("CROSSDRAFT_CUDA_GRAPHS", "0")
    assert not runner_for(SomeModel("cuda")).records
    assert len(caplog.records) == 2 and "split over several processes" in caplog.text
