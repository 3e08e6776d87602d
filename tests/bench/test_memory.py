"""Messages for out-of-memory errors, with bytes computed by hand."""

from typing import Any

import pytest
import torch

from crossdraft.framework.bench.memory import exhausted, memory_message, peak
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.models.device import total_memory

CPU = torch.device("cpu")


def test_out_of_memory_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert exhausted(caught.value)
    assert exhausted(torch.OutOfMemoryError()) and exhausted(MemoryError())
    assert not exhausted(RuntimeError("it broke")) and not exhausted(ValueError("DefaultCPUAllocator"))


def test_needs_by_hand(tiny_model: Any) -> None:
    model = tiny_model("llama", vocab_size=1000)
    weights = sum(p.nbytes for p in model.parameters())
    cache = 2 * 2 * 2 * 8 * 4  # keys and values, 2 layers, 2 heads of 8, float32: bytes a token
    row = 50_000 * cache + 2 * 4 * 5 * 1000  # a slot; logits and probabilities of five positions
    sentence = memory_message([model], 64, 50_000, 5, weights + 10 * row + row // 2)
    assert sentence == (
        "out of memory at batch size 64: weights 0.00 GB, cache 0.82 GB (64 slots of 50000 tokens), logits and "
        "probabilities 0.00 GB (64 × 5 positions), of 0.14 GB; batch size 10 would fit if no other program uses memory"
    )
    assert "batch size 1 does not fit either" in memory_message([model], 64, 50_000, 5, weights + row - 1)
    assert "batch size 63 would fit" in memory_message([model], 64, 50_000, 5, weights + 64 * row - 1)
    assert "this is less than the 0.82 GB of the device" in memory_message([model], 64, 50_000, 5, weights + 64 * row)
    assert memory_message([model], 64, 50_000, 5, None).endswith("; set a smaller batch_size or max_new_tokens")


def test_recordings_count_as_memory(tiny_model: Any) -> None:
    model = tiny_model("llama", vocab_size=1000)
    weights = sum(p.nbytes for p in model.parameters())
    row = 100 * 2 * 2 * 2 * 8 * 4 + 2 * 4 * 5 * 1000
    recorded = 8 * 10**9 + 1  # of eight slots, a byte more in one of them
    sentence = memory_message([model], 8, 100, 5, weights + 3 * (row + 10**9 + 1), recorded)
    assert ", CUDA graph outputs 8.00 GB, of " in sentence and "batch size 3 would fit" in sentence
    assert "batch size 2 would fit" in memory_message([model], 8, 100, 5, weights + 3 * (row + 10**9 + 1) - 1, recorded)


def test_bytes_of_cache_are_those_it_takes(tiny_model: Any, family: str) -> None:
    model = tiny_model(family)
    lm = TransformersLM(model, 2, 16)
    lm.start(0, [3, 4, 5])
    cache, logits = lm.cache.nbytes() // 2, 2 * 4 * lm.vocab_size
    weights = sum(p.nbytes for p in model.parameters())
    assert "batch size 1 would fit" in memory_message([model], 2, 16, 1, weights + cache + logits)
    assert "batch size 1 does not fit" in memory_message([model], 2, 16, 1, weights + cache + logits - 1)


def test_shared_embedding_counts_once(tiny_model: Any) -> None:
    model = tiny_model("llama", vocab_size=1000)
    weights = sum(p.nbytes for p in model.parameters())
    both = 2 * 2 * 2 * 2 * 8 * 4 * 100 + 2 * 4 * 3 * 1000  # two caches, one set of weights
    assert "batch size 2 would fit" in memory_message([model, model], 3, 100, 3, weights + 2 * both)


def test_peak_is_at_least_allocated_memory() -> None:
    buffer = torch.ones(2**24)
    measured, available = peak(CPU), total_memory(CPU)
    if measured is not None and available is not None:  # unknown on Windows
        assert buffer.nbytes < measured < available
