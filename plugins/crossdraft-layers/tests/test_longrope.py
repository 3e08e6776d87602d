"""Models with longrope positions: rows with short and with long frequencies, and rows that pass the boundary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from architecture_checks import at_ends, disagreement
from architecture_variants import ORIGINAL, variants
from architecture_walk import TOLERANCE
from crossdraft_layers.longrope import LongRopeLM
from oracle_trees import OracleTrees, drafter_class, verifier_class
from tiny_architectures import noisy, tiny

from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.architectures import RECENT
from crossdraft.framework.lm.forward_pass import ForwardPass
from crossdraft.framework.lm.ragged_lm import RaggedLM
from crossdraft.framework.lm.transformers_lm import TransformersLM, model_slots

NEW = 14
#: One far behind the boundary, one at it, one that passes it, one that stays before it.
PROMPTS = [list(range(5, 30)), list(range(40, 40 + ORIGINAL)), [7, 8, 9] * 3, [3]]


def make_model(model_type: str = "phi3") -> Any:
    """Its frequencies change at `ORIGINAL` tokens."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    return tiny(config_class, **variants(config_class)["rope longrope"])


@pytest.mark.parametrize("model_type", ["phi3", "phimoe", "gemma3_text", "llama4_text"])
def test_logits_match_the_model(model_type: str) -> None:
    if not RECENT and model_type == "gemma3_text":
        pytest.skip("needs transformers 5.23")
    """Chains, then trees in two pieces; a slot changes hands behind the boundary."""
    assert disagreement(make_model(model_type), steps=8, chains=4) < TOLERANCE
    assert disagreement(make_model(model_type), steps=5, prompts=PROMPTS) < TOLERANCE


def test_one_set_of_frequencies_for_all_rows_is_noticed() -> None:
    """Mistake: what transformers' cache does, the longest row of a pass decides for all."""

    def lm(model: Any, rows: int, length: int) -> RaggedLM:
        return RaggedLM(ForwardPass.of(model, rows, length), rows, length)

    assert disagreement(make_model(), lm_class=lm, steps=5, prompts=PROMPTS) > 0.1


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    text = list(prompt)
    for _ in range(NEW):
        text.append(int(at_ends(model, text, len(text) - 1)[-1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("drafter", ["chains", "trees"])
def test_greedy_text(decoder: Callable, drafter: str) -> None:
    target = make_model()
    expected = {tuple(prompt): greedy(make_model(), prompt) for prompt in PROMPTS}
    chosen: tuple[Any, dict[str, Any]] = (OracleTrees, {"answers": expected})
    if drafter == "chains":
        chosen = drafter_class("draft-model"), {"model": "noisy", "gamma": 3}
    loop = decoder(
        target,
        *chosen,
        verifier_class("greedy"),
        batch_size=3,
        drafting=noisy(target),
        max_new_tokens=NEW,
        max_length=64,
        lm=model_slots,
    )
    for response in loop.run(PROMPTS):
        assert response.tokens == expected[tuple(PROMPTS[response.index])]


def test_second_pass_occurs_near_boundary_only() -> None:
    lm = model_slots(make_model(), 1, 64)
    assert isinstance(lm, LongRopeLM)
    lm.start(0, [5] * 9)
    passes = []
    for _ in range(6):
        before = lm.passes
        lm.forward(torch.full((1, 4), 5))
        lm.commit([2])
        passes.append(lm.passes - before)
    assert passes == [1, 1, 1, 2, 1, 1]  # from 8, 10, 12, 14, 16, 18 tokens on


def test_hidden_states_are_those_of_the_set_of_frequencies() -> None:
    model = make_model()
    lm = model_slots(model, 2, 64)
    lm.hidden_layers = (1,)
    texts = [list(range(5, 19)), [3, 4]]
    for row, text in enumerate(texts):
        lm.start(row, text)
    hidden = lm.forward(torch.tensor([[text[-1], 3, 4, 5] for text in texts]))[1]
    assert hidden is not None
    for row, text in enumerate(texts):
        for i in range(4):
            tokens = torch.tensor([[*text, 3, 4, 5][: len(text) + i]])
            with torch.no_grad():
                expected = model(tokens, output_hidden_states=True, use_cache=False).hidden_states[1][0, -1]
            assert (hidden[row, i, 0] - expected).abs().max() < TOLERANCE


def test_slots_that_cannot_pass_the_boundary_are_plain() -> None:
    assert isinstance(model_slots(make_model(), 2, ORIGINAL), TransformersLM)
    assert isinstance(model_slots(make_model(), 2, ORIGINAL + 1), LongRopeLM)
    with pytest.raises(ModelError, match="longer than 16 tokens"):
        TransformersLM(make_model(), 2, ORIGINAL + 1)


def test_layers_alone_are_refused() -> None:
    with pytest.raises(ModelError, match="longrope positions and slots longer than 16 tokens"):
        model_slots(make_model(), 1, 64).fork([0])
