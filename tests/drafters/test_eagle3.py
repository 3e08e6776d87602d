"""EAGLE-3 heads: the layouts they are published in, what they compute, and what is refused.

How they draft is tested, with the other heads that read features, in test_feature_heads.py.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_contexts import GivenContext
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from crossdraft.drafters.heads.eagle3 import Eagle3, Eagle3Head
from crossdraft.drafters.heads.eagle_weights import make_config
from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.transformers_lm import TransformersLM

#: Sizes of the heads: none divides another by accident. The target's hidden size is 48, its vocabulary 97.
H, FF, HEADS, KV, D, V, TARGET_H, EPS = 24, 40, 3, 1, 10, 97, 48, 1e-5
#: A reduced vocabulary, in no order.
IDS = [90, 3, 41, 7, 8, 12, 60, 11, 0, 96, 55, 23]
LAYERS = (3, 0, 2)
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
    draft_vocab_size=len(IDS),
    max_position_embeddings=8,
    tie_word_embeddings=False,
)


# -- files with documented names, and what they compute ---------------------------------------------------


def random(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.5


def layer(prefix: str, width: int, bias: bool = False, qk_norm: bool = False) -> dict[str, Tensor]:
    """A decoder layer's tensors; ``width`` is what q, k and v read."""
    shapes = {"q_proj": (HEADS * D, width), "k_proj": (KV * D, width), "v_proj": (KV * D, width)}
    out = {f"self_attn.{name}.weight": random(*shape) for name, shape in shapes.items()}
    if bias:
        out |= {f"self_attn.{name}.bias": random(shape[0]) for name, shape in shapes.items()}
    if qk_norm:
        out |= {"self_attn.q_norm.weight": random(D), "self_attn.k_norm.weight": random(D)}
    out["self_attn.o_proj.weight"] = random(H, HEADS * D)
    out |= {f"mlp.{name}_proj.weight": random(FF, H) for name in ("gate", "up")}
    out["mlp.down_proj.weight"] = random(H, FF)
    out |= {"input_layernorm.weight": random(H), "post_attention_layernorm.weight": random(H)}
    return {prefix + key: tensor for key, tensor in out.items()}


def official(rows: int = len(IDS), **options: bool) -> dict[str, Tensor]:
    """The authors' layout: Vd = ``rows``; d2t holds offsets; the embedding is their own, as H is not the target's."""
    torch.manual_seed(0)
    out = layer("midlayer.", 2 * H, **options)
    out |= {"midlayer.hidden_norm.weight": random(H), "norm.weight": random(H), "fc.weight": random(H, 3 * TARGET_H)}
    out |= {"lm_head.weight": random(rows, H), "embed_tokens.weight": random(V, H)}
    if rows == len(IDS):
        ids = torch.tensor(IDS)
        out["d2t"] = ids - torch.arange(rows)
        out["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    return out


def speculators(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}


def nested(**more: Any) -> dict[str, Any]:
    """A config as vllm-project/speculators writes it."""
    inner = {k: v for k, v in CONFIG.items() if k not in ("architectures", "draft_vocab_size")}
    return dict(
        architectures=["Eagle3Speculator"],
        speculators_model_type="eagle3",
        transformer_layer_config=inner,
        draft_vocab_size=len(IDS),
        speculators_config={"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
        **more,
    )


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x: Tensor, theta: float) -> Tensor:
    """``x [T, heads, D]`` by position and frequency, halves paired."""
    angle = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(0, D, 2) / D)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attention(w: Callable[[str], Tensor | None], x: Tensor, theta: float, window: int = 99) -> Tensor:
    def project(name: str, heads: int) -> Tensor:
        out = x @ w(f"self_attn.{name}_proj.weight").T  # type: ignore[union-attr]
        bias = w(f"self_attn.{name}_proj.bias")
        out = (out if bias is None else out + bias).view(len(x), heads, D)
        scale = w(f"self_attn.{name}_norm.weight")
        return out if scale is None else norm(out, scale)

    q, k, v = rotated(project("q", HEADS), theta), rotated(project("k", KV), theta), project("v", KV)
    scores = torch.einsum("ihd,jd->hij", q, k[:, 0]) / math.sqrt(D)
    near = torch.ones(len(x), len(x)).tril().triu(1 - window).bool()
    scores = scores.masked_fill(~near, -torch.inf)
    mixed = torch.einsum("hij,jd->ihd", scores.softmax(-1), v[:, 0])
    return mixed.reshape(len(x), -1) @ w("self_attn.o_proj.weight").T  # type: ignore[union-attr]


def computed(
    tensors: dict[str, Tensor],
    tokens: list[int],
    hidden: Tensor,
    *,
    theta: float = 10000.0,
    window: int = 99,
    norm_before_residual: bool = False,
    feed_normed: bool = False,
    head_norm: bool = True,
) -> tuple[Tensor, Tensor]:
    """``hidden [T, 3, Ht]`` -> logits ``[T, V]`` and the features fed back ``[T, H]``; nothing of the package's."""
    t = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}

    def getter(prefix: str) -> Callable[[str], Any]:
        return lambda name: t.get(prefix + name)

    hidden = torch.stack([norm(h, t[f"fc_norm.{i}.weight"]) if "fc_norm.0.weight" in t else h
                          for i, h in enumerate(hidden.unbind(1))], 1)  # fmt: skip
    wide = hidden.flatten(1)
    wide = norm(wide, t["input_norm.weight"]) if "input_norm.weight" in t else wide
    feature = wide @ t["fc.weight"].T
    w, embeds = getter("layers.0."), t["embed_tokens.weight"][tokens]
    normed = norm(feature, w("hidden_norm.weight"))
    pair = torch.cat([norm(embeds, w("input_layernorm.weight")), normed], 1)
    out = (normed if norm_before_residual else feature) + attention(w, pair, theta, window)
    for i in range(1 + ("layers.1.input_layernorm.weight" in t)):
        w = getter(f"layers.{i}.")
        if i:
            out = out + attention(w, norm(out, w("input_layernorm.weight")), theta, window)
        x = norm(out, w("post_attention_layernorm.weight"))
        gate = functional.silu(x @ w("mlp.gate_proj.weight").T) * (x @ w("mlp.up_proj.weight").T)
        out = out + gate @ w("mlp.down_proj.weight").T
    normed = norm(out, t["norm.weight"])
    rows = (normed if head_norm else out) @ t["lm_head.weight"].T
    if "d2t" not in t:
        return rows, normed if feed_normed else out
    logits = torch.full((len(tokens), V), -torch.inf)
    for i, offset in enumerate(t["d2t"].tolist()):
        logits[:, i + offset] = rows[:, i]
    return logits, normed if feed_normed else out


def plus(tensors: dict[str, Tensor], **more: Tensor) -> dict[str, Tensor]:
    return {**tensors, **{key.replace("__", "."): tensor for key, tensor in more.items()}}


def layouts() -> dict[str, tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]]:
    """Per name: tensors, config and what it means to `computed`."""
    torch.manual_seed(1)
    input_norm = {"input_norm__weight": random(3 * TARGET_H)}
    fc_norm = {f"fc_norm__{i}__weight": random(TARGET_H) for i in range(3)}
    flags = dict(norm_before_residual=True, norm_output=True)
    sliding = nested()
    sliding["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 3}
    return {
        "authors": (official(), CONFIG, {}),
        "authors, whole vocabulary": (official(rows=V), {**CONFIG, "draft_vocab_size": V}, {}),
        "authors, biases": (official(bias=True), CONFIG, {}),
        "query and key norms": (official(qk_norm=True), CONFIG, {}),
        "rope_theta": (official(), {**CONFIG, "rope_theta": 300.0}, {"theta": 300.0}),
        "rope_parameters": (
            official(),
            {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
            {"theta": 300.0},
        ),
        "SpecForge": (official(), {**CONFIG, "norm_output": False}, {"head_norm": False}),
        "one norm before fc": (plus(official(), **input_norm), CONFIG, {}),
        "two layers": (plus(official(), **layer("layers__1__", H)), {**CONFIG, "num_hidden_layers": 2}, {}),
        "speculators": (speculators(official()), nested(), {}),
        "a sliding window": (speculators(official()), sliding, {"window": 3}),
        "3.1": (plus(official(), **fc_norm), {**CONFIG, "fc_norm": True, "norm_output": True}, {"feed_normed": True}),
        "3.1, nothing fed back normed": (official(), {**CONFIG, "fc_norm": False, "norm_output": False}, {}),
        "speculators 3.1": (
            speculators(plus(official(), **fc_norm)),
            nested(**flags),
            {"norm_before_residual": True, "feed_normed": True},
        ),
    }


LAYOUTS = tuple(layouts())


def sized(hidden_size: int) -> Any:
    """The config that CONFIG means, for heads of another width."""
    keys = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers")
    return make_config(hidden_size=hidden_size, rms_norm_eps=EPS, **{key: CONFIG[key] for key in keys})


@pytest.fixture(scope="module")
def target() -> Any:
    """Its rope_theta is not the heads'."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    sizes = dict(hidden_size=TARGET_H, intermediate_size=48, num_attention_heads=4, vocab_size=V, num_hidden_layers=4)
    return LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=False)).eval()


def load(target: Any, tensors: dict[str, Tensor], config: dict[str, Any], **options: Any) -> Eagle3:
    def heads(name: str) -> Checkpoint:
        return Checkpoint(name, Path("somewhere"), config, dict(tensors), "somewhere", "")

    return built(target, heads, **options)


def built(target: Any, heads: Any = None, model: str = "head", **options: Any) -> Eagle3:
    arguments = {} if heads is None else {"load_heads": heads}
    context = GivenContext(TransformersLM(target, 2, 64), Sampling(temperature=0), 64, target_model=target, **arguments)
    return Eagle3(Eagle3.Config(model=model, **{"layers": LAYERS, **options}), context)


@pytest.mark.parametrize("name", LAYOUTS)
@torch.inference_mode()
def test_logits_are_those_of_plain_computation(target: Any, name: str) -> None:
    tensors, config, meaning = layouts()[name]
    drafter = load(target, tensors, config)
    tokens, hidden = [5, 90, 2, 2, 61, 7, 33, 8, 1, 9, 10], torch.randn(11, 3, TARGET_H)
    logits, features = computed(tensors, tokens, hidden, **meaning)
    fused = drafter.head.fuse(hidden)
    out = drafter.head(torch.tensor([tokens]), fused[None])
    torch.testing.assert_close(out.features[0], features, atol=1e-4, rtol=1e-4)
    # The same through the cache: prefill, then a ragged step, in a slot whose neighbour is shorter.
    drafter.lm.start(0, tokens[:9], fused[:8])
    drafter.lm.start(1, tokens[:2], fused[:1])
    last = drafter.lm.commit(
        torch.tensor([tokens[8:], [tokens[1], 0, 0]]), torch.stack([fused[8:], fused[1:4]]), [3, 1]
    )
    torch.testing.assert_close(last[0], logits[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last[1], logits[1], atol=1e-4, rtol=1e-4)


def test_missing_tensors_are_shared_with_target(target: Any) -> None:
    config = {**CONFIG, "hidden_size": TARGET_H, "draft_vocab_size": V}
    head = Eagle3Head(sized(TARGET_H), target.get_input_embeddings().weight, 3 * TARGET_H)
    tensors = {k: t for k, t in head.state_dict().items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    loaded = load(target, tensors, config).head
    assert loaded.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert loaded.lm_head.weight.data_ptr() == target.get_output_embeddings().weight.data_ptr()
    assert not loaded.embed_tokens.weight.requires_grad and target.get_input_embeddings().weight.requires_grad


def test_writer_writes_authors_layout(target: Any, tmp_path: Path) -> None:
    head = Eagle3Head(sized(TARGET_H), target.get_input_embeddings().weight, 3 * TARGET_H, target_ids=torch.tensor(IDS))
    head.save(tmp_path, layers=(2, 3, 4))
    written = load_file(tmp_path / "model.safetensors")
    shapes = {key: list(tensor.shape) for key, tensor in official().items() if key != "embed_tokens.weight"}
    assert {k: len(t.shape) for k, t in written.items()} == {k: len(shape) for k, shape in shapes.items()}
    assert list(written["midlayer.self_attn.q_proj.weight"].shape) == [HEADS * D, 2 * TARGET_H]
    assert (written["d2t"] + torch.arange(len(IDS))).tolist() == IDS and written["t2d"].dtype == torch.bool
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["rope_theta"] == 10000.0 and raw["draft_vocab_size"] == len(IDS) and raw["vocab_size"] == V
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    repeat = built(target, model=str(tmp_path), layers=(2, 3, 4)).head
    for key, tensor in head.state_dict().items():
        assert torch.equal(repeat.state_dict()[key], tensor), key
    assert repeat.target_ids is not None and repeat.target_ids.tolist() == IDS
    with pytest.raises(ValueError, match="layers cannot start with 1"):
        head.save(tmp_path, layers=(1, 2, 3))


# -- layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth, expected", [(6, (2, 3, 3)), (7, (2, 3, 4))])
def test_default_layers_are_authors(tiny_model: Callable, depth: int, expected: tuple[int, ...]) -> None:
    """The inputs of layers 2, L // 2 and L - 3, in transformers' numbering of hidden states."""
    model = tiny_model("llama", num_hidden_layers=depth)
    traits = Eagle3.traits(Eagle3.Config(model="m"), Sampling())
    lm = TransformersLM(model, 1, 32)
    lm.hidden_layers = traits.hidden_layers
    hidden = lm.start(0, [3, 1, 4, 1])
    states = model(torch.tensor([[3, 1, 4]]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(hidden, torch.stack([states[i][0] for i in expected], 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "ids, config, expected",
    [
        ([2, 3, 4], {}, "[2, 3, 4]"),
        ([1, 2, 3], {}, "[2, 3, 4]"),  # outputs of layers
        ([1, 2, 3], {"speculators_config": {}}, "[1, 2, 3]"),
    ],
)
def test_layers_that_config_names_must_be_read(
    target: Any, ids: list[int], config: dict[str, Any], expected: str
) -> None:
    settings = {**CONFIG, **config, "eagle_aux_hidden_state_layer_ids": ids}
    with pytest.raises(ModelError) as error:
        load(target, official(), settings, layers=None)
    assert f"they read the hidden states {expected} of the target, not [2, 2, 1]; write layers: {expected}" in str(
        error.value
    )
    load(target, official(), settings, layers=json.loads(expected))
    load(target, official(), {**CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 1]}}, layers=None)


# -- refused ----------------------------------------------------------------------------------------------


def without(key: str) -> dict[str, Tensor]:
    return {k: t for k, t in official().items() if k != key}


def with_d2t(d2t: Tensor) -> dict[str, Tensor]:
    return {**without("t2d"), "d2t": d2t}


@pytest.mark.parametrize(
    "tensors, sentence",
    [
        (without("norm.weight"), r"missing norm\.weight \[24\]"),
        (without("midlayer.mlp.up_proj.weight"), r"missing layers\.0\.mlp\.up_proj\.weight \[40, 24\]"),
        (plus(official(), extra__weight=random(2, 3)), r"unexpected extra\.weight \[2, 3\]"),
        (
            {**official(), "midlayer.self_attn.q_proj.weight": random(HEADS * D, H)},
            r"layers\.0\.self_attn\.q_proj\.weight is \[30, 24\], not \[30, 48\]",
        ),
        ({**official(), "fc.weight": random(H, 2 * TARGET_H)}, r"fc\.weight is \[24, 96\], not \[24, 144\]"),
        (
            without("embed_tokens.weight"),
            r"embed_tokens.weight must have shape \[97, 24\], but the target's has \[97, 48\]",
        ),
        (without("lm_head.weight"), r"lm_head.weight must have shape \[12, 24\], but the target's has \[97, 48\]"),
        (
            {k: t for k, t in official().items() if k not in ("d2t", "t2d")},
            r"lm_head.weight must have shape \[97, 24\], but theirs has \[12, 24\]",
        ),
        (without("d2t"), "t2d marks a reduced vocabulary, but d2t, which maps it, is missing"),
        (with_d2t(torch.tensor(IDS)), r"d2t\[9\] leads to id 105, but valid ids are 0 to 96; d2t holds offsets"),
        (with_d2t(-torch.arange(12) - 1), r"d2t\[0\] leads to id -1, but"),
        (with_d2t(-torch.arange(12)), "d2t leads to the same id of the target twice"),
        (with_d2t(torch.zeros(12)), "d2t is torch.float32 .* must be a list of integers"),
        ({**official(), "d2t": torch.zeros(12).long()}, "t2d marks other ids than d2t leads to"),
        (without("midlayer.hidden_norm.weight"), r"missing layers\.0\.hidden_norm\.weight \[24\]"),
    ],
)
def test_heads_that_do_not_fit_are_refused(target: Any, tensors: dict[str, Tensor], sentence: str) -> None:
    with pytest.raises(ModelError, match=rf"the heads 'head' do not load: .*{sentence}.*\(somewhere\)"):
        load(target, tensors, CONFIG)


@pytest.mark.parametrize("key, name", [("fc_norm", "fc_norm"), ("norm_before_fc", "input_norm")])
def test_norms_missing_from_weights_are_refused(target: Any, key: str, name: str) -> None:
    with pytest.raises(ModelError, match=rf"config.json has {key}, but the tensors {name}\.\* are missing"):
        load(target, official(), {**CONFIG, key: True})


def test_config_without_sizes_is_refused(target: Any) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "num_attention_heads"}
    with pytest.raises(ModelError, match=r"config\.json lacks num_attention_heads"):
        load(target, official(), config)


def test_pickles_that_run_code_are_refused(target: Any, tmp_path: Path) -> None:
    """The authors' own files are pickles: of tensors alone they load, of more they do not."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(official(), tmp_path / "pytorch_model.bin")
    assert torch.equal(built(target, model=str(tmp_path)).head.norm.weight, official()["norm.weight"])
    torch.save({"norm.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="a pickle of more than tensors, which could run code"):
        built(target, model=str(tmp_path))
    save_file(official(), tmp_path / "model.safetensors")  # preferred where both lie side by side
    assert torch.equal(built(target, model=str(tmp_path)).head.norm.weight, official()["norm.weight"])
