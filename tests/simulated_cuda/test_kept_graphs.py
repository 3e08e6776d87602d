"""CUDA graphs live as long as their model, and no longer."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from crossdraft_simulated_cuda import device
from drafter_cases import pytest_generate_tests, with_files, write_all_heads  # noqa: F401  (a hook)
from run_fixtures import save_models
from safetensors.torch import load_file, save_file

from crossdraft import generate, load_model
from crossdraft.drafters.heads.eagle import EagleHead
from crossdraft.drafters.heads.eagle3 import Eagle3Head
from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.errors import CrossdraftError
from crossdraft.framework.lm import cuda_graphs, graph_buckets
from crossdraft.framework.lm.idle import ATTRIBUTE, Idle, Structure, free_idle

pytestmark = pytest.mark.simulated

PROMPTS = [[5, 9, 12, 7, 9, 12, 7], [6], [8, 6, 8, 6, 8, 6, 8]]
OTHERS = [[7, 11, 12], [9, 6, 6, 7, 8]]
#: One each of graphs of heads, of functions, of layers of the target, and of a model that is trained.
QUICK = ("TestDFlash2", "TestMedusa", "TestPassOfModel", "TestOnline")
WARPED = {"temperature": 0.8, "top_k": 20, "seed": 3}
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "batch_size": 2, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, str]:
    return save_models(tmp_path_factory.mktemp("models"), layers=4)


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


@pytest.fixture(scope="module")
def drafter(models: dict[str, str], tmp_path_factory: Any) -> Callable[..., dict[str, Any]]:
    """``drafter(name)``: the drafter of a contract test, with a draft model or heads for the target."""
    target = load_model(models["target"], device="cpu", dtype="float32").model
    return partial(with_files, heads=write_all_heads(tmp_path_factory.mktemp("heads"), target), model=models["narrow"])


@pytest.fixture(scope="module")
def want(models: dict[str, str]) -> list[list[int]]:
    """Tokens of every drafter at temperature 0."""
    return tokens(load_model(models["target"], device="cpu", dtype="float32"))


def test_second_call_captures_nothing(
    target: LoadedModel, drafter: Callable[..., dict[str, Any]], want: list[list[int]], case: str
) -> None:
    """Neither of the target, nor of a draft model, heads or layers of the target."""
    options = drafter(case)
    with device.counting() as counts:
        assert tokens(target, drafter=options) == want
    assert counts.captures > 0
    with device.counting() as counts:
        assert tokens(target, drafter=options) == want
    assert counts.captures == 0 and counts.replays
    assert not device.kept()


@pytest.mark.slow
def test_heads_are_loaded_again_if_their_files_change(
    target: LoadedModel, drafter: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    options = drafter("TestEagle")
    heads = tmp_path / "heads"
    shutil.copytree(options["model"], heads)
    options["model"] = str(heads)
    assert captures(target, drafter=options) > captures(target, drafter=options) == 0
    config = json.loads((heads / "config.json").read_text())
    (heads / "config.json").write_text(json.dumps(config | {"rope_theta": 5e4}))
    assert captures(target, drafter=options) > captures(target, drafter=options) == 0
    save_file({k: -t for k, t in load_file(heads / "model.safetensors").items()}, heads / "model.safetensors")
    assert captures(target, drafter=options) > captures(target, drafter=options) == 0


@pytest.mark.slow
def test_other_heads_take_the_memory(target: LoadedModel, drafter: Callable[..., dict[str, Any]]) -> None:
    def modules() -> list[str]:
        gc.collect()
        return [type(x).__name__ for x in gc.get_objects() if type(x) in (EagleHead, Eagle3Head)]

    before = modules()
    for name, kind in (("TestEagle", "EagleHead"), ("TestEagle3", "Eagle3Head")):
        tokens(target, drafter=drafter(name))
        assert modules() == [*before, kind]
    tokens(target)
    assert captures(target, drafter=drafter("TestEagle3")) == 0, "plain decoding takes none"
    free_idle()
    assert modules() == before


def test_refused_drafter_leaves_graphs(
    target: LoadedModel, drafter: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    tokens(target)
    for model in (str(tmp_path), drafter("TestEagle3")["model"]):
        with pytest.raises(CrossdraftError):
            tokens(target, drafter={"name": "eagle", "model": model})
    gc.collect()
    assert captures(target) == 0


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


@pytest.mark.parametrize(
    "contract",
    ["TestEagle", *(pytest.param(name, marks=pytest.mark.slow) for name in ("TestDraftModel", "TestMedusa"))],
)
def test_threads_have_slots_of_their_own(
    target: LoadedModel, models: dict[str, str], drafter: Callable[..., dict[str, Any]], contract: str
) -> None:
    options = {**WARPED, "drafter": drafter(contract)}
    plain = load_model(models["target"], device="cpu", dtype="float32")
    want = [tokens(plain, prompts, **options) for prompts in (PROMPTS[:2], OTHERS)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            jobs = [pool.submit(tokens, target, prompts, **options) for prompts in (PROMPTS[:2], OTHERS)]
            assert [job.result() for job in jobs] == want
        with device.counting() as counts:
            jobs = [pool.submit(tokens, target, prompts, **options) for prompts in (PROMPTS[:2], OTHERS)]
            assert [job.result() for job in jobs] == want
    assert counts.captures <= 2, "a shape may come a second time now"


@pytest.mark.parametrize("contract", ["TestNone", pytest.param("TestEagle", marks=pytest.mark.slow)])
def test_changed_model_is_captured_again(
    target: LoadedModel, models: dict[str, str], drafter: Callable[..., dict[str, Any]], contract: str
) -> None:
    """Earlier graphs read new values of weights; they lack weights that were replaced, hooks and settings."""
    plain = load_model(models["target"], device="cpu", dtype="float32")
    options = {**WARPED, "drafter": drafter(contract)}

    def equal() -> bool:
        return tokens(target, **options) == tokens(plain, **options)

    tokens(target, **options)
    for model in (target.model, plain.model):
        model.lm_head.weight.data.mul_(-1)
    if contract == "TestNone":  # other drafts may have further widths
        assert captures(target, **options) == 0
    assert equal()
    for model in (target.model, plain.model):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    assert captures(target, **options) > 0 and equal()
    for model in (target.model, plain.model):
        model.model.norm.register_forward_hook(lambda module, arguments, output: output * 2 - 3)
    assert captures(target, **options) > 0 and equal()
    target.model.set_attn_implementation("eager")
    assert captures(target, **options) > 0 and equal()


def test_model_may_get_its_first_idle_object_meanwhile(target: LoadedModel) -> None:
    """Another thread frees slots while a `Structure` is read."""

    class Late:
        @property
        def __class__(self) -> type:  # is read by isinstance
            vars(target.model).setdefault(ATTRIBUTE, Idle())
            return Late

    vars(target.model).pop(ATTRIBUTE, None)
    target.model.late = Late()
    Structure(target.model)
    assert ATTRIBUTE in vars(target.model)


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
    gc.collect()  # what loading leaves in cycles
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
