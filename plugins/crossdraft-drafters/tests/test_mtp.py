"""Modules of multi-token prediction: the names they are published under, what they compute, and what is refused.

How they draft is tested, with the other heads that read features, in test_feature_heads.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_drafters.heads.mtp import Mtp, MtpHead
from draft_contexts import GivenContext
from feature_heads import check_pairs
from mtp_tensors import qwen, renamed
from safetensors.torch import load_file
from torch import Tensor

from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.transformers_lm import TransformersLM

H, V, TARGET_LAYERS = 32, 97, 2
#: Which family a target is of: with and without query and key norms.
FAMILIES = ("llama", "qwen3")


@pytest.fixture(scope="module")
def target(tiny_model: Callable) -> Callable[[str], Any]:
    return lambda family: tiny_model(family, copy="mtp")


NAMES = {
    "mtp.layers.0.": "model.layers.2.",
    "mtp.fc.": "model.layers.2.eh_proj.",
    "mtp.pre_fc_norm_embedding.": "model.layers.2.enorm.",
    "mtp.pre_fc_norm_hidden.": "model.layers.2.hnorm.",
    "mtp.norm.": "model.layers.2.shared_head.norm.",
}


def deepseek(target: Any) -> dict[str, Tensor]:
    """The same module; the copies of the target's embedding and head beside it, as they are published."""
    out = renamed(qwen(target), NAMES)
    out["model.layers.2.embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    out["model.layers.2.shared_head.head.weight"] = target.get_output_embeddings().weight.detach().clone()
    return out


SPECULATORS = {
    "mtp.layers.0.": "mtp_layers.0.",
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
}


def speculators(target: Any) -> dict[str, Tensor]:
    """The same module as vllm-project/speculators converts it."""
    return renamed(qwen(target), SPECULATORS)


def whole(target: Any, module: dict[str, Tensor]) -> dict[str, Tensor]:
    """The target's checkpoint with the MTP module, and a second, unused module."""
    second = {key.replace("layers.2.", "layers.3.").replace("mtp.layers.0.", "mtp.layers.1."): t + 1
              for key, t in module.items() if "layers" in key}  # fmt: skip
    return {**target.state_dict(), **second, **module}


LAYOUTS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "Qwen": qwen,
    "DeepSeek": deepseek,
    "DeepSeek, cut out": lambda target: {k.removeprefix("model."): t for k, t in deepseek(target).items()},
    "speculators": speculators,
    "Qwen, whole checkpoint": lambda target: whole(target, qwen(target)),
    "DeepSeek, whole checkpoint": lambda target: whole(target, deepseek(target)),
}


def computed(target: Any, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[T, V]`` and features ``[T, H]`` of `qwen`'s module, from transformers' own model of one layer."""
    tensors = qwen(target)
    config = type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": 1, "layer_types": None})
    model = type(target.model)(config)
    inside = {k.removeprefix("mtp."): t for k, t in tensors.items() if k.startswith(("mtp.layers.", "mtp.norm."))}
    assert set(model.load_state_dict(inside, strict=False).missing_keys) == {"embed_tokens.weight"}

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * tensors[f"mtp.{name}.weight"]

    embeds = target.get_input_embeddings().weight[tokens]
    pair = torch.cat([norm(embeds, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")], -1)
    out = model(inputs_embeds=(pair @ tensors["mtp.fc.weight"].T)[None]).last_hidden_state[0]
    return out @ target.get_output_embeddings().weight.T, out


def built(target: Any, tensors: dict[str, Tensor] | None = None, model: str = "module") -> Mtp:
    def heads(name: str) -> Checkpoint:
        assert tensors is not None
        own = {"speculators_model_type": "mtp"} if any(key.startswith("mtp_layers") for key in tensors) else {}
        return Checkpoint(name, Path("somewhere"), own, dict(tensors), "somewhere", "")

    arguments = {} if tensors is None else {"load_heads": heads}
    context = GivenContext(TransformersLM(target, 2, 64), Sampling(temperature=0), 64, target_model=target, **arguments)
    return Mtp(Mtp.Config(model=model), context)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_those_of_plain_computation(target: Callable, family: str, name: str) -> None:
    model = target(family)
    drafter = built(model, LAYOUTS[name](model))
    tokens, hidden = [5, 90, 2, 2, 61, 7, 33, 8, 1, 9, 10], torch.randn(11, 1, H)
    logits, features = computed(model, tokens, hidden[:, 0])
    check_pairs(drafter, tokens, hidden, logits, features)


def test_targets_head_and_embedding_are_used_as_they_are(target: Callable) -> None:
    model = target("llama")
    head = built(model, qwen(model)).head
    assert head.embed_tokens.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert head.lm_head.weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def test_features_are_last_hidden_state_after_final_norm() -> None:
    traits = Mtp.traits(Mtp.Config(model="m"), Sampling())
    assert traits.hidden_layers == (-1,) and traits.is_chain and not traits.replayable


def test_writer_writes_qwens_names(target: Callable, tmp_path: Path) -> None:
    model = target("qwen3")
    head = built(model, qwen(model)).head
    head.save(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == qwen(model).keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in qwen(model).items())
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    repeat = built(model, model=str(tmp_path)).head
    assert all(torch.equal(repeat.state_dict()[key], tensor) for key, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda t: t.pop("mtp.norm.weight"), r"missing norm\.weight \[32\]"),
        (
            lambda t: t.pop("mtp.layers.0.self_attn.q_proj.weight"),
            r"missing layer\.self_attn\.q_proj\.weight \[32, 32\]",
        ),
        (lambda t: t.update({"mtp.extra.weight": torch.zeros(2)}), r"unexpected layer\.extra\.weight \[2\]"),
        (lambda t: t.update({"mtp.fc.weight": torch.zeros(H, H)}), r"eh_proj\.weight is \[32, 32\], not \[32, 64\]"),
        (
            lambda t: t.update({"mtp.embed_tokens.weight": torch.zeros(9, H)}),
            r"embed_tokens.weight must have shape \[97, 32\], but theirs has \[9, 32\]",
        ),
        (lambda t: t.clear(), "they lack a module of multi-token prediction"),
    ],
)
def test_modules_that_do_not_fit_are_refused(target: Callable, change: Callable, sentence: str) -> None:
    model = target("llama")
    tensors = qwen(model)
    change(tensors)
    with pytest.raises(ModelError, match=rf"the heads 'module' do not load: .*{sentence}.*\(somewhere\)"):
        built(model, tensors)


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_targets_of_another_make_are_refused(tiny_model: Callable, family: str) -> None:
    """Learned positions; one rotary embedding for each type of layer."""
    with pytest.raises(ModelError, match="lacks decoder layers with one rotary embedding and a final norm"):
        MtpHead(tiny_model(family))
