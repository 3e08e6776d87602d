"""The cache equals that of a fresh forward pass; prompts in chunks, trees in several passes, hidden states."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from oracle_trees import NEW, PROMPTS, OracleTrees, drafter_class, verifier_class

from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.util.cache_argument import cache_argument


def assert_cache_is_fresh(model: Any, lm: Any, history: list[list[int]]) -> None:
    """Keys and values of all committed tokens but the root equal those of one plain forward pass."""
    for row, tokens in enumerate(history):
        committed = len(tokens) - 1
        assert lm.lengths[row] == committed
        if not committed:
            continue
        fresh: Any = transformers.DynamicCache()
        with torch.inference_mode():
            model(input_ids=torch.tensor([tokens[:-1]]), use_cache=True, **{cache_argument(model.forward): fresh})
        assert len(fresh.layers) == len(lm.cache.layers)
        for ours, theirs in zip(lm.cache.layers, fresh.layers, strict=True):
            for own, plain in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                torch.testing.assert_close(own[row, :, :committed], plain[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model", "oracle-trees"])
def test_cache_equals_fresh_forward(
    tiny_model: Callable, decoder: Callable, answers: Callable, family: str, drafter: str
) -> None:
    options: dict[str, Any] = {
        "prompt-lookup": {"gamma": 4},
        "draft-model": {"model": "noisy", "gamma": 3},
        "oracle-trees": {"answers": answers(family), "seed": 5},
    }[drafter]
    result = OracleTrees if drafter == "oracle-trees" else drafter_class(drafter)
    loop = decoder(
        tiny_model(family),
        result,
        options,
        verifier_class("greedy"),
        batch_size=3,
        drafting=tiny_model(family, noise=0.05),
        max_new_tokens=NEW,
    )
    for row, prompt in enumerate(PROMPTS):
        loop.start(row, prompt)
    for _ in range(4):
        loop.step()
        assert_cache_is_fresh(tiny_model(family, copy="reference"), loop.target, loop.sequences.history)
        if drafter == "draft-model":  # the drafter may lag behind by the tokens it feeds next step
            lm = loop.drafter.model.lm
            known = [h[: length + 1] for h, length in zip(loop.sequences.history, lm.lengths, strict=True)]
            assert_cache_is_fresh(tiny_model(family, noise=0.05, copy="reference"), lm, known)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_long_prompt_is_prefilled_in_pieces(tiny_model: Callable, monkeypatch: Any, family: str) -> None:
    from crossdraft.framework.lm import prompt_prefill as module

    monkeypatch.setattr(module, "PREFILL_CHUNK", 5)
    lm = TransformersLM(tiny_model(family), 2, 64)
    prompt = list(range(20, 43))
    lm.start(1, prompt)
    assert_cache_is_fresh(tiny_model(family, copy="reference"), lm, [[0], prompt])


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "opt"])
def test_tree_may_be_grown_in_pieces(tiny_model: Callable, family: str) -> None:
    """Level by level and all at once give the same logits; so does every branch as a plain sequence.

    Siblings lie between ancestors, and the branches outgrow a window of 8: slots are not positions.
    """
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7]]
    parents = torch.tensor([[-1, 0, 0, 1, 1, *range(4, 13)], [-1, 0, 1, 0, 1, *range(4, 10), 3, 11, 10]])
    size = parents.shape[1]
    tokens = torch.tensor([[prompt[-1], *range(10, 9 + size)] for prompt in prompts])

    def grown(pieces: list[slice]) -> torch.Tensor:
        lm = TransformersLM(tiny_model(family), 2, 64)
        for row, prompt in enumerate(prompts):
            lm.start(row, prompt)
        return torch.cat([lm.forward(tokens[:, piece], parents[:, piece])[0] for piece in pieces], 1)

    at_once = grown([slice(0, size)])
    torch.testing.assert_close(grown([slice(0, 1), slice(1, 3), slice(3, size)]), at_once, atol=1e-4, rtol=1e-4)
    for row, prompt in enumerate(prompts):
        for node in range(size):
            branch, at = [], node
            while at > 0:
                branch.insert(0, int(tokens[row, at]))
                at = int(parents[row, at])
            with torch.inference_mode():
                plain = tiny_model(family, copy="reference")(torch.tensor([prompt + branch])).logits[0, -1]
            torch.testing.assert_close(at_once[row, node], plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hidden_states_are_those_of_model(tiny_model: Callable, family: str) -> None:
    lm, prompt = TransformersLM(tiny_model(family), 1, 64), [3, 1, 4, 1, 5, 9]
    lm.hidden_layers = (0, 1, -1)
    prefilled = lm.start(0, prompt)
    _, grown = lm.forward(torch.tensor([[9, 2]]))
    assert prefilled is not None and grown is not None
    with torch.inference_mode():
        plain = tiny_model(family, copy="reference")(
            torch.tensor([[*prompt, 2]]), output_hidden_states=True
        ).hidden_states
    want = torch.stack([plain[i][0] for i in (0, 1, -1)], 1)
    torch.testing.assert_close(torch.cat([prefilled, grown[0]]), want, atol=1e-4, rtol=1e-4)
