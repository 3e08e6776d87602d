"""The references of the tests of decoding, which transformers makes itself, and what tests of graphs need."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle_trees import NEW, PROMPTS
from tiny_models import generated
from transformers import LlamaConfig, LlamaForCausalLM

from crossdraft.framework.lm import cuda_graphs, graph_buckets


@pytest.fixture(scope="module")
def expected(tiny_model: Callable) -> Callable[[str, list[int]], list[int]]:
    """``expected(family, prompt)``: transformers' own greedy continuation of `NEW` tokens, alone."""
    known: dict[tuple, list[int]] = {}

    def continue_(family: str, prompt: list[int]) -> list[int]:
        key = (family, *prompt)
        if key not in known:
            # Another copy: what the decoder does to its models must not reach the reference.
            reference = tiny_model(family, copy="reference")
            (known[key],) = generated(reference, [prompt], NEW)
        return known[key]

    return continue_


@pytest.fixture
def answers(expected: Callable) -> Callable[[str], dict]:
    return lambda family: {tuple(prompt): expected(family, prompt) for prompt in PROMPTS}


@pytest.fixture
def small_buckets(monkeypatch: Any) -> None:
    """Attention masks grow in steps that short texts reach too."""
    monkeypatch.setattr(graph_buckets, "BUCKET", 16)


@pytest.fixture
def fresh_warnings() -> Iterator[None]:
    cuda_graphs._warn_once.cache_clear()
    yield
    cuda_graphs._warn_once.cache_clear()


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny model for transformers' ``generate``; some tests change its settings."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=0, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
