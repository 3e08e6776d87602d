"""CUDA graphs live as long as their model, and no longer."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import ref

import pytest
import torch
from run_fixtures import save_models

from crossdraft import generate, load_model
from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.lm import cuda_graphs, graph_buckets
from crossdraft.framework.lm.idle import free_idle
from crossdraft.testing.simulated_cuda import device

pytestmark = pytest.mark.simulated

PROMPTS = [[5, 9, 12, 7, 9, 12, 7], [6], [8, 6, 8, 6, 8, 6, 8]]
OTHERS = [[7, 11, 12], [9, 6, 6, 7, 8]]
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "batch_size": 2, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, str]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def target(models: dict[str, str]) -> Iterator[LoadedModel]:
    free_idle()
    gc.collect()
    yield load_model(models["target"], device="cuda", dtype="float32")
    device.forget()


def tokens(model: LoadedModel, prompts: Any = PROMPTS, **options: Any) -> list[list[int]]:
    return [list(response.tokens) for response in generate(model, prompts, **{**OPTIONS, **options})]


def captures(*arguments: Any, **options: Any) -> int:
    with device.counting() as counts:
        tokens(*arguments, **options)
    assert counts.replays
    return counts.captures


DRAFTERS: list[dict[str, Any]] = [
    {"name": "prompt-lookup", "gamma": 5},
    {"name": "draft-model", "model": "narrow", "gamma": 3},
    {"name": "draft-model-tree", "model": "narrow", "branching": (2, 2, 1)},
]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter["name"])
def test_second_call_captures_nothing(target: LoadedModel, models: dict[str, str], drafter: dict[str, Any]) -> None:
    if "model" in drafter:
        drafter = drafter | {"model": models[drafter["model"]]}
    want = tokens(load_model(models["target"], device="cpu", dtype="float32"), drafter=drafter)
    assert captures(target, drafter=drafter) > 0
    with device.counting() as counts:
        assert tokens(target, drafter=drafter) == want
    assert counts.captures == 0 and counts.replays
    assert not device.kept()


def test_calls_share_graphs_of_target(target: LoadedModel) -> None:
    """Neither the lengths of prompts, nor another drafter or verifier, nor random numbers need graphs of their own."""
    drafter = {"name": "prompt-lookup", "gamma": 3}
    assert captures(target, [list(range(5, 25))] * 2, drafter=drafter, max_new_tokens=20) > 0
    for options in ({"temperature": 0.7, "verifier": "token", "seed": 3}, {"drafter": "none"}):
        assert captures(target, OTHERS, **{"drafter": drafter, **options}) == 0


def test_captures_of_a_call_are_bounded(target: LoadedModel) -> None:
    """Drafts of any length share a few widths."""
    prompts = [[5, 6, 7, *range(8, 8 + n), 5, 6, 7] for n in range(1, 16, 2)]
    drafter = {"name": "prompt-lookup", "gamma": 16}
    limits = [4 + 2 * n for n in range(len(prompts))]
    with device.counting() as counts:
        tokens(target, prompts, drafter=drafter, max_new_tokens=limits, batch_size=1)
    assert counts.captures <= graph_buckets.MOST_WIDTHS + 5
    assert counts.replays > 2 * counts.captures


def test_threads_have_slots_of_their_own(target: LoadedModel, models: dict[str, str]) -> None:
    drafter = {"name": "draft-model", "model": models["narrow"], "gamma": 3}
    plain = load_model(models["target"], device="cpu", dtype="float32")
    want = [tokens(plain, prompts, drafter=drafter) for prompts in (PROMPTS[:2], OTHERS)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            jobs = [pool.submit(tokens, target, prompts, drafter=drafter) for prompts in (PROMPTS[:2], OTHERS)]
            assert [job.result() for job in jobs] == want
        with device.counting() as counts:
            jobs = [pool.submit(tokens, target, prompts, drafter=drafter) for prompts in (PROMPTS[:2], OTHERS)]
            assert [job.result() for job in jobs] == want
    assert counts.captures <= 2, "a shape may come a second time now"


def test_changed_model_is_captured_again(target: LoadedModel, models: dict[str, str]) -> None:
    """Earlier graphs read new values of weights; they lack weights that were replaced, hooks and settings."""
    plain = load_model(models["target"], device="cpu", dtype="float32")
    tokens(target)
    for model in (target.model, plain.model):
        model.lm_head.weight.data.mul_(-1)
    assert captures(target) == 0 and tokens(target) == tokens(plain)
    for model in (target.model, plain.model):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    assert captures(target) > 0 and tokens(target) == tokens(plain)
    for model in (target.model, plain.model):
        model.model.norm.register_forward_hook(lambda module, arguments, output: output * 2 - 3)
    assert captures(target) > 0 and tokens(target) == tokens(plain)
    target.model.set_attn_implementation("eager")
    assert captures(target) > 0 and tokens(target) == tokens(plain)


def test_new_shapes_take_the_place_of_idle_ones(target: LoadedModel) -> None:
    """A model holds the slots of one call."""
    for size in (2, 1, 3, 2):
        tokens(target, batch_size=size, max_new_tokens=2)
    gc.collect()
    runners = [runner for runner in cuda_graphs._instances if len(runner)]
    assert len(runners) == 1


def test_memory_is_freed_with_the_model(models: dict[str, str]) -> None:
    free_idle()
    gc.collect()
    before = len(cuda_graphs._instances)
    target = load_model(models["target"], device="cuda", dtype="float32")
    tokens(target, drafter={"name": "draft-model", "model": models["narrow"], "gamma": 3})
    assert len(cuda_graphs._instances) > before
    weights, model = ref(target.model.model.layers[0].mlp.up_proj.weight), ref(target.model)
    del target
    assert model() is None
    gc.collect()
    assert weights() is None and len(cuda_graphs._instances) == before


def test_failed_call_leaves_clean_slots(target: LoadedModel) -> None:
    """An exception in a step, with sequences in the slots."""
    want = tokens(target)

    def fail(event: Any) -> None:
        raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        tokens(target, on_step=fail)
    gc.collect()
    assert captures(target) == 0 and tokens(target) == want


def test_no_warning(target: LoadedModel, caplog: Any, recwarn: Any) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tokens(target)
    assert not caplog.records and not recwarn.list
