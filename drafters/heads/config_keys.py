"""Keys of the published heads' ``config.json``: those that change what a head computes, and those that do not.

`check_head_config` goes through a config by the table of its layout, which is the attribute ``layout`` of the drafter.
A key is read; or has no effect, because the tensors decide it or because it concerns training or serving; or is
refused, because it selects another computation; or is ignored with a remark, because no engine applies it to heads
although its name promises a computation. A key that is not listed is named in a remark.

Sources: the authors' releases of each method; SpecForge; vllm-project/speculators; NVIDIA Model-Optimizer and NeMo
Automodel; the head models of vLLM and SGLang, which serve files of all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from ...framework.contracts.models import Checkpoint
from ...framework.util.foreign_keys import Key, Keys, ignored_keys, read_keys, refused_keys, unused_keys
from .rotary import INTERLEAVED

logger = logging.getLogger(__name__)


#: Sections that may hold a head's options; the later ones take precedence, and all of them over the top.
SECTIONS = ("eagle_config", "dflash_config", "dspark_config")
#: Keys of any ``config.json``.
_BOOKKEEPING = unused_keys(
    "it describes the file, the tokenizer, training or serving",
    *("_name_or_path", "name_or_path", "transformers_version", "auto_map", "torch_dtype", "dtype", "use_cache"),
    *("initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "id2label", "label2id"),
    *("num_labels", "problem_type", "task_specific_params", "tokenizer_class", "prefix", "finetuning_task"),
    *("output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores"),
    *("torchscript", "use_bfloat16", "pruned_heads", "chunk_size_feed_forward", "cross_attention_hidden_size"),
    *("add_cross_attention", "is_encoder_decoder", "is_decoder", "tie_encoder_decoder", "tf_legacy_loss"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "attn_impl", "ep_size"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id", "prefill_chunk"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens", "pretraining_tp", "router_aux_loss_coef", "output_router_logits", "license", "trainer"),
    *("base_model_name_or_path", "target_model", "target_model_type", "target_model_name_or_path", "version"),
)
_TARGET = "it describes the target, whose values are used"
DECIDED_BY_TENSORS = "the tensors decide it"
_ENGINES = "neither trainers nor serving engines apply it to heads"
_QUANTIZED = unused_keys(
    "quantised tensors are refused, or dequantised for 'mtp'", "quantization_config", "compression_config"
)
_SPECULATORS = {
    **read_keys("speculators_model_type"),
    **unused_keys("it describes the file", "speculators_version", "has_no_defaults_at_init"),
    "speculators_config": unused_keys(
        "it describes how the file is served", "algorithm", "proposal_methods", "default_proposal_method", "verifier"
    ),
}
_ROPE = {
    **read_keys("type", "rope_type", "rope_theta", "factor", "partial_rotary_factor", "attention_factor"),
    **read_keys("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    **read_keys("mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"),
    **read_keys("full_attention", "sliding_attention"),
    **unused_keys("the three positions of text are equal", "mrope_section", "mrope_interleaved"),
    **unused_keys("it describes how the target was trained", "finetuned"),
}
#: Keys of decoder layers, which `layer_config` reads.
LAYERS: dict[str, Any] = {
    **read_keys(
        "hidden_size", "intermediate_size", "intermediate_size_mlp", "num_attention_heads", "num_key_value_heads"
    ),
    **read_keys("head_dim", "rms_norm_eps", "hidden_act", "hidden_activation", "max_position_embeddings", "model_type"),
    **read_keys("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "tie_word_embeddings"),
    **read_keys("rope_theta", "partial_rotary_factor", "original_max_position_embeddings", *INTERLEAVED),
    "rope_parameters": _ROPE,
    "rope_scaling": _ROPE,
    **unused_keys(DECIDED_BY_TENSORS, "num_hidden_layers", "attention_bias", "mlp_bias", "qkv_bias", "bias"),
    **unused_keys(DECIDED_BY_TENSORS, "qk_norm", "use_qk_norm", "vocab_size", "draft_vocab_size", "norm_type"),
    **unused_keys(_TARGET, "num_target_layers", "target_hidden_size", "target_vocab_size", "target_layer_count"),
    **unused_keys(
        "it describes experts of the target; heads with experts are refused by their tensors",
        *("num_experts", "num_local_experts", "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "n_group"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
        *("mlp_only_layers", "first_k_dense_replace", "moe_layer_freq", "topk_group", "topk_method", "scoring_func"),
        *("routed_scaling_factor", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers"),
        "interleave_moe_layer_step",
    ),
    **unused_keys(
        "heads with latent attention are refused by their tensors",
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    ),
    **refused_keys(
        "it scales parts of the layers, which is not supported",
        **dict.fromkeys(("residual_multiplier", "embedding_multiplier", "scale_emb"), (1,)),
        **dict.fromkeys(("attention_multiplier", "scale_depth", "dim_model_base"), ()),
    ),
    **refused_keys("logits divided by it are not supported", logits_scaling=(1,)),
    **refused_keys("other layers than Llama's are not supported", clip_qkv=(), alibi=(False,), parallel_attn=(False,)),
    **ignored_keys(_ENGINES, attn_logit_softcapping=(0,), query_pre_attn_scalar=(), attention_chunk_size=()),
}
_CAUSAL = refused_keys("attention that is not causal is not supported", is_causal=(True,))
AUTOREGRESSIVE = {
    **LAYERS,
    **_CAUSAL,
    **read_keys("logit_scale"),
    **ignored_keys("SGLang applies it to heads, their trainers and vLLM do not", final_logit_softcapping=(0,)),
}
_EAGLE_OPTIONS = {
    **refused_keys(
        "such layers are not supported",
        use_mtp_layernorm=(False,),
        next_layer_regular=(True,),
        parallel_draft_step=(0, 1),
    ),
    **unused_keys("it is used with parallel_draft_step", "parallel_draft_heads_num_layers"),
    **unused_keys(DECIDED_BY_TENSORS, "use_input_layernorm_in_first_layer", "use_last_layernorm", "has_lm_head"),
    **unused_keys(DECIDED_BY_TENSORS, "draft_vocab_size"),
}
EAGLE3_OPTIONS = {
    **_EAGLE_OPTIONS,
    **read_keys("eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_residual", "norm_output"),
    **read_keys("norm_before_fc", "fc_norm"),
    **unused_keys("it decides only how the file was trained", "embed_requires_grad", "ttt_length", "num_depths"),
    **unused_keys(DECIDED_BY_TENSORS, "num_aux_hidden_states"),
    **refused_keys("P-EAGLE heads are read by 'p-eagle'", parallel_drafting=(False,)),
}


def option_keys(options: Keys) -> dict[str, Any]:
    """The table of ``options``, at the top of a config and in each of `SECTIONS`."""
    return {**options, **dict.fromkeys(SECTIONS, options)}


def file_keys(keys: Keys) -> dict[str, Any]:
    """The table of a whole file: ``keys``, those of any file, and the nested config of speculators."""
    return {**_BOOKKEEPING, **_QUANTIZED, **_SPECULATORS, **read_keys("architectures"), **keys}


def nested_keys(keys: Keys) -> dict[str, Any]:
    """`file_keys`, and the nested config of decoder layers."""
    return {
        **file_keys(keys),
        "transformer_layer_config": {**_BOOKKEEPING, **read_keys("architectures"), **AUTOREGRESSIVE},
    }


class Layout(NamedTuple):
    """A published layout.

    Attributes:
        keys: the treatment of each key; sections are tables.
        algorithms: its names in ``speculators_model_type``.
        prefixes: if not empty, keys that do not start with one of them are those of the target, and are not remarked.
    """

    keys: Keys
    algorithms: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()


#: By drafter; those of EAGLE-1 are EAGLE-2's, too.
LAYOUTS: dict[str, Layout] = {
    "eagle": Layout(
        nested_keys(
            {
                **AUTOREGRESSIVE,
                **option_keys(
                    {
                        **_EAGLE_OPTIONS,
                        **unused_keys("EAGLE-1 reads the last state", "eagle_aux_hidden_state_layer_ids"),
                        **refused_keys("EAGLE-3 heads are read by 'eagle3'", use_aux_hidden_state=(False,)),
                    }
                ),
                **unused_keys(
                    DECIDED_BY_TENSORS, "add_para_norm", "layernorms", "fusion_bias", "transformer_layer_architecture"
                ),
            }
        ),
        ("eagle", "hass"),
    ),
    "eagle3": Layout(nested_keys({**AUTOREGRESSIVE, **option_keys(EAGLE3_OPTIONS)}), ("eagle3",)),
    "medusa": Layout(
        file_keys(
            {
                **read_keys(
                    "medusa_num_heads", "medusa_num_layers", "num_heads", "num_hidden_layers", "medusa_accuracies"
                ),
                **read_keys("truncated_vocab_size", "vocab_size", "original_lm_head", "medusa_fc_bias", "logit_scale"),
                **unused_keys(DECIDED_BY_TENSORS, "hidden_size", "medusa_hidden_size"),
                **unused_keys("it decides only how heads are served", "medusa_choices", "num_lookahead_tokens"),
                **unused_keys(
                    "it decides only how heads were trained",
                    *("medusa_lr_multiplier", "medusa_heads_coefficient", "medusa_decay_coefficient"),
                    "medusa_only_heads",
                ),
            }
        ),
        (),
        ("medusa",),
    ),
}
#: Keys of writers of EAGLE-3 heads for whom ``norm_output`` means that the normed output is fed back.
FEEDS_NORMED = ("speculators_config", "fc_norm", "eagle_config", "num_aux_hidden_states", "norm_before_fc")


def check_head_config(checkpoint: Checkpoint, drafter: str, layout: Layout) -> None:
    """Check every key of ``config.json`` by the table of ``layout``; log one remark for keys without effect here.

    Raises:
        ModelError: files of another kind, or a key requests a computation that is not supported.
    """
    checkpoint.check_kind(drafter)
    config = checkpoint.config
    algorithm = config.get("speculators_model_type")
    if algorithm is not None and layout.algorithms and algorithm not in layout.algorithms:
        raise checkpoint.refused(
            f"config.json has {algorithm!r:.80} for speculators_model_type, which drafter '{drafter}' does not read"
        )
    remarks = []
    for path, key, value in _walk(config, layout.keys):
        if key is None:
            if not layout.prefixes or path.startswith(layout.prefixes):
                remarks.append(f"{path} is not known")
        elif key.effect in ("refused", "ignored") and value is not None and value not in key.neutral:
            if key.effect == "refused":
                raise checkpoint.refused(f"config.json has {value!r:.80} for {path}: {key.reason}")
            remarks.append(f"{path} is not applied ({key.reason})")
    if remarks:
        _remark(f"the heads '{checkpoint.name}', read as {drafter}: of their config.json {', '.join(remarks)}")


def _walk(config: Mapping[str, Any], keys: Keys, prefix: str = "") -> Iterator[tuple[str, Key | None, Any]]:
    """Yield the path, treatment (None = not listed) and value of each key, those of sections included."""
    for name, value in config.items():
        key = keys.get(str(name))
        if key is None or isinstance(key, Key):
            yield f"{prefix}{name}", key, value
        elif isinstance(value, Mapping):
            yield from _walk(value, key, f"{prefix}{name}.")


@cache
def _remark(text: str) -> None:
    """Log a remark once per process: heads are loaded once per cell."""
    logger.warning("crossdraft: %s", text)


def remark(checkpoint: Checkpoint, text: str) -> None:
    """Log a remark about ``checkpoint``."""
    _remark(f"the heads '{checkpoint.name}': {text}")
