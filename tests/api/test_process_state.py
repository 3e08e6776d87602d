"""Nothing is left behind in the user's process: not in a model, not in transformers, whatever threads do."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from crossdraft_server.custom_generate import custom_generate
from torch import nn
from transformers.utils import logging as transformers_logging

from crossdraft import LoadedModel, generate
from crossdraft.framework.errors import UsageError
from crossdraft.framework.lm.attention import sdpa
from crossdraft.framework.lm.layer_surgery import own_modules
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.models import load
from crossdraft.framework.util.shared_patch import SharedPatch

PROMPTS = [[5, 6, 7, 5, 6], [9, 8, 7, 9, 8, 7], [3, 4], [11, 12, 11, 12, 11]]


def state(model: nn.Module) -> dict[str, Any]:
    """State of a model's modules: classes, attributes, hooks, buffers and weights by identity."""
    results: dict[str, Any] = {}
    for name, module in model.named_modules():
        length = {
            k: dict(v) if isinstance(v, dict) else set(v) if isinstance(v, set) else v for k, v in vars(module).items()
        }
        results[name] = type(module), type(module).forward, length
    return results


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, dict) and isinstance(y, dict):
            return x.keys() == y.keys() and all(equal(x[k], y[k]) for k in x)
        return x is y or (not isinstance(x, torch.Tensor) and bool(x == y))

    return a.keys() == b.keys() and all(a[name][:2] == b[name][:2] and equal(a[name][2], b[name][2]) for name in a)


def door(model: Any, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, custom_generate=custom_generate, max_new_tokens=8, **options)[0].tolist()[len(prompt) :]


@pytest.fixture
def model(tiny_model: Callable) -> Any:
    """A user's model, in training mode."""
    result = tiny_model("llama", copy="traces").train()
    yield result
    result.eval()


@pytest.mark.parametrize("drafter", ["prompt-lookup", "none"])
def test_users_model_stays_as_it_is(model: Any, drafter: str) -> None:
    before = state(model)
    want = door(model, PROMPTS[0], drafter=drafter)
    with pytest.raises(UsageError):
        door(model, PROMPTS[0], drafter=drafter, num_beams=2)
    with pytest.raises(RuntimeError, match="in the middle"):
        door(model, PROMPTS[0], drafter=drafter, streamer=Failing())
    loaded = LoadedModel(model, None, "mine", "", "", (), None)
    assert generate(loaded, [PROMPTS[0]], drafter=drafter, temperature=0, max_new_tokens=8)[0].tokens == want
    assert same(state(model), before) and model.training


class Failing:
    def put(self, value: torch.Tensor) -> None:
        if value.dim() == 1:
            raise RuntimeError("in the middle")


def test_hidden_states_leave_no_hooks(model: Any) -> None:
    before = state(model)
    lm = TransformersLM(own_modules(model), 1, 16)
    lm.hidden_layers = (0, -1)
    _, hidden = lm.forward(torch.tensor([[3, 4, 5]]))
    assert hidden is not None and same(state(model), before)
    assert len(model(torch.tensor([[3, 4]]), output_hidden_states=True).hidden_states) == 3  # once a layer


def test_modules_of_their_own_share_weights(tiny_model: Callable, family: str) -> None:
    model, ids = tiny_model(family), torch.tensor([[3, 4, 5, 3, 4]])
    twin = own_modules(model)
    assert type(twin) is type(model) and twin is not model
    names = dict(twin.named_modules())
    assert names.keys() == dict(model.named_modules()).keys()
    assert not {id(module) for module in names.values()} & {id(module) for module in model.modules()}
    theirs = dict(model.named_parameters(remove_duplicate=False))
    assert all(weight is theirs[name] for name, weight in twin.named_parameters(remove_duplicate=False))
    assert twin.get_output_embeddings() is not model.get_output_embeddings()
    with torch.no_grad():
        assert torch.equal(twin(ids).logits, model(ids).logits)


def test_modules_that_stand_in_two_places_or_hold_each_other() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    shared.holder = model  # type: ignore[assignment]
    shared.register_module("nothing", None)
    twin = own_modules(model)
    assert twin["a"] is twin["b"][0] is not shared and twin["a"].holder is twin


# -- threads ----------------------------------------------------------------------------------------------


def test_other_threads_keep_their_own_attention(model: Any, monkeypatch: Any) -> None:
    calls: list[str] = []
    monkeypatch.setattr(sdpa, "grouped_sdpa", lambda *a, **o: calls.append("grouped"))
    model.eval()
    with sdpa.own_attention(), ThreadPoolExecutor(1) as pool, torch.no_grad():
        elsewhere = pool.submit(lambda: model(torch.tensor([[3, 4]])).logits).result()
    assert calls == [] and torch.equal(elsewhere, model(torch.tensor([[3, 4]])).logits.detach())


def test_users_attention_function_stays(model: Any) -> None:
    calls = []

    def own(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return sdpa.sdpa_attention_forward(*arguments, **options)

    registry: Any = sdpa.ALL_ATTENTION_FUNCTIONS
    registry["sdpa"] = own
    try:
        door(model, PROMPTS[0])
        assert calls and registry["sdpa"] is own
    finally:
        del registry["sdpa"]


def test_concurrent_threads_decode_same_tokens(model: Any) -> None:
    options: list[dict[str, Any]] = [{}, {"do_sample": True, "seed": 3}]
    jobs = [(prompt, option) for prompt in PROMPTS for option in options]
    separate = [door(model, prompt, **option) for prompt, option in jobs]
    before, barrier = state(model), threading.Barrier(4)

    def batched(job: Any) -> list[int]:
        barrier.wait(20)
        return door(model, job[0], **job[1])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(batched, jobs)) == separate
    assert same(state(model), before) and not sdpa.in_own_attention()


def test_transformers_logging_is_restored() -> None:
    before = transformers_logging.get_verbosity()
    both_in, one_out = threading.Barrier(2), threading.Event()

    def first() -> None:
        with load._quiet:
            both_in.wait(10)
        one_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    with load._quiet:
        both_in.wait(10)
        assert one_out.wait(10)
        assert transformers_logging.get_verbosity() == transformers_logging.ERROR
    thread.join()
    assert transformers_logging.get_verbosity() == before


def test_change_that_fails_is_not_taken_back() -> None:
    def fails() -> Callable[[], None]:
        raise OSError

    meanwhile = SharedPatch(fails)
    for _ in range(2):
        with pytest.raises(OSError), meanwhile:
            raise AssertionError
