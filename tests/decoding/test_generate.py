"""The one-call door and the door through transformers' own `generate`."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crossdraft import custom_generate
from crossdraft.framework.contracts.errors import UnknownNameError, UsageError
from crossdraft.framework.decoding.build import configured


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_custom_generate_equals_generate(model):
    ids = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [9, 8, 7, 9, 8, 7, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    ours = model.generate(ids, custom_generate=custom_generate, drafter="prompt-lookup", **options)
    assert ours.tolist() == expected.tolist()


def test_a_drafter_with_a_model_of_its_own_is_refused_there(model):
    with pytest.raises(UsageError, match=r"crossdraft\.generate"):
        model.generate(
            torch.tensor([[4, 5]]), max_new_tokens=4, custom_generate=custom_generate,
            drafter={"name": "small-lm", "model": "x"},
        )  # fmt: skip


def test_a_wrong_key_is_named_with_the_right_ones():
    with pytest.raises(UsageError, match=r"key 'gama'.*its keys are gamma"):
        configured("drafters", {"name": "prompt-lookup", "gama": 3})
    with pytest.raises(UnknownNameError, match="prompt-lookup"):
        configured("drafters", "prompt-lokup")
