"""Models that cannot be decoded speculatively are scored by plain passes, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from architecture_checks import disagreement, plain
from architecture_variants import variants
from architecture_walk import NOT_MADE, TOLERANCE, TYPES
from tiny_architectures import tiny
from tiny_models import make_tokenizer

from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.recomputing_lm import RecomputingLM
from crossdraft.framework.lm.transformers_lm import TransformersLM

#: Reasons why a model cannot be scored either.
REFUSED = {
    "axk2": "computes other logits for a token if more tokens follow",
    "blt": "cannot run on a text only",
    "cpmant": "computes other logits for a token if more tokens follow",
    "deepseek_v32": "computes other logits for a token if more tokens follow",
    "deepseek_v4": "computes other logits for a token if more tokens follow",
    "doge": "computes other logits for a token if more tokens follow",
    "dots3_note": "computes other logits for a token if more tokens follow",
    "dots3_note_text": "computes other logits for a token if more tokens follow",
    "glm_moe_dsa": "computes other logits for a token if more tokens follow",
    "hy_v4": "computes other logits for a token if more tokens follow",
    "musicgen": "does not have one output embedding",
    "musicgen_melody": "does not have one output embedding",
    "prophetnet": "computes other logits for a token if more tokens follow",
    "xlm": "computes other logits for a token if more tokens follow",
    "xlnet": "cannot run on a text only",
}
FEW = ["bart", "bloom", "roberta", "openai-gpt", "deepseek_v32", "qwen3_next"]


def make_model(model_type: str, **changes: Any) -> Any:
    return tiny(transformers.CONFIG_MAPPING[model_type], **changes)


def longrope(model_type: str) -> Any:
    """Its frequencies change at 16 tokens."""
    return make_model(model_type, **variants(transformers.CONFIG_MAPPING[model_type])["rope longrope"])


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(model, make_tokenizer(), "tiny", "", "", (2,), 96)


@pytest.mark.parametrize(
    "model_type", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in TYPES if name not in FEW)]
)
def test_logits_match_the_model(model_type: str) -> None:
    if model_type in NOT_MADE:
        pytest.skip(NOT_MADE[model_type])
    model = make_model(model_type)
    if model_type in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[model_type]):
            RecomputingLM(model, 3, 64)
    else:
        assert disagreement(model, lm_class=RecomputingLM, steps=3, chains=1) < TOLERANCE


@torch.inference_mode()
def test_text_crosses_boundary_of_longrope() -> None:
    """The tokens before it have the logits of a short text, those behind it of a long one."""
    model, text = longrope("phi3"), list(range(5, 35))
    lm = RecomputingLM(model, 1, 64)
    lm.start(0, text[:11])
    logits = lm.forward(torch.tensor([text[10:]]))[0][0]
    expected = torch.stack([plain(model, text[: n + 1])[-1] for n in range(10, 30)])
    assert (logits - expected).abs().max() < TOLERANCE * expected.std()


@pytest.mark.parametrize("make", [lambda: make_model("bloom"), lambda: longrope("phi3")], ids=["bloom", "longrope"])
def test_replay(make: Callable[[], Any]) -> None:
    """Log P of recorded responses, and drafts of a drafter, with a target that `TransformersLM` refuses."""
    pytest.importorskip("crossdraft_advisor")
    from crossdraft_advisor.replay.teacher_forcing.scoring import context_factory
    from replay_fixtures import RecordedResponse, configured, score_drafter

    model, sampling = make(), Sampling(temperature=1.0)
    with pytest.raises(ModelError):
        TransformersLM(model, 1, 64)
    prompts = [[5, 6, 7, 5, 6], [9, 8], [3, 4, 3, 4, 3, 4, 3]]
    texts = [
        RecordedResponse(prompt, [(7 * i) % 90 + 1 for i in range(n)])
        for prompt, n in zip(prompts, (12, 5, 20), strict=True)
    ]
    scores = list(score_drafter(configured("prompt-lookup"), texts, context_factory(loaded(model), sampling), depth=3))
    for text, score in zip(texts, scores, strict=True):
        whole = [*text.prompt, *text.tokens]
        ends = range(len(text.prompt), len(whole))
        with torch.inference_mode():
            expected = [float(plain(model, whole[:n])[-1].log_softmax(-1)[whole[n]]) for n in ends]
        assert np.allclose(score.log_p, expected, atol=1e-3)
