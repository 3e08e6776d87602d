"""Linear layers for few rows: equal to `functional.linear` for every number of rows, whatever happens to weights."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from crossdraft_layers import small_batch_linear
from crossdraft_layers.small_batch_linear import (
    MOST_ROWS,
    SmallBatchLinear,
    packed,
    packed_nbytes,
    speed_up_small_batches,
)
from torch import Tensor, nn
from torch.nn import functional

from crossdraft.framework.lm.layer_surgery import own_modules
from crossdraft.framework.lm.transformers_lm import TransformersLM

packs = pytest.mark.skipif(
    not small_batch_linear._available(torch.float32), reason="oneDNN has no kernels for this processor"
)
#: Rounding of outputs.
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def least_weights(monkeypatch: Any) -> None:
    """Replace layers of any size: those of the tests are small."""
    monkeypatch.setattr(small_batch_linear, "LEAST_WEIGHTS", 1)


def layer_of(inputs: int, outputs: int, bias: bool = False, dtype: torch.dtype = torch.float32) -> SmallBatchLinear:
    layer = nn.Linear(inputs, outputs, bias, dtype=dtype)
    speed_up_small_batches(layer)
    assert type(layer) is SmallBatchLinear
    return layer


def equals_linear(layer: nn.Linear, x: Tensor) -> bool:
    expected = functional.linear(x, layer.weight, layer.bias)
    out = layer(x)
    return out.shape == expected.shape and torch.allclose(out, expected, **TOLERANCE[out.dtype])


@pytest.mark.parametrize(
    ("available", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(7, 5), (33, 70), (8, 100), (5, 1)])
def test_equals_linear_for_every_number_of_rows(
    inputs: int, outputs: int, bias: bool, available: bool, dtype: torch.dtype, monkeypatch: Any
) -> None:
    if not available:
        monkeypatch.setattr(small_batch_linear, "_available", lambda _: False)
    elif not small_batch_linear._available(dtype):
        pytest.skip(f"oneDNN has no kernels for {dtype} on this processor")
    layer = layer_of(inputs, outputs, bias, dtype)
    for rows in range(MOST_ROWS + 3):
        assert equals_linear(layer, torch.randn(rows, inputs, dtype=dtype))
        assert equals_linear(layer, torch.randn(inputs, rows, dtype=dtype).t())
        assert equals_linear(layer, torch.randn(rows, 2 * inputs, dtype=dtype)[:, ::2])
        assert equals_linear(layer, torch.randn(2, rows, inputs, dtype=dtype))
        assert equals_linear(layer, torch.randn(rows, 1, inputs, dtype=dtype).expand(-1, 2, -1))
    assert equals_linear(layer, torch.randn(inputs, dtype=dtype))


@packs
def test_weights_are_packed_only_where_that_is_faster() -> None:
    before = packed_nbytes()
    low, tall = layer_of(8, 16), layer_of(8, 64)
    low(torch.randn(1, 8))
    low(torch.randn(MOST_ROWS + 1, 8))
    assert packed_nbytes() == before
    tall(torch.randn(1, 8))
    assert packed_nbytes() == before + tall.weight.nbytes


def test_gradients_are_those_of_linear() -> None:
    layer = layer_of(6, 9, bias=True)
    for rows in (1, 4):
        x = torch.randn(rows, 6)
        layer(x)  # packs the weights
        with torch.enable_grad():
            own = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
            expected = functional.linear(x, layer.weight, layer.bias).square().sum()
            assert all(map(torch.equal, own, torch.autograd.grad(expected, list(layer.parameters()))))


@pytest.mark.parametrize("inference", [True, False])
def test_changed_weights_are_used(inference: bool) -> None:
    x = torch.randn(4, 6)
    with torch.inference_mode() if inference else torch.no_grad():
        layer = layer_of(6, 9)
        assert equals_linear(layer, x)
        layer.weight.mul_(2)
        assert equals_linear(layer, x)
        layer.weight.copy_(torch.randn(9, 6))
        assert equals_linear(layer, x)
        layer.weight.data = torch.randn(9, 6)
        assert equals_linear(layer, x)
        layer.load_state_dict({"weight": torch.randn(9, 6)})
        assert equals_linear(layer, x)
        layer.weight = nn.Parameter(torch.randn(9, 6))
        assert equals_linear(layer, x)


@packs
def test_weights_of_inference_mode_are_not_packed() -> None:
    with torch.inference_mode():
        assert packed(torch.randn(9, 6)) is None
    assert packed(torch.randn(9, 6)) is not None


def test_address_that_is_used_again_is_not_mistaken_for_old_weight() -> None:
    layer, x = layer_of(6, 9), torch.randn(4, 6)
    layer(x)
    memory, address = layer.weight.data, layer.weight.data_ptr()
    layer.weight.data = torch.randn(9, 6)
    other = layer_of(6, 9)
    other.weight = nn.Parameter(memory.new_empty(0).set_(memory.untyped_storage(), 0, (9, 6)))
    memory.untyped_storage().copy_(torch.randn(9, 6).untyped_storage())
    assert other.weight.data_ptr() == address
    assert equals_linear(other, x) and equals_linear(layer, x)


@packs
def test_copy_is_shared_by_aliases_and_dropped_with_its_weight() -> None:
    before, embedding = packed_nbytes(), nn.Embedding(40, 6)
    head = layer_of(6, 40)
    head.weight = embedding.weight
    alias = layer_of(6, 40)
    alias.weight = nn.Parameter(head.weight, requires_grad=False)
    for layer in (head, alias):
        assert equals_linear(layer, torch.randn(3, 6))
    assert packed_nbytes() == before + 4 * 240
    assert packed(head.weight) is packed(alias.weight)
    ids = torch.tensor([3, 39])
    assert torch.equal(embedding(ids), head.weight[ids])
    del head, embedding, layer
    assert packed_nbytes() == before
    assert equals_linear(alias, torch.randn(3, 6))


@packs
def test_copies_stay_within_their_share_of_memory(monkeypatch: Any, caplog: Any) -> None:
    small_batch_linear._warn_of_memory.cache_clear()
    monkeypatch.setattr(
        small_batch_linear, "_memory", lambda: (packed_nbytes() + 100) / small_batch_linear.MEMORY_SHARE
    )
    layers = [layer_of(6, 9) for _ in range(2)]
    for layer in layers:
        assert equals_linear(layer, torch.randn(3, 6)) and packed(layer.weight) is None
    assert [record.message for record in caplog.records if "packed copies" in record.message] == [
        "crossdraft: packed copies of weights would take more than 40 % of the memory; other layers run without one, "
        "which makes passes over few tokens slower"
    ]


@pytest.mark.parametrize(("features", "warned"), [({"avx512f"}, 1), ({"avx512f", "avx512_bf16"}, 0)])
def test_bfloat16_without_instructions_is_warned_of_once(
    features: set[str], warned: int, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(small_batch_linear, "cpu_features", lambda: features)
    small_batch_linear._warn_of_bfloat16.cache_clear()
    speed_up_small_batches(nn.Sequential(*(nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(2))))
    assert sum("no instructions for bfloat16" in record.message for record in caplog.records) == warned


def test_other_layers_stay_as_they_are() -> None:
    model = nn.ModuleList([nn.Linear(4, 4, dtype=torch.float16), nn.Linear(4, 4, device="meta"), nn.Linear(4, 4)])
    speed_up_small_batches(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear, SmallBatchLinear]


# -- layers with the same input ----------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, n, bias) for n in (8, 4, 4))
        speed_up_small_batches(self)

    @property
    def layers(self) -> list[Any]:
        return [self.q_proj, self.k_proj, self.v_proj]


@pytest.fixture
def products(monkeypatch: Any) -> list[int]:
    """Numbers of outputs of all packed products."""
    sizes: list[int] = []
    own = small_batch_linear.packed_product

    def count(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        sizes.append(weight.shape[0])
        return own(input, weight, bias)

    monkeypatch.setattr(small_batch_linear, "packed_product", count)
    return sizes


@packs
@pytest.mark.parametrize("bias", [True, False])
def test_siblings_share_one_product(bias: bool, products: list[int]) -> None:
    module, before = Attention(bias), packed_nbytes()
    for rows in (2, 5, MOST_ROWS):
        x = torch.randn(1, rows, 6)
        assert all(equals_linear(layer, x) for layer in module.layers)
    assert products == [16] * 3 and packed_nbytes() == before + 4 * 16 * 6
    module.k_proj.weight.mul_(2)
    assert all(equals_linear(layer, x) for layer in module.layers) and products == [16] * 4
    del module
    assert packed_nbytes() == before  # without a garbage collection


@packs
def test_siblings_with_other_inputs_compute_their_own_products(products: list[int]) -> None:
    module = Attention()
    for _ in range(2):
        x, other = torch.randn(3, 6), torch.randn(3, 6)
        inputs = [x, other, other]
        assert all(equals_linear(layer, x) for layer, x in zip(module.layers, inputs, strict=True))
    assert products == [16, 4, 4, 8, 4, 4]


@packs
def test_siblings_in_another_order_compute_their_own_products(products: list[int]) -> None:
    module, x = Attention(), torch.randn(3, 6)
    assert all(equals_linear(layer, x) for layer in reversed(module.layers))
    assert products == [4, 4, 8]


@packs
def test_output_that_is_modified_does_not_change_its_siblings() -> None:
    module, x = Attention(), torch.randn(3, 6)
    module.q_proj(x).zero_()
    assert equals_linear(module.k_proj, x) and equals_linear(module.v_proj, x)


@packs
def test_copies_of_siblings_use_their_own_weights(products: list[int]) -> None:
    module, x = Attention(), torch.randn(3, 6)
    [layer(x) for layer in module.layers]
    twin, deep = own_modules(module), copy.deepcopy(module)
    twin.k_proj.weight = nn.Parameter(torch.randn(4, 6))
    deep.v_proj.weight.mul_(3)
    for one in (twin, deep, module):
        assert all(equals_linear(layer, x) for layer in one.layers)


@packs
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_siblings_with_replaced_parameters_use_them(name: str, products: list[int]) -> None:
    module, x = Attention(bias=True), torch.randn(3, 6)
    assert all(equals_linear(layer, x) for layer in module.layers)
    setattr(module.k_proj, name, nn.Parameter(torch.randn_like(getattr(module.k_proj, name))))
    for _ in range(2):
        assert all(equals_linear(layer, x) for layer in module.layers)
    assert products[0] == 16 and products[-3:] == [8, 4, 4]


def test_logits_are_those_of_the_plain_layers(tiny_model: Callable, family: str) -> None:
    model = tiny_model(family, copy="packed")
    fast = TransformersLM(own_modules(model), 1, 16).model
    plain = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert all(type(fast.get_submodule(name)) is SmallBatchLinear for name in plain)
    for rows in (1, 2, 4, 8):
        ids = torch.arange(3, 3 + rows)[None]
        expected = model(ids).logits
        error = (fast(ids).logits - expected).abs().max() / expected.abs().max()
        assert error < 1e-4
