"""Caches of the caller behind `TransformersLM`: a paged one and an int8 one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_cuda_graphs import Recorder
from oracle_trees import NEW, PROMPTS
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from crossdraft.framework import plugins
from crossdraft.framework.lm import forward_pass
from crossdraft.framework.lm.cuda_graphs import CaptureLimits, CudaGraphRunner, recording
from crossdraft.framework.lm.kv_cache import KVCache, WritePlan
from crossdraft.framework.lm.transformers_lm import TransformersLM

pytestmark = pytest.mark.usefixtures("third_party")
MAX_LENGTH = 128
BLOCK = 16


class OwnLayer(CacheLayerMixin):
    """Delegates updates to the cache that owns it."""

    def __init__(self, owner: Any):
        super().__init__()
        self.owner, self.stores = owner, []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.stores = [self.owner.new_store(states) for states in (key_states, value_states)]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.owner.write(self.stores[0], key_states), self.owner.write(self.stores[1], value_states)

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.plan.kv_len, 0

    def get_max_length(self) -> int:
        return MAX_LENGTH


class OwnCache:
    """A `KVCache` that turns the plan of a pass into indices: ``[R, W]`` to write, ``[R, kv_len]`` to read."""

    plan: WritePlan

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self.cache = Cache(layer_class_to_replicate=partial(OwnLayer, self))  # type: ignore[arg-type]

    def reserve(self, row: int, length: int) -> None:
        """All slots exist from the start."""

    def begin_pass(self, plan: WritePlan) -> Cache:
        self.plan = plan
        if plan.row is not None:
            rows = torch.tensor([plan.row])
        else:
            rows = torch.arange(self.batch_size) if plan.rows is None else plan.rows
        self.rows = rows[:, None]
        self.written = plan.slots.expand(len(rows), -1)
        self.read = torch.arange(plan.kv_len).expand(len(rows), -1)
        return self.cache

    def commit(self, lengths: Sequence[int]) -> None:
        """Masks hide all other slots."""

    @property
    def stores(self) -> list[Any]:
        return [store for layer in self.cache.layers for store in layer.stores]  # type: ignore[union-attr]


class PagedCache(OwnCache):
    """Blocks of 16 slots in a pool with a block table; block 0 serves all slots that are not reserved."""

    def __init__(self, batch_size: int):
        super().__init__(batch_size)
        per_row = MAX_LENGTH // BLOCK
        self.free = list(range(batch_size * per_row, 0, -1))
        self.table = torch.zeros(batch_size, per_row, dtype=torch.long)
        self.most_used = 0

    def reserve(self, row: int, length: int) -> None:
        for index in range(-(-length // BLOCK)):
            if not self.table[row, index]:
                self.table[row, index] = self.free.pop()
        self.most_used = max(self.most_used, int((self.table > 0).sum()))

    def new_store(self, states: Tensor) -> Tensor:
        blocks = 1 + self.table.numel()
        return states.new_zeros(blocks, BLOCK, states.shape[1], states.shape[3])

    def write(self, store: Tensor, states: Tensor) -> Tensor:
        store[self.at(self.rows, self.written)] = states.transpose(1, 2)
        return store[self.at(self.rows, self.read)].transpose(1, 2)

    def at(self, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.table[rows, slots // BLOCK], slots % BLOCK

    def move(self, source: Tensor, target: Tensor) -> None:
        rows = torch.arange(self.batch_size)[:, None]
        for store in self.stores:
            store[self.at(rows, target)] = store[self.at(rows, source)]

    def clear(self, row: int) -> None:
        blocks = [block for block in self.table[row].tolist() if block]
        for store in self.stores:
            store[blocks] = 0
        self.free += blocks
        self.table[row] = 0

    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)


class Int8Cache(OwnCache):
    """Keys and values in int8, with one scale per token and head."""

    def new_store(self, states: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.batch_size, MAX_LENGTH, states.shape[1]
        return torch.zeros(*shape, states.shape[3], dtype=torch.int8), torch.zeros(*shape, 1)

    def write(self, store: tuple[Tensor, Tensor], states: Tensor) -> Tensor:
        numbers, scales = store
        states = states.transpose(1, 2)
        scale = (states.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-9)
        at, read = (self.rows, self.written), (self.rows, self.read)
        numbers[at], scales[at] = (states / scale).round().to(torch.int8), scale
        return (numbers[read] * scales[read]).transpose(1, 2)

    def move(self, source: Tensor, target: Tensor) -> None:
        rows = torch.arange(self.batch_size)[:, None]
        for store in self.stores:
            for buffer in store:
                buffer[rows, target] = buffer[rows, source]

    def clear(self, row: int) -> None:
        for store in self.stores:
            for buffer in store:
                buffer[row] = 0

    def nbytes(self) -> int:
        return sum(buffer.nbytes for store in self.stores for buffer in store)


def with_cache(make: Callable[[int], KVCache]) -> Callable[..., TransformersLM]:
    """A constructor of slots over such a cache."""
    return lambda model, batch_size, max_length: TransformersLM(model, batch_size, max_length, make(batch_size))


DRAFTERS = {
    "none": {},
    "draft-model": {"model": "noisy", "gamma": 3},
    "draft-model-tree": {"model": "noisy", "branching": (2, 2, 1)},
    "draft-model-dynamic-tree": {"model": "noisy", "depth": 3, "top_k": 2, "nodes": 6},
    "first-layers": {"layers": (0,), "gamma": 3},
}
RULES = {"draft-model-tree": "traversal", "draft-model-dynamic-tree": "sample-match"}


@pytest.fixture
def decode(tiny_model: Callable, decoder: Callable) -> Callable[..., tuple[dict[int, tuple], Any]]:
    """``decode(drafter, temperature, lm, family)``: tokens and steps of every prompt, in two slots; and the loop."""

    def run(drafter: str, temperature: float, lm: Any = TransformersLM, family: str = "llama") -> Any:
        loop = decoder(
            tiny_model(family),
            plugins.get("drafters", drafter),
            DRAFTERS[drafter],
            plugins.get("verifiers", "greedy" if temperature == 0 else RULES.get(drafter, "token")),
            batch_size=2,
            drafting=tiny_model(family, noise=0.05),
            temperature=temperature,
            max_length=MAX_LENGTH,
            max_new_tokens=NEW,
            lm=lm,
        )
        return {r.index: (r.tokens, len(r.steps)) for r in loop.run(PROMPTS)}, loop

    return run


@pytest.mark.parametrize("temperature, family", [(0.0, "mistral-sliding"), (1.0, "llama")])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_paged_cache_gives_same_tokens(decode: Any, drafter: str, temperature: float, family: str) -> None:
    """Chains, trees and forks; finished slots return their blocks."""
    expected, _ = decode(drafter, temperature, family=family)
    result, loop = decode(drafter, temperature, with_cache(PagedCache), family)
    assert result == expected
    cache = loop.target.cache
    assert 0 < cache.most_used < cache.table.numel() / 2
    assert cache.nbytes() > 0


def test_freed_row_returns_its_blocks(tiny_model: Callable) -> None:
    cache = PagedCache(2)
    lm, blocks = TransformersLM(tiny_model("llama"), 2, MAX_LENGTH, cache), len(cache.free)
    lm.prefill({0: list(range(20)), 1: [5, 6]})
    lm.start(0, list(range(21)))
    lm.start(1, [5, 6, 7])
    lm.forward(torch.ones(2, 1, dtype=torch.long))
    lm.commit([1, 1])
    assert len(cache.free) == blocks - 4  # a batched prefill reserves the width of its longest prompt
    lm.free(0)
    lm.free(1)
    assert len(cache.free) == blocks and all(not store[1:].any() for store in cache.stores)


def test_recorded_passes_of_paged_cache(decode: Any) -> None:
    """Padded passes and warm-ups also write to slots that are not reserved."""

    def recorded(model: Any, batch_size: int, max_length: int) -> TransformersLM:
        with patch.object(forward_pass, "runner_for", lambda model: CudaGraphRunner(Recorder(), "test")):
            return TransformersLM(model, batch_size, max_length, PagedCache(batch_size))

    for drafter in ("draft-model", "draft-model-tree"):
        expected, _ = decode(drafter, 0.0)
        with recording(CaptureLimits(3, 10)):
            result, loop = decode(drafter, 0.0, recorded)
        assert result == expected and loop.target.graphs._recorder.replayed


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "none"])
def test_int8_cache_is_exact_against_itself(decode: Any, drafter: str) -> None:
    """Greedy tokens equal those of decoding one token at a time with the same cache."""
    lm = with_cache(Int8Cache)
    expected, loop = decode("none", 0.0, lm)
    result, _ = decode(drafter, 0.0, lm)
    assert {i: tokens for i, (tokens, _) in result.items()} == {i: tokens for i, (tokens, _) in expected.items()}
    assert sum(steps for _, steps in result.values()) < sum(steps for _, steps in expected.values())
    bytes_of_float32 = 4 * sum(numbers.numel() for numbers, _ in loop.target.cache.stores)
    assert loop.target.cache.nbytes() < bytes_of_float32


def test_attention_reads_int8_cache(tiny_model: Callable) -> None:
    """Logits differ from those of the built-in cache by rounding."""
    logits = []
    for cache in (None, Int8Cache(1)):
        lm = TransformersLM(tiny_model("llama"), 1, MAX_LENGTH, cache)
        lm.start(0, PROMPTS[1])
        logits.append(lm.forward(torch.tensor([[3, 4]]))[0])
    assert not torch.equal(*logits)
    torch.testing.assert_close(*logits, atol=0.3, rtol=0.3)
