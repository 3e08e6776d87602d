"""Numbers of hidden states: L is the last layer's output, -1 that of the final norm, on every path of the target."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_architectures import tiny
from torch import Tensor, nn

from crossdraft.framework.errors import ModelError, UsageError
from crossdraft.framework.lm.layer_surgery import LastLayerRecorder, recorded
from crossdraft.framework.lm.recomputing_lm import RecomputingLM
from crossdraft.framework.lm.transformers_lm import TransformersLM

TEXT, DEPTH = [3, 1, 4, 15, 9], 4
#: The embedding, the layers' outputs, and the normed output, by several of their names.
NUMBERS = (0, 2, DEPTH, -1, -2, 0.5, 1.0)


@torch.no_grad()
def plain(model: Any, ids: list[int]) -> list[Tensor]:
    """Hidden states 0 to L + 1 ``[T, H]``, layer by layer; the last is normed."""
    decoder, positions = model.model, torch.arange(len(ids))[None]
    x = decoder.embed_tokens(torch.tensor([ids]))
    rotary = decoder.rotary_emb(x, positions)
    mask = torch.full((len(ids), len(ids)), torch.finfo(x.dtype).min).triu(1)[None, None]
    out = [x]
    for layer in decoder.layers:
        x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        out.append(x)
    return [state[0] for state in [*out, decoder.norm(x)]]


def expected(states: list[Tensor]) -> Tensor:
    return torch.stack([states[i] for i in (0, 2, DEPTH, DEPTH + 1, DEPTH - 1, 2, DEPTH)], 1)


@pytest.mark.parametrize("slots", [TransformersLM, RecomputingLM])
def test_last_layer_is_not_the_final_norm(tiny_model: Callable, slots: Any) -> None:
    model = tiny_model("llama", seed=2, num_hidden_layers=DEPTH)
    lm, states = slots(model, 1, 32), expected(plain(model, [*TEXT, 7, 8]))
    lm.hidden_layers = NUMBERS
    hidden = lm.start(0, [*TEXT, 7])
    torch.testing.assert_close(hidden, states[: len(TEXT)], atol=1e-5, rtol=1e-4)
    _, hidden = lm.forward(torch.tensor([[7, 8]]))
    torch.testing.assert_close(hidden[0], states[len(TEXT) :], atol=1e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["Gemma3TextConfig", "GPT2Config"])
def test_last_layer_of_other_architectures(name: str) -> None:
    """The final norm of state L is state -1, in decoders with other names, too."""
    model = tiny(getattr(transformers, name))
    depth = model.config.get_text_config().num_hidden_layers
    lm = TransformersLM(model, 1, 32)
    lm.hidden_layers = (depth, -1)
    hidden = lm.start(0, [*TEXT, 7])
    assert hidden is not None
    decoder = model.get_decoder()
    norm = next(m for n, m in decoder.named_children() if n in ("norm", "ln_f"))
    torch.testing.assert_close(norm(hidden[:, 0]), hidden[:, 1], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(hidden[:, 0], hidden[:, 1])


def test_models_without_one_list_of_layers_are_refused() -> None:
    model = SimpleNamespace(get_decoder=lambda: nn.Identity())
    with pytest.raises(ModelError, match="does not have exactly one list of 4 layers"), recorded(model, [4], 4):
        pass
    with recorded(model, [3, -1], 4) as states:
        out = [torch.zeros(1, 2, 4), torch.ones(1, 2, 4)]
        assert states.select([1], out)[0] is out[1]
    recorder = LastLayerRecorder(1)
    recorder(None, None, torch.zeros(1, 2, 3))
    for returned in (torch.zeros(1, 2, 4), torch.zeros(5, 1, 2, 3)):
        with pytest.raises(UsageError, match="does not return one hidden state per token and layer"):
            recorder.select([1, -1], [returned] * 2)
