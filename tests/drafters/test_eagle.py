"""EAGLE heads: the layouts they are published in, what they compute, and what is refused.

How they draft is tested, with the other heads that read features, in test_feature_heads.py.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_contexts import GivenContext
from feature_heads import check_pairs
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from crossdraft.drafters.heads.eagle import Eagle
from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.transformers_lm import TransformersLM

H, FF, HEADS, KV, D, V, EPS = 32, 40, 4, 2, 10, 97, 1e-5
CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=H,
    intermediate_size=FF,
    num_attention_heads=HEADS,
    num_key_value_heads=KV,
    head_dim=D,
    num_hidden_layers=1,
    rms_norm_eps=EPS,
    vocab_size=V,
    max_position_embeddings=8,
)
SHAPES = {
    "fc.weight": (H, 2 * H),
    "fc.bias": (H,),
    "layers.0.self_attn.q_proj.weight": (HEADS * D, H),
    "layers.0.self_attn.k_proj.weight": (KV * D, H),
    "layers.0.self_attn.v_proj.weight": (KV * D, H),
    "layers.0.self_attn.o_proj.weight": (H, HEADS * D),
    "layers.0.mlp.gate_proj.weight": (FF, H),
    "layers.0.mlp.up_proj.weight": (FF, H),
    "layers.0.mlp.down_proj.weight": (H, FF),
    "layers.0.post_attention_layernorm.weight": (H,),
}


def authors(**more: tuple[int, ...]) -> dict[str, Tensor]:
    """The authors' layout, and further tensors (dots written as two underscores)."""
    torch.manual_seed(0)
    shapes = SHAPES | {key.replace("__", "."): shape for key, shape in more.items()}
    return {key: torch.randn(shape) * 0.5 for key, shape in shapes.items()}


def speculators(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of vllm-project/speculators up to 0.3."""
    renamed = {key.replace("layers.0.", "transformer."): tensor for key, tensor in tensors.items()}
    return {key.replace("fc.", "fusion_fc."): tensor for key, tensor in renamed.items()}


def without(*keys: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in authors().items() if key not in keys}


BIASES = {f"layers__0__self_attn__{n}_proj__bias": (size * D,) for n, size in (("q", HEADS), ("k", KV), ("v", KV))}
HASS = {
    "embedding_layernorm__weight": (H,),
    "layers__0__input_layernorm__weight": (H,),
    "pre_lm_head_layernorm__weight": (H,),
    "lm_head__weight": (V, H),
}
SECOND = {
    key.replace("layers.0.", "layers.1.").replace(".", "__"): shape
    for key, shape in (SHAPES | {"layers.0.input_layernorm.weight": (H,)}).items()
    if key.startswith("layers.0.")
}
LAYOUTS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "authors": (authors(), CONFIG),
    "authors, embedding": (authors(embed_tokens__weight=(V, H)), CONFIG),
    "authors, no bias": (without("fc.bias"), {**CONFIG, "bias": False}),
    "heads of Qwen2": (authors(**BIASES), CONFIG),
    "rope_theta": (authors(), {**CONFIG, "rope_theta": 300.0}),
    "two layers": (authors(**SECOND), CONFIG),
    "old files with inv_freq": (authors(layers__0__self_attn__rotary_emb__inv_freq=(5,)), CONFIG),
    "speculators": (speculators(authors(lm_head__weight=(V, H))), {"transformer_layer_config": CONFIG}),
    "HASS": (speculators(authors(**HASS)), {"transformer_layer_config": CONFIG}),
}


@pytest.fixture(scope="module")
def target() -> Any:
    """Its rope_theta is not the heads'."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    sizes = dict(hidden_size=H, intermediate_size=48, num_attention_heads=4, vocab_size=V, num_hidden_layers=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=False)).eval()


def computed(
    target: Any, tensors: dict[str, Tensor], config: dict[str, Any], tokens: list[int], features: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits ``[T, V]`` and features ``[T, H]`` from transformers' own Llama without its ends; ``features [T, H]``."""
    t = {key.replace("transformer.", "layers.0.").replace("fusion_fc.", "fc."): x for key, x in tensors.items()}
    t = {key: x for key, x in t.items() if "inv_freq" not in key}
    raw = config.get("transformer_layer_config", config)
    layers = 1 + ("layers.1.self_attn.q_proj.weight" in t)
    options = {k: v for k, v in raw.items() if k not in ("architectures", "model_type", "bias", "num_hidden_layers")}
    rope = {"rope_type": "default", "rope_theta": options.pop("rope_theta", 10000.0)}
    model = LlamaForCausalLM(LlamaConfig(**options, num_hidden_layers=layers, rope_parameters=rope)).model
    if "layers.0.input_layernorm.weight" not in t:
        model.layers[0].input_layernorm = nn.Identity()
    for name in ("q_proj", "k_proj", "v_proj"):
        if (bias := t.get(f"layers.0.self_attn.{name}.bias")) is not None:
            getattr(model.layers[0].self_attn, name).bias = nn.Parameter(torch.empty_like(bias))
    model.norm = nn.Identity()
    inside = {key: x for key, x in t.items() if key.startswith("layers.")}
    assert set(model.load_state_dict(inside, strict=False, assign=True).missing_keys) == {"embed_tokens.weight"}

    def norm(key: str, x: Tensor) -> Tensor:
        if key not in t:
            return x
        layer = LlamaRMSNorm(H, EPS)
        layer.weight.data = t[key]
        return layer(x)

    embeds = norm("embedding_layernorm.weight", t.get("embed_tokens.weight", target.model.embed_tokens.weight)[tokens])
    fused = torch.cat([embeds, features], -1) @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(H))
    out = model(inputs_embeds=fused[None]).last_hidden_state[0]
    return norm("pre_lm_head_layernorm.weight", out) @ t.get("lm_head.weight", target.lm_head.weight).T, out


def load(target: Any, tensors: dict[str, Tensor], config: dict[str, Any]) -> Eagle:
    return built(target, lambda name: Checkpoint(name, Path("somewhere"), config, dict(tensors), "somewhere", ""))


def built(target: Any, heads: Any = None, model: str = "head") -> Eagle:
    arguments = {} if heads is None else {"load_heads": heads}
    context = GivenContext(TransformersLM(target, 2, 64), Sampling(temperature=0), 64, target_model=target, **arguments)
    return Eagle(Eagle.Config(model=model), context)


@pytest.mark.parametrize("name", LAYOUTS)
@torch.inference_mode()
def test_logits_are_those_of_plain_computation(target: Any, name: str) -> None:
    tensors, config = LAYOUTS[name]
    # In double precision: these weights make logits of up to 300, of which single precision loses 1e-3 now and then.
    target, tensors = deepcopy(target).double(), {key: tensor.double() for key, tensor in tensors.items()}
    drafter = load(target, tensors, config)
    tokens, hidden = [5, 90, 2, 2, 61, 7, 33, 8, 1, 9, 10], torch.randn(11, 1, H, dtype=torch.float64)
    logits, features = computed(target, tensors, config, tokens, hidden[:, 0])
    check_pairs(drafter, tokens, hidden, logits, features, tolerance=1e-5)


def test_targets_head_and_embedding_are_used_as_they_are(target: Any) -> None:
    head = load(target, authors(), CONFIG).head
    assert head.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert head.lm_head.weight.data_ptr() == target.get_output_embeddings().weight.data_ptr()
    assert not head.embed_tokens.weight.requires_grad and target.get_input_embeddings().weight.requires_grad


def test_features_are_last_hidden_state_after_final_norm() -> None:
    traits = Eagle.traits(Eagle.Config(model="m"), Sampling())
    assert traits.hidden_layers == (-1,)
    assert traits.is_chain and not traits.point_mass and not traits.replayable


def test_writer_writes_authors_layout(target: Any, tmp_path: Path) -> None:
    head = load(target, authors(), CONFIG).head
    head.save(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == SHAPES.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in authors().items())
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["rope_theta"] == 10000.0 and raw["bias"] is True and raw["head_dim"] == D
    repeat = built(target, model=str(tmp_path)).head
    assert all(torch.equal(repeat.state_dict()[key], tensor) for key, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    "tensors, sentence",
    [
        (without("fc.weight"), r"missing fc\.weight \[32, 64\]"),
        (without("layers.0.mlp.up_proj.weight"), r"missing layers\.0\.mlp\.up_proj\.weight \[40, 32\]"),
        (authors(norm__weight=(H,)), r"unexpected norm\.weight \[32\]"),
        (authors(fc__weight=(H, 3 * H)), r"fc\.weight is \[32, 96\], not \[32, 64\]"),
        (
            authors(embed_tokens__weight=(40, H)),
            r"embed_tokens.weight must have shape \[97, 32\], but theirs has \[40, 32\]",
        ),
        (authors(lm_head__weight=(40, H)), r"lm_head.weight must have shape \[97, 32\], but theirs has \[40, 32\]"),
        (authors(layers__0__hidden_norm__weight=(H,)), "they are EAGLE-3 heads .* use drafter 'eagle3'"),
    ],
)
def test_heads_that_do_not_fit_are_refused(target: Any, tensors: dict[str, Tensor], sentence: str) -> None:
    with pytest.raises(ModelError, match=rf"the heads 'head' do not load: .*{sentence}.*\(somewhere\)"):
        load(target, tensors, CONFIG)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"num_attention_heads": 5}, "config.json is not a config of decoder layers: .*"),
        ({"hidden_size": 36}, "they read features of width 36, but the target's have width 32"),
    ],
)
def test_config_that_does_not_fit_is_refused(target: Any, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=f"the heads 'head' do not load: {sentence}"):
        load(target, authors(), {**CONFIG, **changes})


def test_pickles_that_run_code_are_refused(target: Any, tmp_path: Path) -> None:
    """The authors' own files are pickles: of tensors alone they load, of more they do not."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(authors(), tmp_path / "pytorch_model.bin")
    assert torch.equal(built(target, model=str(tmp_path)).head.state_dict()["fc.weight"], authors()["fc.weight"])
    torch.save({"fc.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="a pickle of more than tensors, which could run code"):
        built(target, model=str(tmp_path))
