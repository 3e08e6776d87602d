"""A cache with recurrent states behind `TransformersLM`: a hybrid of linear attention and softmax attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossdraft.framework import plugins
from crossdraft.framework.lm.kv_cache import RaggedCache
from crossdraft.framework.lm.transformers_lm import TransformersLM

PROMPTS = [[5, 6, 7, 8], [9, 10], list(range(20, 45)), [3], [50, 51, 52, 50, 51]]
NEW, MAX_LENGTH, DECAY = 16, 64, 0.9


class HybridCache(RaggedCache):
    """Keys and values of attention layers; the state after every slot of recurrent layers.

    A state cannot be cut at a token, so a pass resumes from the state of the slot before its first one: the slots
    behind the committed tokens are overwritten, as those of keys and values are. Chains only: the state before a node
    of a tree is that of its parent, not that of the slot before it.
    """

    def __init__(self, batch_size: int, max_length: int):
        super().__init__(batch_size, max_length)
        self.states: dict[int, Tensor] = {}

    def scan(self, layer: int, updates: Tensor) -> Tensor:
        """States ``[R, W, K, V]`` after each of ``updates [R, W, K, V]``, written to the slots of the pass."""
        if layer not in self.states:
            self.states[layer] = updates.new_zeros(self.num_rows, self.max_length, *updates.shape[2:])
        states, plan = self.states[layer], self.plan
        rows = torch.arange(self.num_rows) if plan.rows is None else plan.rows
        if plan.row is not None:
            rows = torch.tensor([plan.row])
        slots = plan.slots.expand(len(rows), -1)
        after = recurrence(self.resume(layer, rows, slots[:, 0]), updates)
        states[rows[:, None], slots] = after
        return after

    def resume(self, layer: int, rows: Tensor, first: Tensor) -> Tensor:
        """The state before slot ``first [R]`` of each row, ``[R, K, V]``."""
        return self.states[layer][rows, (first - 1).clamp(min=0)] * (first > 0).float()[:, None, None]

    def move(self, source: Tensor, target: Tensor) -> None:
        raise NotImplementedError("recurrent states of trees")

    def clear(self, row: int) -> None:
        super().clear(row)
        for states in self.states.values():
            states[row] = 0

    def nbytes(self) -> int:
        return super().nbytes() + sum(states.nbytes for states in self.states.values())


class NoRollback(HybridCache):
    """Mistake, for one row: a pass resumes from the last state, which rejected nodes have changed."""

    latest: Tensor | None = None

    def scan(self, layer: int, updates: Tensor) -> Tensor:
        after = super().scan(layer, updates)
        self.latest = after[:, -1]
        return after

    def resume(self, layer: int, rows: Tensor, first: Tensor) -> Tensor:
        return super().resume(layer, rows, first) if self.latest is None or not first.any() else self.latest


def recurrence(state: Tensor, updates: Tensor) -> Tensor:
    """``S_t = DECAY * S_(t-1) + updates_t``."""
    after = []
    for update in updates.unbind(1):
        state = DECAY * state + update
        after.append(state)
    return torch.stack(after, 1)


class LinearAttention(nn.Module):
    """``o_t = q_t S_t`` with ``S_t = DECAY * S_(t-1) + k_t v_t``; in the place of a layer's attention."""

    def __init__(self, layer: int, size: int):
        super().__init__()
        self.layer = layer
        self.q, self.k, self.v = (nn.Linear(size, size, bias=False) for _ in range(3))
        for projection in (self.q, self.k, self.v):
            nn.init.normal_(projection.weight, std=0.3)

    def forward(
        self, hidden_states: Tensor, cache: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        cache = past_key_values if cache is None else cache  # named by the release of transformers
        k, v = self.k(hidden_states), self.v(hidden_states)
        updates = k[..., :, None] * v[..., None, :]
        if cache is None:
            states = recurrence(torch.zeros_like(updates[:, 0]), updates)
        else:
            states = cache.scan(self.layer, updates)
        return torch.einsum("rwk,rwkv->rwv", self.q(hidden_states), states), None


@pytest.fixture
def hybrid(tiny_model: Callable) -> Callable[..., Any]:
    """``hybrid(noise)``: a Llama whose first layer is recurrent."""

    def make(noise: float = 0.0) -> Any:
        model = copy.deepcopy(tiny_model("llama", noise=noise))
        torch.manual_seed(1)
        model.model.layers[0].self_attn = LinearAttention(0, model.config.hidden_size).eval()
        return model

    return make


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Tokens of the model without a cache: the whole text is read again for every token."""
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture
def decode(decoder: Callable, hybrid: Callable) -> Callable[..., list[Any]]:
    """``decode(drafter, prompts, batch_size, cache)``: responses of greedy decoding, in the order of the prompts."""

    def run(name: str, prompts: list[list[int]], batch_size: int = 2, cache: type[HybridCache] = HybridCache) -> Any:
        loop = decoder(
            hybrid(),
            plugins.get("drafters", name),
            {"model": "noisy", "gamma": 3} if name == "draft-model" else {},
            plugins.get("verifiers", "greedy"),
            batch_size=batch_size,
            drafting=hybrid(noise=0.05),
            temperature=0.0,
            max_length=MAX_LENGTH,
            max_new_tokens=NEW,
            lm=lambda model, rows, length: TransformersLM(model, rows, length, cache(rows, length)),
        )
        return sorted(loop.run(prompts), key=lambda response: response.index)

    return run


@pytest.mark.parametrize("name", ["none", "draft-model", "prompt-lookup"])
def test_chains_equal_model_without_cache(decode: Callable, hybrid: Callable, name: str) -> None:
    """Two rows of different lengths, batched prefill, rejected drafts, reused rows."""
    responses = decode(name, PROMPTS)
    assert [response.tokens for response in responses] == [greedy(hybrid(), prompt) for prompt in PROMPTS]
    if name == "draft-model":
        accepted = {step.tau for response in responses for step in response.steps}
        assert 0 in accepted and max(accepted) > 0


def test_missing_rollback_is_noticed(decode: Callable, hybrid: Callable) -> None:
    expected = [greedy(hybrid(), prompt) for prompt in PROMPTS]
    assert [response.tokens for response in decode("none", PROMPTS, 1, NoRollback)] == expected
    assert [response.tokens for response in decode("draft-model", PROMPTS, 1, NoRollback)] != expected
