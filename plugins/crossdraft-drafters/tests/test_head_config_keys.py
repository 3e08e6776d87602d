"""Every key of the heads' published configs: read as the publishers compute it, without effect, refused, or remarked.

The tables are those of ``config_keys``; what a key means is computed by ``plain_heads``, without the package's modules.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_drafters.heads.config_keys import LAYOUTS as FURTHER_LAYOUTS
from draft_contexts import GivenContext
from plain_heads import Meaning, Plain, linear, llama3, yarn, yarn_amplitude
from torch import Tensor
from torch.nn import functional

from crossdraft.drafters.heads import config_keys
from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Sequences
from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.util.foreign_keys import Key

#: Those of the core and of the companion.
LAYOUTS = config_keys.LAYOUTS | FURTHER_LAYOUTS
H, FF, HEADS, KV, D, V = 32, 48, 4, 2, 8, 97
LAYERS, TEXT = (1, 2, 3), [3, 1, 4, 15, 9, 26, 5, 35, 8, 97 - 18]
DECODER: dict[str, Any] = dict(
    model_type="llama",
    hidden_size=H,
    intermediate_size=FF,
    num_attention_heads=HEADS,
    num_key_value_heads=KV,
    head_dim=D,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    vocab_size=V,
)
BLOCK = {"block_size": 4, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 1, 2]}}
CONFIGS = {
    "eagle": DECODER,
    "eagle3": DECODER,
    "p-eagle": {**DECODER, "mask_token_id": 96},
    "dflash": {**DECODER, **BLOCK},
    "dspark": {**DECODER, **BLOCK, "dflash_config": {**BLOCK["dflash_config"], "markov_head_type": "vanilla"}},
}
#: Layouts of heads with decoder layers.
DECODERS = tuple(CONFIGS)


def random(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.25


def layer(i: int, width: int, *, qk_norm: bool = False) -> dict[str, Tensor]:
    sizes = {"q_proj": (HEADS * D, width), "k_proj": (KV * D, width), "v_proj": (KV * D, width), "o_proj": (H, H)}
    out = {f"self_attn.{name}": random(*size) for name, size in sizes.items()}
    if qk_norm:
        out |= {f"self_attn.{name}_norm": 1 + random(D) for name in "qk"}
    out |= {"mlp.gate_proj": random(FF, H), "mlp.up_proj": random(FF, H), "mlp.down_proj": random(H, FF)}
    out |= {"input_layernorm": 1 + random(H), "post_attention_layernorm": 1 + random(H)}
    return {f"layers.{i}.{key}.weight": tensor for key, tensor in out.items()}


def tensors_of(layout: str) -> dict[str, Tensor]:
    torch.manual_seed(5)
    if layout == "eagle":
        out = {**layer(0, H), "fc.weight": random(H, 2 * H)}
        del out["layers.0.input_layernorm.weight"]
        return out
    out = {"norm.weight": 1 + random(H), "fc.weight": random(H, 3 * H)}
    if layout in ("eagle3", "p-eagle"):
        out |= {**layer(0, 2 * H), "layers.0.hidden_norm.weight": 1 + random(H)}
        return {**out, "mask_hidden": random(1, 1, 3 * H)} if layout == "p-eagle" else out
    out |= {**layer(0, H, qk_norm=True), **layer(1, H, qk_norm=True), "hidden_norm.weight": 1 + random(H)}
    if layout == "dspark":
        out |= {"markov_head.markov_w1.weight": random(V, 5), "markov_head.markov_w2.weight": random(V, 5)}
    return out


@pytest.fixture(scope="module")
def target(tiny_model: Callable) -> Any:
    return tiny_model("llama", seed=2, num_hidden_layers=4)


def patched(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the values of ``patch``, whose keys are paths."""
    out = json.loads(json.dumps(config))
    for path, value in patch.items():
        *sections, key = path.split(".")
        inner = out
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
    return out


@cache
def _slots(target: Any) -> TransformersLM:
    return TransformersLM(target, 1, 64)


def checkpoint_of(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Checkpoint:
    return Checkpoint("heads", Path("somewhere"), config, dict(tensors), "somewhere", "")


def load(target: Any, layout: str, config: dict[str, Any], tensors: Mapping[str, Tensor], **options: Any) -> Any:
    if layout not in ("eagle", "mtp", "medusa", "mlp-speculator"):
        options = {"layers": LAYERS, **options}
    drafter, slots = plugins.get("drafters", layout), _slots(target)
    heads = {"load_heads": lambda name: checkpoint_of(config, tensors)}
    context = GivenContext(slots, Sampling(), 64, target_model=target, **heads)
    return drafter(drafter.Config(**{"model": "heads", **options}), context)


@torch.inference_mode()
def drafted(
    target: Any, layout: str, config: dict[str, Any], tensors: Mapping[str, Tensor], **options: Any
) -> tuple[Tensor, Tensor, list[int]]:
    """The target's hidden states, q of three drafted tokens, and these tokens."""
    drafter = load(target, layout, config, tensors, **options)
    width = {"eagle": 1}.get(layout, len(options.get("layers", LAYERS)))
    hidden = torch.randn(len(TEXT) - 1, width, H, generator=torch.Generator().manual_seed(6))
    drafter.start(0, TEXT, hidden)
    sequences = Sequences([list(TEXT)], torch.tensor([TEXT]), [3], [0])
    draft = drafter.propose(sequences, CounterRng(0).for_step([0], [len(TEXT)], torch.device("cpu")))
    return hidden, draft.q[0, :3], draft.tokens[0, :3].tolist()


def distance(a: Tensor, b: Tensor) -> float:
    """Largest total variation distance of rows; missing columns are 0."""
    width = max(a.shape[1], b.shape[1])
    a, b = (functional.pad(one, (0, width - one.shape[1])) for one in (a, b))
    return float((a - b).abs().sum(-1).max() / 2)


def difference(
    target: Any,
    layout: str,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    meaning: Meaning,
    plain: Mapping[str, Tensor] | None = None,
) -> float:
    """Distance between q and what ``meaning`` computes with the tensors ``plain``, by default ``tensors``."""
    hidden, q, tokens = drafted(target, layout, config, tensors)
    expected = Plain(dict(tensors if plain is None else plain), target, meaning).drafts(layout, hidden, TEXT, tokens)
    return distance(q, expected)


def base(layout: str) -> Meaning:
    return Meaning(from_anchor=layout == "dspark")


# -- keys that are read --------------------------------------------------------------------------------------

#: What a case changes: config by path, meaning, tensors.
Case = tuple[dict[str, Any], dict[str, Any], Callable[[dict[str, Tensor]], dict[str, Tensor]] | None]


def rope(**more: Any) -> dict[str, Any]:
    return {f"rope_parameters.{key}": value for key, value in {"rope_theta": 100.0, **more}.items()}


LLAMA3 = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
_llama3 = dict(theta=100.0, frequencies=llama3(4.0, 1.0, 4.0, 16))
_yarn = dict(theta=100.0, frequencies=yarn(4.0, 16), amplitude=yarn_amplitude(4.0))
_LONG = dict(rope_type="longrope", short_factor=[1.5, 2, 2.5, 3], long_factor=[9.0] * 4)
_long_factors = torch.tensor([1.5, 2, 2.5, 3])


def _longrope(theta: float, rotated: int) -> Tensor:
    return theta ** (-torch.arange(0, rotated, 2) / rotated) / _long_factors


def wide_mlp(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(7)
    for key in list(tensors):
        if ".mlp." in key:
            tensors[key] = random(H, 80) if "down" in key else random(80, H)
    return tensors


def with_embedding(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(8)
    return {**tensors, "embed_tokens.weight": random(V, H)}


def biased(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(8)
    names = [key for key in tensors if key.startswith("layers.") and "_proj." in key]
    return {**tensors, **{key.replace("weight", "bias"): random(len(tensors[key])) for key in names}}


#: Of all heads with decoder layers, by the path of the key that the case proves; those of one key are numbered.
DECODER_CASES: dict[str, Case] = {
    "rms_norm_eps": ({"rms_norm_eps": 0.3}, {"eps": 0.3}, None),
    "hidden_act": ({"hidden_act": "gelu"}, {"act": functional.gelu}, None),
    "hidden_activation": (
        {"hidden_activation": "gelu_pytorch_tanh"},
        {"act": lambda x: functional.gelu(x, approximate="tanh")},
        None,
    ),
    "model_type": ({"model_type": "llama4_text", "intermediate_size_mlp": 80}, {}, wide_mlp),
    "intermediate_size_mlp": (
        {"model_type": "llama4_text", "intermediate_size": 7, "intermediate_size_mlp": 80},
        {},
        wide_mlp,
    ),
    "head_dim": ({"head_dim": None}, {}, None),
    "rope_theta": ({"rope_theta": 100.0}, {"theta": 100.0}, None),
    "partial_rotary_factor": ({"partial_rotary_factor": 0.5}, {"rotated": 4}, None),
    "partial_rotary_factor 2": (
        {"partial_rotary_factor": 0.25, "rope_theta": 100.0},
        {"rotated": 2, "theta": 100.0},
        None,
    ),
    "original_max_position_embeddings": (
        {"original_max_position_embeddings": 16, **rope(**{k: v for k, v in _YARN.items() if "max" not in k})},
        _yarn,
        None,
    ),
    "max_position_embeddings": (
        {"max_position_embeddings": 16, **rope(rope_type="yarn", factor=4.0)},
        _yarn,
        None,
    ),
    "is_neox_style": ({"is_neox_style": False}, {"in_turn": True}, None),
    "rope_is_neox_style": ({"rope_is_neox_style": False}, {"in_turn": True}, None),
    "rope_interleave": ({"rope_interleave": True, "partial_rotary_factor": 0.5}, {"in_turn": True, "rotated": 4}, None),
    "tie_word_embeddings": ({"tie_word_embeddings": True}, {"tied": True}, with_embedding),
    "logit_scale": ({"logit_scale": 0.25}, {"logit_scale": 0.25}, None),
    "rope_parameters.rope_theta": (rope(), {"theta": 100.0}, None),
    "rope_parameters.rope_type": (rope(rope_type="default"), {"theta": 100.0}, None),
    "rope_parameters.type": (rope(type="linear", factor=3.0), {"theta": 100.0, "frequencies": linear(3.0)}, None),
    "rope_parameters.type 2": (rope(type="mrope", mrope_section=[1, 1, 2]), {"theta": 100.0}, None),
    "rope_parameters.factor": (
        rope(rope_type="linear", factor=2.0),
        {"theta": 100.0, "frequencies": linear(2.0)},
        None,
    ),
    "rope_parameters.partial_rotary_factor": (rope(partial_rotary_factor=0.5), {"theta": 100.0, "rotated": 4}, None),
    "rope_parameters.partial_rotary_factor 2": (
        rope(rope_type="llama3", partial_rotary_factor=0.5, **LLAMA3),
        {**_llama3, "rotated": 4},
        None,
    ),
    "rope_parameters.partial_rotary_factor 3": (
        rope(partial_rotary_factor=0.5, **_YARN),
        {**_yarn, "rotated": 4},
        None,
    ),
    "rope_parameters.attention_factor": (rope(attention_factor=1.7, **_YARN), {**_yarn, "amplitude": 1.7}, None),
    "rope_parameters.original_max_position_embeddings": (rope(**_YARN), _yarn, None),
    "rope_parameters.low_freq_factor": (
        rope(rope_type="llama3", **{**LLAMA3, "low_freq_factor": 0.3}),
        {**_llama3, "frequencies": llama3(4.0, 0.3, 4.0, 16)},
        None,
    ),
    "rope_parameters.high_freq_factor": (
        rope(rope_type="llama3", **{**LLAMA3, "high_freq_factor": 2.0}),
        {**_llama3, "frequencies": llama3(4.0, 1.0, 2.0, 16)},
        None,
    ),
    "rope_parameters.beta_fast": (
        rope(beta_fast=2.0, **_YARN),
        {**_yarn, "frequencies": yarn(4.0, 16, fast=2.0)},
        None,
    ),
    "rope_parameters.beta_slow": (
        rope(beta_slow=0.1, **_YARN),
        {**_yarn, "frequencies": yarn(4.0, 16, slow=0.1)},
        None,
    ),
    "rope_parameters.truncate": (
        rope(truncate=False, **_YARN),
        {**_yarn, "frequencies": yarn(4.0, 16, truncate=False)},
        None,
    ),
    "rope_parameters.mscale": (
        rope(mscale=0.7, mscale_all_dim=0.2, **_YARN),
        {**_yarn, "amplitude": yarn_amplitude(4.0, 0.7) / yarn_amplitude(4.0, 0.2)},
        None,
    ),
    "rope_parameters.mscale_all_dim": (
        rope(mscale=1.0, mscale_all_dim=1.0, **_YARN),
        {**_yarn, "amplitude": 1.0},
        None,
    ),
    "rope_parameters.short_factor": (
        {"max_position_embeddings": 256, **rope(original_max_position_embeddings=128, **_LONG)},
        {"theta": 100.0, "frequencies": _longrope, "amplitude": math.sqrt(1 + math.log(2) / math.log(128))},
        None,
    ),
    "rope_parameters.short_factor 2": (
        rope(original_max_position_embeddings=128, **{**_LONG, "rope_type": None, "type": "su"}),
        {"theta": 100.0, "frequencies": _longrope},
        None,
    ),
    "rope_parameters.full_attention": (
        {
            "rope_parameters.full_attention": {"rope_theta": 100.0},
            "rope_parameters.sliding_attention": {"rope_theta": 9},
        },
        {"theta": 100.0},
        None,
    ),
}
AUTOREGRESSIVE_CASES: dict[str, Case] = {
    "sliding_window": ({"layer_types": ["sliding_attention"], "sliding_window": 3}, {"window": 3}, None),
    "layer_types": ({"layer_types": ["full_attention"], "sliding_window": 3}, {}, None),
    "use_sliding_window": ({"use_sliding_window": False, "sliding_window": 3}, {}, None),
    "rope_parameters.sliding_attention": (
        {
            "layer_types": ["sliding_attention"],
            "sliding_window": 3,
            "rope_parameters.full_attention": {"rope_theta": 9},
            "rope_parameters.sliding_attention": {"rope_theta": 100.0},
        },
        {"window": 3, "theta": 100.0},
        None,
    ),
}


def normed_inputs(*names: str, size: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, **{f"{name}.weight": 1 + random(size) for name in names}}


def without_fc(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != "fc.weight"}


EAGLE3_CASES: dict[str, Case] = {
    "norm_before_residual": ({"norm_before_residual": True}, {"residual_normed": True}, None),
    "norm_before_fc": ({"norm_before_fc": True}, {}, normed_inputs("input_norm", size=3 * H)),
    "fc_norm": ({"fc_norm": True}, {}, normed_inputs(*(f"fc_norm.{i}" for i in range(3)), size=H)),
    "norm_output": ({"norm_output": True, "fc_norm": False}, {"feeds_normed": True}, None),
    "norm_output 2": ({"norm_output": False, "fc_norm": False}, {}, None),
    "norm_output 3": ({"norm_output": False, "num_aux_hidden_states": 3}, {}, None),
    "norm_output 4": ({"norm_output": False, "eagle_config": {"next_layer_regular": True}}, {}, None),
    "norm_output 5": ({"norm_output": False}, {"normed": False}, None),
    "use_aux_hidden_state": ({"use_aux_hidden_state": False}, {}, without_fc),
}


def reduced(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = torch.tensor([5, 0, 90, 41, 42, 43, 7])
    rows = {key: random(7, tensor.shape[1]) for key, tensor in tensors.items() if "markov_w2" in key}
    return {**tensors, **rows, "lm_head.weight": random(7, H), "d2t": ids - torch.arange(7)}


BLOCK_CASES: dict[str, Case] = {
    "is_causal": ({"is_causal": True}, {"causal": True}, None),
    "causal": ({"causal": True}, {"causal": True}, None),
    "dflash_config.causal 2": ({"dflash_config.causal": True, "is_causal": False}, {}, None),
    "block_size": ({"block_size": 6}, {"block": 6}, None),
    "mask_token_id": ({"mask_token_id": 11, "dflash_config.mask_token_id": None}, {"mask": 11}, None),
    "sample_from_anchor": ({"sample_from_anchor": True}, {"from_anchor": True}, None),
    "shift_label": ({"shift_label": True}, {"from_anchor": True}, None),
    "input_embedding_scale": ({"input_embedding_scale": 3.0}, {"embedding_scale": 3.0}, None),
}
#: Sliding layers, as in vLLM's ``_resolve_layer_attention`` and SpecForge's masks.
_SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
SLIDING_CASES: dict[str, Case] = {
    "layer_types": (_SLIDES, {"attention": ((5, True), (None, False))}, None),
    "sliding_window": ({**_SLIDES, "sliding_window": 3}, {"attention": ((3, True), (None, False))}, None),
    "use_sliding_window": (
        {"layer_types": ["full_attention"] * 2, "sliding_window": 3, "use_sliding_window": True},
        {},
        None,
    ),
    "sliding_window_non_causal": (
        {**_SLIDES, "sliding_window_non_causal": True},
        {"attention": ((5, False), (None, False))},
        None,
    ),
    "is_causal 2": ({**_SLIDES, "is_causal": True}, {"attention": ((5, True), (None, True))}, None),
    "causal 2": ({**_SLIDES, "causal": False}, {"attention": ((5, False), (None, False))}, None),
    "use_swa": ({"use_swa": True, "sliding_window": 5}, {"attention": ((5, False), (5, False))}, None),
    "swa_window_size": (
        {"use_swa": True, "swa_window_size": 4, "sliding_window": 99, "layer_types": ["full_attention"] * 2},
        {"attention": ((4, False), (4, False))},
        None,
    ),
    "use_swa 2": ({**_SLIDES, "use_swa": True}, {"attention": ((5, True), (None, False))}, None),
    "rope_parameters.sliding_attention": (
        {
            **_SLIDES,
            "rope_parameters.full_attention": {"rope_theta": 100.0},
            "rope_parameters.sliding_attention": {"rope_theta": 100.0},
        },
        {"attention": ((5, True), (None, False)), "theta": 100.0},
        None,
    ),
    "mask_embedding": (
        {},
        {},
        lambda tensors: {**tensors, "mask_embedding": random(H)},
    ),
}


@pytest.mark.parametrize("content", ["tensor", "state", "other token", "damaged"])
@torch.inference_mode()
def test_mask_embedding_file(target: Any, content: str, tmp_path: Path) -> None:
    """``mask_embedding.pt`` replaces the embedding of the mask token, as vLLM reads MiMo's heads."""
    tensors, file = tensors_of("dflash"), tmp_path / "mask_embedding.pt"
    embedding = random(1, H)
    state = {"embedding": embedding, "mask_token_id": 96 if content == "state" else 5}
    torch.save(embedding if content == "tensor" else state, file)
    if content == "damaged":
        file.write_bytes(b"PK")
    heads = replace(checkpoint_of(CONFIGS["dflash"], tensors), path=tmp_path)
    drafter = plugins.get("drafters", "dflash")
    context = GivenContext(_slots(target), Sampling(), 64, target_model=target, load_heads=lambda name: heads)
    config = drafter.Config(model="heads", layers=LAYERS)
    if content in ("other token", "damaged"):
        with pytest.raises(ModelError, match="is damaged" if content == "damaged" else "is not the embedding of 32"):
            drafter(config, context)
    else:
        assert torch.equal(drafter(config, context).head.mask_embedding, embedding[0])


P_EAGLE_CASES: dict[str, Case] = {
    key: ({"mask_token_id": None, key: 11}, {"mask": 11}, None)
    for key in (*("mask_token_id", "ptd_token_id", "pard_token"),)
}
CASES: dict[str, dict[str, Case]] = {
    "eagle": {**DECODER_CASES, **AUTOREGRESSIVE_CASES},
    "eagle3": {**DECODER_CASES, **AUTOREGRESSIVE_CASES, **EAGLE3_CASES},
    "p-eagle": {
        **DECODER_CASES,
        **AUTOREGRESSIVE_CASES,
        **{key: case for key, case in EAGLE3_CASES.items() if "feeds_normed" not in case[1]},
        **P_EAGLE_CASES,
    },
    "dflash": {**DECODER_CASES, **BLOCK_CASES, **SLIDING_CASES},
    "dspark": {**DECODER_CASES, **BLOCK_CASES},
}


def _cases() -> Iterator[Any]:
    """Keys of decoder layers by default in one layout of either class of attention, as the same code reads them."""
    for layout, cases in CASES.items():
        for key in cases:
            marks = [pytest.mark.slow] if key in DECODER_CASES and layout not in ("eagle3", "dflash") else []
            yield pytest.param(layout, key, marks=marks)


@pytest.mark.parametrize("layout, key", _cases())
@torch.inference_mode()
def test_key_means_what_its_publisher_computes(target: Any, layout: str, key: str) -> None:
    patch, changes, change = CASES[layout][key]
    tensors = tensors_of(layout) if change is None else change(tensors_of(layout))
    options = {}
    if "use_aux_hidden_state" in key:
        options["layers"] = (-1,)
        if layout == "p-eagle":
            tensors["mask_hidden"] = random(1, 1, H)
    hidden, q, tokens = drafted(target, layout, patched(CONFIGS[layout], patch), tensors, **options)
    meaning, without = replace(base(layout), **changes), base(layout)
    expected = Plain(tensors, target, meaning).drafts(layout, hidden, TEXT, tokens)
    assert distance(q, expected) < 1e-5
    if meaning != without:  # the key changes the distributions, so the case proves something
        assert distance(expected, Plain(tensors, target, without).drafts(layout, hidden, TEXT, tokens)) > 1e-4


def _nested_cases() -> Iterator[Any]:
    """Options in each section; the first one of a layout's own section by default, as the same code reads all."""
    for layout, own, cases in (
        ("eagle3", "eagle_config", EAGLE3_CASES),
        ("p-eagle", "dflash_config", P_EAGLE_CASES),
        ("dflash", "dflash_config", BLOCK_CASES),
        ("dspark", "dspark_config", BLOCK_CASES),
    ):
        for section in config_keys.SECTIONS:
            marks = [] if section == own else [pytest.mark.slow]
            for key in cases:
                if "." not in key and " " not in key:
                    yield pytest.param(layout, section, key, marks=marks)


@pytest.mark.parametrize("layout, section, key", _nested_cases())
@torch.inference_mode()
def test_section_takes_precedence(target: Any, layout: str, section: str, key: str, caplog: Any) -> None:
    """An option in a section means what it means at the top, whatever the top has, and is known there."""
    patch, changes, change = CASES[layout][key]
    tensors = tensors_of(layout) if change is None else change(tensors_of(layout))
    options = {"layers": (-1,)} if "use_aux_hidden_state" in key else {}
    nested = {f"{section}.{path}": value for path, value in patch.items() if value is not None}
    other = {
        path: None if value is None else not value for path, value in patch.items() if type(value) in (bool, type(None))
    }
    start = {"dflash_config.mask_token_id": None, "mask_token_id": 96} if "dflash_config" in CONFIGS[layout] else {}
    config = patched(CONFIGS[layout], {**start, **other, **nested})
    config_keys._remark.cache_clear()
    hidden, q, tokens = drafted(target, layout, config, tensors, **options)
    expected = Plain(tensors, target, replace(base(layout), **changes)).drafts(layout, hidden, TEXT, tokens)
    assert distance(q, expected) < 1e-5
    assert "not known" not in caplog.text


@pytest.mark.parametrize("key, name", [("norm_before_fc", "input_norm"), ("fc_norm", "fc_norm")])
@pytest.mark.parametrize("section", ["", "eagle_config."])
def test_missing_norm_is_refused(target: Any, section: str, key: str, name: str) -> None:
    with pytest.raises(ModelError, match=rf"has {key}, but the tensors {name}"):
        load(target, "eagle3", patched(DECODER, {f"{section}{key}": True}), tensors_of("eagle3"))


def test_scales_of_a_quantised_cache_are_ignored(target: Any) -> None:
    for layout in DECODERS:
        scales = {f"layers.0.self_attn.{name}_scale": torch.ones(()) for name in ("k", "v", "k_proj.k")}
        plain = drafted(target, layout, CONFIGS[layout], tensors_of(layout))[1]
        assert torch.equal(drafted(target, layout, CONFIGS[layout], {**tensors_of(layout), **scales})[1], plain)


#: Keys that are read, but are proved by other tests: sizes, which show in the tensors (every case here); hidden states
#: that the file was trained on (refusals, in the tests of each head); names of the layout; DFlash 2 and the other kinds
#: of Markov heads (test_blocks); the frequencies of longer texts (refused by the slots).
ELSEWHERE = {
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "architectures"),
    *("max_window_layers", "speculators_model_type", "eagle_aux_hidden_state_layer_ids", "target_layer_ids"),
    *("aux_hidden_state_layer_ids", "parallel_drafting", "markov_head_type", "long_factor"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
}


def rows(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Key]]:
    for name, key in keys.items():
        if isinstance(key, Key):
            yield f"{prefix}{name}", key
        else:
            yield from rows(key, f"{prefix}{name}.")


@pytest.mark.parametrize("layout", DECODERS)
def test_every_key_that_is_read_is_proved(layout: str) -> None:
    proved = {key.split(" ")[0] for key in CASES[layout]}
    sections = {"rope_scaling.": "rope_parameters.", "transformer_layer_config.": ""}
    sections |= {f"{name}.": "" for name in config_keys.SECTIONS}
    lacking = set()
    for path, key in rows(LAYOUTS[layout].keys):
        for section, twin in sections.items():  # read by the same code
            path = path.replace(section, twin)
        if key.effect == "read" and path.split(".")[-1] not in ELSEWHERE and path not in proved:
            lacking.add(path)
    assert lacking - (SLIDING_CASES.keys() if layout == "dspark" else set()) == set()  # read by dflash's code


@pytest.mark.parametrize("layout", DECODERS)
def test_other_places_of_a_key(target: Any, layout: str) -> None:
    """``rope_scaling`` beside ``rope_theta``, and the nested config of speculators."""
    scaling = {
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1], "partial_rotary_factor": 0.5},
        "rope_theta": 50.0,
    }
    meaning = replace(base(layout), rotated=4, theta=50.0)
    assert difference(target, layout, {**CONFIGS[layout], **scaling}, tensors_of(layout), meaning) < 1e-5
    nested = {key: value for key, value in CONFIGS[layout].items() if key not in DECODER}
    nested["transformer_layer_config"] = {**DECODER, **scaling}
    assert difference(target, layout, nested, tensors_of(layout), meaning) < 1e-5


@pytest.mark.parametrize("layout", DECODERS)
def test_tensors_under_other_names(target: Any, layout: str) -> None:
    """NeMo's prefix, biases of every projection, a vocabulary that grew, or that the target cut."""
    config, tensors = CONFIGS[layout], tensors_of(layout)
    prefixed = {f"model.{key}" if "mask_hidden" not in key else key: tensor for key, tensor in tensors.items()}
    assert difference(target, layout, config, prefixed, base(layout), tensors) < 1e-5
    assert difference(target, layout, config, biased(tensors), base(layout)) < 1e-5
    tables = {"embed_tokens.weight": H, "lm_head.weight": H}
    if layout == "dspark":
        tables |= {"markov_head.markov_w1.weight": 5, "markov_head.markov_w2.weight": 5}
    stock = {**tensors, **{key: random(V - 9, width) for key, width in tables.items()}}
    rows = torch.cat([stock["embed_tokens.weight"], target.get_input_embeddings().weight[V - 9 :]])
    assert difference(target, layout, config, stock, base(layout), {**stock, "embed_tokens.weight": rows}) < 1e-5
    padded = {**tensors, **{key: random(V + 9, width) for key, width in tables.items()}}
    cut = {**padded, **{key: padded[key][:V] for key in tables}}
    assert difference(target, layout, config, padded, base(layout), cut) < 1e-5
    if layout != "eagle":
        assert difference(target, layout, config, reduced(tensors), base(layout)) < 1e-5


def test_dspark_of_model_optimizer(target: Any) -> None:
    tensors = tensors_of("dspark")
    renamed = {key.replace("markov_head.", ""): tensor for key, tensor in tensors.items()}
    config = patched(CONFIGS["dspark"], {"dflash_config.projector_type": "dspark", "dflash_config.shift_label": True})
    assert difference(target, "dspark", config, renamed, base("dspark"), tensors) < 1e-5


# -- keys that are refused, ignored or unknown ---------------------------------------------------------------

REFUSED = [
    (layout, path, key)
    for layout, table in LAYOUTS.items()
    for path, key in rows(table.keys)
    if key.effect in ("refused", "ignored")
    # The name of the section of another method distinguishes its heads from EAGLE-1's.
    and not (layout == "eagle" and path.startswith(("dflash_config.", "dspark_config.")))
]


def other_value(key: Key) -> Any:
    return next((not value for value in key.neutral if isinstance(value, bool)), 7)


@pytest.mark.parametrize("layout, path, key", REFUSED, ids=[f"{layout}-{path}" for layout, path, _ in REFUSED])
def test_other_computation_is_refused_or_remarked(layout: str, path: str, key: Key, caplog: Any) -> None:
    config, own = CONFIGS.get(layout, {}), tensors_of(layout) if layout in CONFIGS else {}
    for value in (None, *key.neutral):
        config_keys.check_head_config(checkpoint_of(patched(config, {path: value}), own), layout, LAYOUTS[layout])
    assert not caplog.records
    config_keys._remark.cache_clear()
    changed = checkpoint_of(patched(config, {path: other_value(key)}), own)
    if key.effect == "refused":
        with pytest.raises(ModelError, match=path):
            config_keys.check_head_config(changed, layout, LAYOUTS[layout])
    else:
        config_keys.check_head_config(changed, layout, LAYOUTS[layout])
        assert path in caplog.text and "not applied" in caplog.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unknown_key_is_remarked(layout: str, caplog: Any) -> None:
    config, prefix = CONFIGS.get(layout, {}), (*LAYOUTS[layout].prefixes, "")[0]
    own = tensors_of(layout) if layout in CONFIGS else {}
    with caplog.at_level(logging.WARNING):
        config_keys.check_head_config(checkpoint_of(config, own), layout, LAYOUTS[layout])
        assert not caplog.records
        sections = [name for name, key in LAYOUTS[layout].keys.items() if not isinstance(key, Key)]
        sections = [name for name in sections if layout != "eagle" or name not in config_keys.SECTIONS[1:]]
        paths = [f"{prefix}frobnicate", *(f"{section}.frobnicate" for section in sections if prefix == "")]
        config_keys.check_head_config(
            checkpoint_of(patched(config, dict.fromkeys(paths, 3)), own), layout, LAYOUTS[layout]
        )
    assert len(caplog.records) == 1 and all(f"{path} is not known" in caplog.text for path in paths)


@pytest.mark.parametrize(
    "layout, config, sentence",
    [
        ("eagle3", {"rope_scaling": {"type": "ntk", "factor": 2}}, "has 'ntk' for the type in rope_scaling"),
        ("dflash", {"rope_parameters": {"rope_type": "xdrope"}}, "has 'xdrope' for the type in rope_parameters"),
        ("eagle", {"rope_scaling": {"type": "llama3", "factor": 2}}, "Missing required keys in `rope_parameters`"),
        ("eagle3", {"partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 of 8 channels"),
        ("eagle3", {"partial_rotary_factor": "half"}, "rotary embedding of config.json cannot be computed"),
        ("eagle3", {"rope_parameters": {"rope_theta": "x"}}, "rope|rotary"),
        ("eagle3", {"hidden_act": "swoosh"}, "has 'swoosh' for hidden_act"),
        ("eagle3", {"speculators_model_type": "xpress"}, "has 'xpress' for speculators_model_type"),
        ("eagle3", {"eagle_config": [1]}, r"eagle_config is \[1\]"),
        ("eagle3", {"logit_scale": "big"}, "logit_scale is 'big'"),
        ("dflash", {"dflash_config": {**BLOCK["dflash_config"], "causal": "yes"}}, "has 'yes' for causal"),
        ("dflash", {"use_swa": True, "sliding_window": 3}, "must be at least 4"),
        ("dflash", {"use_swa": True}, "has None for the window of sliding layers"),
        ("dflash", {"layer_types": ["chunked_attention"] * 2}, "layers of type chunked_attention"),
        ("dflash", {"model_type": "muse_glimmer_assistant"}, "they are a Muse Glimmer assistant"),
        ("mtp", {"architectures": ["Gemma4AssistantForCausalLM"]}, "they are a Gemma 4 assistant"),
        ("eagle3", {"use_aux_hidden_state": False}, r"write layers: \[-1\]"),
        ("eagle3", patched({}, rope(original_max_position_embeddings=32, **_LONG)), "longer than 32 tokens"),
    ],
)
def test_refused_by_a_sentence(target: Any, layout: str, config: dict[str, Any], sentence: str) -> None:
    tensors = tensors_of(layout if layout in CONFIGS else "eagle3")
    with pytest.raises(ModelError, match=sentence):
        load(target, layout, {**CONFIGS.get(layout, {}), **config}, tensors)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_quantised_heads_are_refused(target: Any, dtype: torch.dtype) -> None:
    for layout in DECODERS:
        tensors = tensors_of(layout)
        key = next(key for key in tensors if "mlp.up_proj" in key)
        with pytest.raises(ModelError, match="they are quantised"):
            load(target, layout, CONFIGS[layout], {**tensors, key: tensors[key].to(dtype)})
        with pytest.raises(ModelError, match="they are quantised"):
            load(target, layout, CONFIGS[layout], {**tensors, f"{key}_scale": torch.ones(())})


def test_norm_output_of_unknown_writer_is_remarked(target: Any, caplog: Any) -> None:
    config_keys._remark.cache_clear()
    for value in (True, False):
        load(target, "eagle3", {**DECODER, "norm_output": value}, tensors_of("eagle3"))
        assert f"norm_output is {str(value).lower()}" in caplog.text and "2026-09-15" in caplog.text
    caplog.clear()
    load(target, "eagle3", {**DECODER, "norm_output": False, "num_aux_hidden_states": 3}, tensors_of("eagle3"))
    assert not caplog.records


# -- hypotheses of a diagnosis ---------------------------------------------------------------------------------

_SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 3}
_OWN = {"tie_word_embeddings": True}
#: Layout, config as it is misread, the right one, and the hypothesis; the target has YaRN.
MISREAD: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "partial rotation": ("eagle3", {}, {"partial_rotary_factor": 0.5}, "0.5 of each head's channels"),
    "full rotation": ("dspark", {"partial_rotary_factor": 0.25}, {}, "1 of each head's channels"),
    "the target's scaling": ("dflash", {"rope_theta": 100.0}, rope(**_YARN), "positions are scaled as the target's"),
    "plain positions": ("eagle", rope(**_YARN), rope(), "positions are not scaled"),
    "base": ("eagle", {}, rope(), "the rotary base is 100, "),
    "neighbours": ("p-eagle", {}, {"rope_interleave": True}, "in pairs of neighbours"),
    "halves": ("dflash", {"is_neox_style": False}, {}, "in pairs of halves"),
    "causal": ("dflash", {"dflash_config.causal": False}, {"is_causal": True}, "those before them only"),
    "not causal": ("dspark", {"is_causal": True}, {}, "attend to the whole block"),
    "root": ("dflash", {}, {"sample_from_anchor": True}, "position drafts, too"),
    "logits": ("eagle3", {"logit_scale": 0.5}, {}, "logits are multiplied by 1"),
    "window": ("eagle3", _SLIDING, {}, "attend to the whole text"),
    "tied": ("eagle3", {}, _OWN, "the output head is the heads own"),
    "not tied": ("eagle", _OWN, {}, "the output head is the target's"),
    "embedding": ("eagle", {}, {}, "with the target's embedding"),
    "norm": ("eagle3", {"norm_output": False}, {"norm_output": None}, "the output before its norm is fed back"),
    "norm, NeMo": (
        "eagle3",
        {"num_aux_hidden_states": 3},
        {"norm_output": True, "fc_norm": False},
        "the normed output",
    ),
}


def tried(drafter: Any, config: Any, heads: Checkpoint, target: Any) -> list[Any]:
    module = pytest.importorskip("crossdraft_advisor.diagnosis.misconfigurations")
    return list(module.misconfigurations(drafter, config, heads, target))


@pytest.mark.parametrize("name", MISREAD)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_diagnosis_undoes_each_misreading(target: Any, name: str, prefix: str, monkeypatch: Any) -> None:
    layout, wrong, right, mistake = MISREAD[name]
    parameters = {"rope_theta": 100.0, **_YARN}
    if name == "partial rotation":
        parameters["partial_rotary_factor"] = 0.5
    monkeypatch.setattr(target.config, "rope_parameters", parameters)
    tensors = tensors_of(layout)
    if "tied" in name or name == "embedding":
        tensors = with_embedding(tensors)
    prefixed = {prefix + key: tensor for key, tensor in tensors.items()}
    heads = checkpoint_of(patched(CONFIGS[layout], wrong), prefixed)
    drafter = plugins.get("drafters", layout)
    own = drafter.Config(model="heads", **({} if layout == "eagle" else {"layers": LAYERS}))
    (cure,) = [one for one in tried(drafter, own, heads, target) if mistake in one.mistake]
    assert cure.change is not None and not cure.options
    changed = cure.change(heads)
    if name == "embedding":
        del tensors["embed_tokens.weight"]
    _, expected, _ = drafted(target, layout, patched(CONFIGS[layout], right), tensors)
    assert distance(drafted(target, layout, changed.config, changed.tensors)[1], expected) < 1e-5
    if name != "norm, NeMo":
        assert distance(drafted(target, layout, heads.config, heads.tensors)[1], expected) > 1e-4


@pytest.mark.parametrize("read, other", [((1, 2, 4), (1, 2, -1)), ((1, 2, -1), (1, 2, 4))])
def test_diagnosis_tries_both_last_states(target: Any, read: tuple[int, ...], other: tuple[int, ...]) -> None:
    for layout in ("eagle3", "dflash", "p-eagle", "dspark"):
        drafter, heads = plugins.get("drafters", layout), checkpoint_of(CONFIGS[layout], tensors_of(layout))
        undone = tried(drafter, drafter.Config(model="heads", layers=read), heads, target)
        assert [one.options for one in undone if "the target's last state" in one.mistake] == [{"layers": other}]
