"""Grouped attention: equal to that of transformers, without copies of keys and values, and only in our passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from crossdraft.framework.lm.attention import sdpa
from crossdraft.framework.lm.transformers_lm import TransformersLM

pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("shared", [6, 3, 1])
def test_grouped_attention_equals_transformers(width: int, shared: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, width, 6, 8).transpose(1, 2)
    key, value = torch.randn(2, shared, 11, 8), torch.randn(2, shared, 11, 4)
    mask = torch.zeros(2, 1, width, 11).masked_fill(torch.rand(2, 1, width, 11) < 0.5, torch.finfo().min)
    module = torch.nn.Module()
    module.num_key_value_groups = 6 // shared  # type: ignore[assignment]
    want, _ = sdpa.sdpa_attention_forward(module, query, key, value, mask, scaling=0.4)
    ours, weights = sdpa.grouped_sdpa(module, query, key, value, mask, scaling=0.4)
    assert weights is None and ours.is_contiguous()
    torch.testing.assert_close(ours, want, atol=1e-6, rtol=1e-5)


def test_keys_and_values_are_not_copied_for_every_head(monkeypatch: Any) -> None:
    shapes, masks = [], []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, *rest: Any, **more: Any):
        shapes.append((tuple(query.shape), key.data_ptr(), value.data_ptr()))
        masks.append(mask)
        return original(query, key, value, mask, *rest, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    key, value = torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    sdpa.grouped_sdpa(torch.nn.Module(), torch.randn(1, 6, 5, 8), key, value, torch.zeros(1, 1, 5, 11))
    assert shapes == [((1, 2, 15, 8), key.data_ptr(), value.data_ptr())]

    mask, other = torch.zeros(1, 1, 5, 11), torch.ones(1, 1, 5, 11)
    with sdpa.own_attention():  # a pass repeats its mask for the heads of a group once
        for each in (mask, mask, other):
            sdpa.grouped_sdpa(torch.nn.Module(), torch.randn(1, 6, 5, 8), key, value, each)
    assert masks[1] is masks[2] and masks[3].equal(other.repeat(1, 1, 3, 1))
    assert sdpa._thread.repeated is None


def test_grouped_attention_is_used_in_passes_only(tiny_model: Callable, monkeypatch: Any) -> None:
    """The model is the user's: after a pass, and after one that failed, it runs transformers' own function."""
    calls = []

    def spy(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return sdpa.sdpa_attention_forward(*arguments, **options)

    monkeypatch.setattr(sdpa, "grouped_sdpa", spy)
    model, ids = tiny_model("llama"), torch.tensor([[1, 2]])
    TransformersLM(model, 1, 16).forward(ids)
    assert len(calls) == 2  # layers
    with pytest.raises(RuntimeError), sdpa.own_attention():
        raise RuntimeError
    model(ids)
    assert len(calls) == 2
    assert not sdpa.in_own_attention()


def test_function_of_the_user_is_kept(tiny_model: Callable, monkeypatch: Any) -> None:
    functions = sdpa.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._global_mapping, "sdpa", functions["sdpa"])  # restored at the end
    functions.register("sdpa", user := lambda *args, **options: sdpa.sdpa_attention_forward(*args, **options))
    TransformersLM(tiny_model("llama"), 1, 16).forward(torch.tensor([[1, 2]]))
    assert functions["sdpa"] is user
