"""Models that share a class but take another path through it: windows, ropes, alibi, sinks, parallel residuals, ..."""

from __future__ import annotations

from typing import Any

from tiny_architectures import tiny, tiny_config

#: Longest text that a rope was trained for, in the variants: the longest row of the checks crosses it, others do not.
ORIGINAL = 16
_ALTERNATING = ["sliding_attention", "full_attention"]
_LIMITED_STEPS = {"time_step_limit": (0.3, 0.9)}
_SHARED = {"num_hidden_layers": 4, "layer_types": _ALTERNATING * 2}
_ALL_KEYS: dict[str, dict[str, Any]] = {"all keys": {"index_topk": 64}}
_M3_SPARSE = {
    "layer_types": ["minimax_m3_sparse", "full_attention"],
    "index_block_size": 8,
    "index_topk_blocks": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
}
#: Variants of one architecture, by model type and label.
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "axk2": _ALL_KEYS,
    "bamba": {"limited steps": _LIMITED_STEPS},
    "bert": {"encoder": {"is_decoder": False}},
    "cohere": {"norms of queries and keys": {"use_qk_norm": True}},
    "deepseek_v2": {"groups of experts": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}},
    "deepseek_v3": {
        "groups of experts": {"n_group": 2, "topk_group": 1},
        "no latent of queries": {"q_lora_rank": None},
    },
    "deepseek_v32": _ALL_KEYS,
    "doge": {"all keys": {"keep_window_size": 64}, "experts": {"is_moe": True, "keep_window_size": 64}},
    "dots3_note_text": _ALL_KEYS,
    "dots3_note": _ALL_KEYS,
    "falcon": {
        "alibi": {"alibi": True},
        "new decoder": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "no multi-query": {"multi_query": False, "num_kv_heads": 4},
        "serial": {"parallel_attn": False},
    },
    "falcon_h1": {
        "limited steps": _LIMITED_STEPS,
        "multipliers": _LIMITED_STEPS | {"ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 3.0]},
    },
    "gemma3_text": {"both directions": {"use_bidirectional_attention": True}},
    "gemma4_text": {
        "shared keys": _SHARED | {"num_kv_shared_layers": 2},
        "keys are values": {"attention_k_eq_v": True},
        "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    },
    "glm_moe_dsa": _ALL_KEYS,
    "gpt2": {"scaled by layer": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}},
    "gpt_bigcode": {"no multi-query": {"multi_query": False}},
    "gpt_neo": {
        "global": {"attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2},
        "wide window": {"window_size": 64},
    },
    "gpt_neox": {"serial": {"use_parallel_residual": False}},
    "granitemoehybrid": {"limited steps": _LIMITED_STEPS},
    "hy_v4": _ALL_KEYS,
    "inkling_text": {
        "scaled attention": {"log_scaling_n_floor": ORIGINAL},
        "full attention": {"layer_types": ["hybrid"] * 2},
    },
    "lfm2": {"attention alone": {"layer_types": ["full_attention"] * 2}},
    "llama4_text": {
        "tuned temperature": {"floor_scale": ORIGINAL},
        "plain temperature": {"floor_scale": ORIGINAL, "attn_temperature_tuning": False},
    },
    "mamba2": {"limited steps": _LIMITED_STEPS},
    "minimax_m3_vl_text": {
        "sparse": _M3_SPARSE | {"index_topk_blocks": 2},
        "sparse, all keys": _M3_SPARSE,
    },
    "ministral3": {
        "scaled attention": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": ORIGINAL,
            }
        }
    },
    "mllama": {"layers for images": {"cross_attention_layers": [1]}},
    "moshi": {"wide window": {"sliding_window": 64}},
    "nemotron_h": {"long steps": {"time_step_min": 0.5}},
    "olmo": {"clipped": {"clip_qkv": 0.5}},
    "opt": {"norm behind": {"do_layer_norm_before": False}, "narrow": {"word_embed_proj_dim": 16}},
    "phi": {"norms of queries and keys": {"qk_layernorm": True}},
    "qwen3_moe": {"some layers dense": {"mlp_only_layers": [0]}},
    "recurrent_gemma": {"wide recurrence": {"lru_width": 48}},
    "rwkv": {"rescaled": {"rescale_every": 1}, "wide attention": {"attention_hidden_size": 64}},
    "stablelm": {"parallel": {"use_parallel_residual": True, "qk_layernorm": True}},
    "zamba2": {"long steps": {"time_step_min": 0.5}},
    "zaya": {"sliding": {"layer_types": ["hybrid_sliding", "hybrid"], "sliding_window": 8}},
}


def variants(config_class: Any) -> dict[str, dict[str, Any]]:
    """Changes to the config of the text model, by label, if the architecture has the changed keys."""
    config = tiny_config(config_class).get_text_config()
    known = config.to_dict()
    results: dict[str, dict[str, Any]] = {"eager": {"attn_implementation": "eager"}}
    if "sliding_window" in known:
        sliding: dict[str, Any] = {"sliding_window": 8}
        sliding |= {name: True for name in ("use_sliding_window",) if name in known}
        sliding |= {name: 1 for name in ("max_window_layers",) if name in known}
        types = known.get("layer_types") or ()
        if len(types) == 2 and all(name.endswith("attention") and name != "linear_attention" for name in types):
            sliding["layer_types"] = _ALTERNATING
        results["sliding"] = sliding
    if "tie_word_embeddings" in known:
        results["untied" if config.tie_word_embeddings else "tied"] = {
            "tie_word_embeddings": not config.tie_word_embeddings
        }
    rope = known.get("rope_parameters") or {}
    for kind, parameters in _ropes(config_class, rope).items():
        results[f"rope {kind}"] = {"rope_parameters": parameters}
        if "original_max_position_embeddings" in known and "original_max_position_embeddings" in parameters:
            original = parameters["original_max_position_embeddings"]
            results[f"rope {kind}"]["original_max_position_embeddings"] = original
    return results


def _ropes(config_class: Any, rope: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Other kinds of rotary positions, in the form that ``rope`` has."""
    nested = all(isinstance(inner, dict) for inner in rope.values())
    first = next(iter(rope.values()), None) if nested else rope
    if not first or "rope_theta" not in first:
        return {}
    width = _rotary_width(config_class)
    base = {
        name: first[name]
        for name in (
            "rope_theta",
            "partial_rotary_factor",
            "mrope_section",
            "llama_4_scaling_beta",
            "original_max_position_embeddings",
        )
        if name in first
    }
    short, long = [1.0 + 0.1 * i for i in range(width)], [2.0 + 0.5 * i for i in range(width)]
    longrope = {"short_factor": short, "long_factor": long, "factor": 4.0, "short_mscale": 1.1, "long_mscale": 1.2}
    kinds = {
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        "longrope": longrope | {"original_max_position_embeddings": ORIGINAL},
        "longrope, short texts": longrope | {"original_max_position_embeddings": 64},
    }
    results = {}
    for label, parameters in kinds.items():
        instance = {**base, "rope_type": label.partition(",")[0], **parameters}
        results[label] = {name: instance if inner else inner for name, inner in rope.items()} if nested else instance
    return results


def _rotary_width(config_class: Any) -> int:
    """Numbers of a rotary frequency table."""
    for name, buffer in tiny(config_class).named_buffers():
        if name.rpartition(".")[2].endswith("inv_freq"):
            return buffer.shape[-1]
    return 4
