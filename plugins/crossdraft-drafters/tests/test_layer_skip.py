"""Sublayers left out: what is computed without them, and that the text is the target's all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_drafters.self_speculation.layer_skip import LayerSkip
from draft_contexts import GivenContext
from pydantic import ValidationError
from tiny_models import generated
from torch import nn

from crossdraft.framework import plugins
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.errors import ModelError, UsageError
from crossdraft.framework.lm.transformers_lm import TransformersLM

PROMPTS = [[5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15]]
NEW = 14


@pytest.fixture(scope="module")
def deep(tiny_model: Callable) -> Any:
    """Five layers of which two contribute little."""
    model = tiny_model("llama", seed=4, copy="layer-skip", num_hidden_layers=5)
    with torch.no_grad():
        for layer in model.model.layers[2:4]:
            layer.self_attn.o_proj.weight *= 0.15
            layer.mlp.down_proj.weight *= 0.15
    return model


def decoder(model: Any, options: Any, batch_size: int = 1, temperature: float = 0.0, **loop: Any) -> Decoder:
    lm, sampling = TransformersLM(model, batch_size, 96), Sampling(temperature=temperature)
    context = GivenContext(lm, sampling, 96, target_model=model)
    layer_skip = LayerSkip(LayerSkip.Config(**{"gamma": 4, **options}), context)
    rule = plugins.get("verifiers", "greedy" if temperature == 0 else "block")
    loop = {"max_new_tokens": NEW, "rng": CounterRng(3), "validate": "always", **loop}
    return Decoder(lm, layer_skip, rule(), sampling=sampling, **loop)


@pytest.mark.parametrize(
    "options",
    [
        {"skip_attention": [2, 3], "skip_mlp": [2, 3]},
        {"skip_attention": [2], "skip_mlp": [3]},
        {"skip_attention": [0, 2], "skip_mlp": [], "policy": {"name": "confidence", "threshold": 0.1}},
    ],
)
def test_greedy_text_is_transformers_own(deep: Any, options: Any) -> None:
    expected = generated(deep, PROMPTS, NEW)
    events: list[Any] = []
    loop = decoder(deep, options, 8, on_step=events.append)
    results = [r.tokens for r in sorted(loop.run(PROMPTS), key=lambda response: response.index)]
    assert results == expected
    used = [event.scores.resume_matches is not None for event in events if event.draft.width]
    assert set(used) == {options["skip_attention"][0] > 0}, "layers before the first that is left out are taken up"
    if options["skip_mlp"]:
        assert any(max(event.accepted) for event in events)


class Without(nn.Module):
    """Adds nothing."""

    def __init__(self, attention: bool):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        nothing = hidden_states * 0
        return (nothing, None) if self.attention else nothing


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gpt-neox")]


@pytest.mark.parametrize("family", ["gemma3", "gpt2", *OTHERS])
def test_fork_matches_model_without_skipped_parts(tiny_model: Callable, family: str) -> None:
    """Against a copy of the model whose own modules were exchanged, run by transformers without a cache of ours."""
    lm = TransformersLM(tiny_model(family, copy="forked"), 1, 64)
    other = tiny_model(family, copy="spoilt")
    stack: Any = next(m for m in other.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
    if not isinstance(stack[0].mlp, Without):
        names = [name for name in ("self_attn", "attn", "attention") if hasattr(stack[0], name)]
        stack[0].mlp = Without(False)
        setattr(stack[1], names[0], Without(True))
    ids = [7, 8, 9, 3, 2, 11]
    fork = lm.fork([0, 1], no_attention=[1], no_mlp=[0])
    lm.start(0, ids[:1])  # nothing committed: the fork computes all of it
    fork.start(0, ids[:1])
    with torch.inference_mode():
        ours, expected = fork.forward(torch.tensor([ids]))[0], other(torch.tensor([ids]), use_cache=False).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    whole = lm.forward(torch.tensor([ids]))[0]
    assert float((whole - ours).abs().max()) > 0.1, "and the model itself is as it was"


def test_models_whose_parts_do_not_add_up_are_refused(tiny_model: Callable) -> None:
    louder = tiny_model("llama", seed=7, copy="louder")
    louder.model.layers[0].register_forward_hook(lambda _, args, out: 1.5 * out)
    with pytest.raises(ModelError, match="does more in a layer than add the outputs"):
        TransformersLM(louder, 1, 64).fork([0, 1], no_mlp=[0])
    lm = TransformersLM(tiny_model("opt", copy="layer-skip"), 1, 64)
    with pytest.raises(
        ModelError, match="a layer of OPTForCausalLM does not have exactly one feed-forward network module"
    ):
        lm.fork([0, 1], no_mlp=[0])
    assert lm.fork([1]).forward(torch.tensor([[5]]))[0].shape == (1, 1, 97), "whole layers may be left out"


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({}, "give either skip_attention and skip_mlp, one of which may be empty, or a checkpoint"),
        ({"skip_mlp": [1], "checkpoint": "x"}, "give either"),
        ({"skip_mlp": [-1]}, "greater than or equal to 0"),
        ({"skip_mlp": [True]}, "valid integer"),
        ({"skip_attention": [1], "policy": "sometimes"}, "sometimes"),
    ],
)
def test_options_that_do_not_fit(options: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        LayerSkip.Config(**options)


def test_invalid_layers_raise(deep: Any) -> None:
    with pytest.raises(ModelError, match="skips part of layer 5, but '' has layers 0 to 4"):
        decoder(deep, {"skip_attention": [1, 5]})
    with pytest.raises(ModelError, match="skips every layer"):
        decoder(deep, {"skip_attention": range(5), "skip_mlp": range(5)})


def test_checkpoint_holds_search_result(deep: Any, tmp_path: Path) -> None:
    facts = {"kind": "layer-skip", "layers": 5, "skip_attention": [2], "skip_mlp": [2, 3], "speed_up": 1.2}
    (tmp_path / "settings.json").write_text(json.dumps(facts))
    texts = []
    for options in ({"checkpoint": str(tmp_path)}, {"skip_attention": [2], "skip_mlp": [2, 3]}):
        loop = decoder(deep, options, 2, 1.0)
        responses = sorted(loop.run(PROMPTS), key=lambda response: response.index)
        texts.append([(r.tokens, [x.tau for x in r.steps]) for r in responses])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("{", "not JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"kind": "disco"}', "is not a checkpoint of layer-skip"),
        ('{"kind": "layer-skip", "layers": 5, "skip_attention": [0.5], "skip_mlp": []}', "is damaged"),
        ('{"kind": "layer-skip", "layers": 5, "skip_attention": 3, "skip_mlp": []}', "is damaged"),
        ('{"kind": "layer-skip", "layers": 9, "skip_attention": [8], "skip_mlp": []}', "a target of 9 layers, not 5"),
        (None, "cannot read the settings"),
    ],
)
def test_checkpoint_of_something_else_is_refused(deep: Any, tmp_path: Path, text: str | None, sentence: str) -> None:
    if text is not None:
        (tmp_path / "settings.json").write_text(text)
    with pytest.raises(UsageError, match=sentence):
        decoder(deep, {"checkpoint": str(tmp_path)})
