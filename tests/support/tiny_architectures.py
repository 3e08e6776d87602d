"""Every causal language model of transformers in tiny size: configs are shrunk by the names of their attributes."""

from __future__ import annotations

import copy
from typing import Any

import torch

#: Tokens, and the length of the context, of every tiny model.
VOCABULARY, CONTEXT = 97, 96


def _named(size: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), size)


#: What an attribute of that name becomes, whatever the architecture.
SIZES: dict[str, Any] = {
    **_named(VOCABULARY, "vocab_size unpadded_vocab_size decoder_vocab_size vocab_size_per_layer_input"),
    **_named(CONTEXT, "max_position_embeddings n_positions n_ctx max_seq_len context_length"),
    **_named(32, "hidden_size d_model n_embd emb_dim dim embedding_size word_embed_proj_dim embedding_dim"),
    **_named(32, "attention_hidden_size input_embedding_size output_embedding_size adapter_in_dim"),
    **_named(4, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads"),
    **_named(4, "decoder_attention_heads encoder_attention_heads"),
    **_named(4, "num_encoder_attention_heads num_decoder_attention_heads"),
    **_named(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads kv_n_heads index_n_heads"),
    **_named(8, "head_dim swa_head_dim dim_head kv_channels d_kv attention_head_dim"),
    **_named(48, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff dff ffn_hidden_size d_ff d_inner"),
    **_named(48, "intermediate_size_mlp dense_intermediate_size"),
    **_named(32, "out_hidden_size"),
    **_named(24, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    **_named(24, "expert_ffn_hidden_size shared_intermediate_size moe_shared_expert_intermediate_size"),
    **_named(4, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    **_named(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    **_named(1, "n_group topk_group num_expert_group first_k_dense_replace"),
    **_named(16, "q_lora_rank kv_lora_rank o_lora_rank qk_head_dim index_head_dim"),
    **_named(8, "qk_rope_head_dim qk_nope_head_dim v_head_dim hidden_size_per_layer_input laurel_rank"),
    **_named(8, "query_pre_attn_scalar global_head_dim"),
    **_named(8, "sliding_window sliding_window_size attention_window_size window_size local_attention"),
    **_named(8, "attention_chunk_size keep_window_size"),
    **_named(4, "rotary_dim index_topk"),
    # Recurrent layers; their chunks are shorter than the prompts of the tests.
    **_named(16, "mamba_d_state ssm_state_size state_size router_hidden_size rel_extent"),
    **_named(8, "linear_head_dim linear_key_head_dim linear_value_head_dim chunk_size mamba_chunk_size"),
    **_named(4, "linear_num_heads linear_num_value_heads"),
    **_named(2, "linear_num_key_heads"),
}
#: Names of the number of layers; lists with an entry a layer are cut to the same layers.
LAYERS = _named(
    0,
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers num_decoder_layers",
)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ALTERNATING = ["sliding_attention", "full_attention"]
_ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2}
#: Configs that have no valid defaults, and what makes them valid.
DEFAULTS: dict[str, dict[str, Any]] = {
    name: {"text_config": {"model_type": text, **_ASSISTANT, "num_hidden_layers": 2, "layer_types": _ALTERNATING}}
    for name, text in (("gemma4_assistant", "gemma4_text"), ("gemma4_unified_assistant", "gemma4_unified_text"))
}
#: Extra settings by model type: sizes that depend on each other, or have no default.
SPECIAL: dict[str, dict[str, Any]] = {
    **_named(
        {"is_decoder": True},
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roc_bert "
        "roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl",
    ),
    **_named({"bos_token_id": 1}, "cwm emu3 emu3_text_model mllama mllama_text_model modernbert-decoder"),
    "axk1": {"first_k_dense_replace": 1},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]},
    **_named(
        {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
        "glm4v_text glm_ocr_text hunyuan_vl_text paddleocr_vl_text qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text",
    ),
    "ernie4_5_vl_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}},
    "glm4v_moe_text": {
        "rope_parameters": _ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
    },
    "qwen2_vl_vision": {"depth": 1, "embed_dim": 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE | {"mrope_section": [2, 1, 1]}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {
        "vision_config": {"adapter_out_dim": 32},
        "audio_config": {"adapter_out_dim": 32, "adapter_input_size": 32},
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    "flint": {"mlp_only_layers": [1]},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
    },
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    **{name: {"text_config": _ASSISTANT} for name in DEFAULTS},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 4], "layer_types": _ALTERNATING},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "lfm2": {"layer_types": ["full_attention", "conv"], "full_attn_idxs": None, "num_hidden_layers": 2},
    "llama4_text": {"moe_layers": [1, 3]},
    "mamba2": {"num_heads": 8},
    "minimax": {"block_size": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "output_gate_type": "sigmoid",
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlstm": {"autocast_kernel_dtype": "float32", "hidden_size": 128, "embedding_dim": 128},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 5,
    },
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [8, 24],
        "axial_pos_shape": [8, 12],
        "attention_head_size": 8,
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def shrunk(config: Any) -> dict[str, Any]:
    """The keyword arguments that make a tiny config of this one's class."""
    known = config.to_dict()
    depth = next((known[name] for name in LAYERS if isinstance(known.get(name), int)), 0)
    lists = {
        name: value
        for name, value in known.items()
        if isinstance(value, list | tuple) and len(value) == depth > 2 and not name.endswith("_token_id")
    }
    layers = _representative(list(lists.values()), depth)
    changes: dict[str, Any] = {}
    for name, value in known.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if name in LAYERS and number:
            changes[name] = len(layers) if value == depth else 2
        elif name in lists:
            changes[name] = [value[i] for i in layers]
        elif name in SIZES and number:
            changes[name] = SIZES[name]
        elif value is None and name in ("head_dim", "num_key_value_heads") and "num_attention_heads" in known:
            changes[name] = {"head_dim": 8, "num_key_value_heads": 4}[name]
        elif name.endswith("_token_id") and value is not None:
            changes[name] = None if name in ("eos_token_id", "bos_token_id") else 0
    if known.get("kv_lora_rank") is not None:
        changes["num_key_value_heads"] = changes["num_attention_heads"]  # one latent, expanded for each head
    for name in getattr(type(config), "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            changes[name] = {**shrunk(inner), "model_type": inner.model_type}
    return _merged(changes, SPECIAL.get(config.model_type, {}))


def _merged(changes: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """``special`` first, inside nested configs too."""
    both = {
        name: changes[name] | value for name, value in special.items() if name.endswith("_config") and name in changes
    }
    return changes | special | both


def _representative(lists: list[Any], depth: int) -> list[int]:
    """Layers in which every value of every list occurs, two at least."""
    chosen: set[int] = set()
    for values in lists:
        kinds = dict.fromkeys(map(str, values))
        for value in kinds if len(kinds) <= 4 else ():
            place = [i for i, other in enumerate(values) if str(other) == value]
            if not chosen & set(place):
                chosen.add(place[0])
    chosen |= set([i for i in range(depth) if i not in chosen][: max(0, 2 - len(chosen))])
    return sorted(chosen)


def tiny_config(config_class: Any, **changes: Any) -> Any:
    """A tiny config; ``changes`` go to the config of its text model."""
    if list(getattr(config_class, "sub_configs", ())).count("decoder"):  # a causal LM is the decoder of such a model
        config_class = config_class.sub_configs["decoder"]
    default = config_class(**DEFAULTS.get(config_class.model_type, {}))
    text = default.get_text_config()
    if text is default or not changes:
        return config_class(**(shrunk(default) | changes))
    inner = {"model_type": text.model_type, **shrunk(text), **changes}
    return config_class(**(shrunk(default) | {"text_config": inner}))


def tiny(config_class: Any, seed: int = 0, **changes: Any) -> Any:
    """A random float32 model of the causal LM that goes with ``config_class``; for ``changes`` see `tiny_config`."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = tiny_config(config_class, **changes)
    torch.manual_seed(seed)
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return weighted(AutoModelForMultimodalLM.from_config(config), seed)
    if type(config) is config_class or config.get_text_config() is not config:
        return weighted(AutoModelForCausalLM.from_config(config), seed)
    return weighted(MODEL_FOR_CAUSAL_LM_MAPPING[config_class](config), seed)


def weighted(model: Any, seed: int = 0) -> Any:
    """``model`` in float32 with weights so wide that logits lie far apart, and no bias or scale left at 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.float().parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(0.2 * drawn)
            else:
                weight += 0.1 * drawn
    return model.eval()


def noisy(model: Any, noise: float = 0.05, seed: int = 1) -> Any:
    """A copy with that share of random weights: a drafter that is right now and then."""
    generator = torch.Generator().manual_seed(seed)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return twin
