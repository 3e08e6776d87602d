"""Features of texts: hidden states of the target, with the numbers of its layers, of any architecture."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from crossdraft_trainers.contract import Text
from crossdraft_trainers.features import Features, check_head
from crossdraft_trainers.writer import Writer
from tiny_architectures import tiny
from tiny_models import make_tokenizer

from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.errors import UsageError


def make_model(model_type: str, **changes: Any) -> Any:
    return tiny(transformers.CONFIG_MAPPING[model_type], **changes)


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(model, make_tokenizer(), "tiny", "", "", (2,), 96)


def test_numbers_of_hidden_states(tiny_model: Callable) -> None:
    """L is the last layer's output, -1 that of the final norm."""
    model = tiny_model("llama", seed=2, num_hidden_layers=4)
    outputs: list[Any] = []
    hook = model.model.layers[-1].register_forward_hook(lambda *parts: outputs.append(parts[-1]))
    with torch.no_grad():
        states = model(torch.tensor([[3, 1, 4, 15, 9]]), output_hidden_states=True).hidden_states
    hook.remove()
    last = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    expected = torch.stack([states[0][0], states[2][0], last.reshape(5, -1), states[-1][0], states[3][0]], 1)
    features = Features(SimpleNamespace(model=model, name="tiny"), (0, 2, 4, -1, -2), 0.0)  # type: ignore[arg-type]
    batch = features.batch([Text([3, 1], [4, 15, 9], "")], [None])
    torch.testing.assert_close(batch.hidden[0], expected, atol=2e-2, rtol=2e-2)  # bfloat16


def test_training_data() -> None:
    """Answers of a target that has no slots otherwise."""
    writer = Writer(loaded(make_model("bart", vocab_size=64)), batch_size=2, max_prompt=20, max_response=6, seed=0)
    answers = dict(writer.answer([[5, 6, 7], [8, 9]], [0, 1], 0.0))
    assert sorted(answers) == [0, 1] and all(0 < len(answer) <= 6 for answer in answers.values())


@pytest.mark.parametrize("model_type", ["llama4_text", "mllama", "mamba", "bart"])
def test_features_of_heads(model_type: str) -> None:
    """Hidden states along a text; the decoders of the first two are found without ``get_decoder``."""
    model = make_model(model_type)
    check_head(loaded(model))
    batch = Features(loaded(model), (1, -1), 1.0).batch([Text([5, 6, 7], [8, 9], "")], [None])
    with torch.no_grad():
        states = model(torch.tensor([[5, 6, 7, 8, 9]]), output_hidden_states=True).hidden_states
    assert torch.allclose(batch.hidden[0, :, 0], states[1][0], rtol=0.02, atol=0.05)


def test_features_of_layers_with_several_streams_are_refused() -> None:
    with pytest.raises(UsageError, match="does not return one hidden state per token and layer"):
        Features(loaded(make_model("gemma3n_text")), (0, -1), 1.0).batch([Text([5], [6, 7], "")], [None])
