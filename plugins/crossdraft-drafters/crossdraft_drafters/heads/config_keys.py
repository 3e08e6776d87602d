"""Keys of ``config.json`` of the published heads that are read here, by the rules of the core's `config_keys`."""

from __future__ import annotations

from typing import Any

from crossdraft.drafters.heads.config_keys import LAYERS
from crossdraft.heads import (
    AUTOREGRESSIVE,
    DECIDED_BY_TENSORS,
    EAGLE3_OPTIONS,
    Key,
    Layout,
    file_keys,
    nested_keys,
    option_keys,
    read_keys,
    refused_keys,
    unused_keys,
)

_BLOCK_OPTIONS: dict[str, Any] = {
    **read_keys("mask_token_id", "block_size", "target_layer_ids", "aux_hidden_state_layer_ids", "sample_from_anchor"),
    **read_keys("shift_label", "causal", "is_causal", "input_embedding_scale"),
    **read_keys("use_swa", "swa_window_size", "sliding_window_non_causal"),
    **refused_keys(
        "such attention is not supported", attention_sink_bias=(False,), add_swa_attention_sink_bias=(False,)
    ),
    **refused_keys("heads without features of the target are not supported", use_aux_hidden_state=(True,)),
    **refused_keys(
        "it changes the logits, which is not supported", output_multiplier=(1,), final_logit_softcapping=(0,)
    ),
    **refused_keys("Domino heads are not supported", emb_dim=(), gru_hidden_dim=(), pure_draft_prefix_len=(0,)),
    **unused_keys("it is decided by the sizes", "attention_mode"),
    **unused_keys(
        "it decides only how the file was trained",
        *("num_anchors", "loss_decay_gamma", "confidence_head_alpha", "markov_head_alpha", "max_anchors"),
    ),
}
_DFLASH = {
    **read_keys("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    **refused_keys("DSpark heads are read by 'dspark'", markov_rank=(0,), enable_confidence_head=(False,)),
    **unused_keys(
        "it is used with a Markov head", "markov_head_type", "confidence_head_with_markov", "use_confidence_head"
    ),
    "projector_type": Key("refused", "other heads on DFlash's layers are not supported", ("dflash", "dflash2")),
}
_DSPARK = {
    **read_keys("markov_head_type"),
    **unused_keys(
        DECIDED_BY_TENSORS,
        "markov_rank",
        "enable_confidence_head",
        "use_confidence_head",
        "confidence_head_with_markov",
    ),
    "projector_type": Key("refused", "other heads on DFlash's layers are not supported", ("dspark",)),
}

_LAYERS = {**LAYERS, **read_keys("logit_scale")}
_SAMPLED = ("down_sample_ratio", "down_sample_ratio_min")

#: By drafter.
LAYOUTS: dict[str, Layout] = {
    "p-eagle": Layout(
        nested_keys(
            {
                **AUTOREGRESSIVE,
                **option_keys(
                    {
                        **EAGLE3_OPTIONS,
                        **read_keys("mask_token_id", "ptd_token_id", "pard_token", "parallel_drafting"),
                        **unused_keys("it decides only how the file was trained", *_SAMPLED),
                    }
                ),
            }
        ),
        ("peagle",),
    ),
    "dflash": Layout(nested_keys({**_LAYERS, **option_keys({**_BLOCK_OPTIONS, **_DFLASH})}), ("dflash", "dflash2")),
    "dspark": Layout(nested_keys({**_LAYERS, **option_keys({**_BLOCK_OPTIONS, **_DSPARK})}), ("dspark",)),
    "mtp": Layout(
        file_keys(
            {
                **unused_keys(DECIDED_BY_TENSORS, "mtp_use_dedicated_embeddings"),
                **unused_keys(DECIDED_BY_TENSORS, "num_nextn_predict_layers", "mtp_num_hidden_layers"),
                **unused_keys("it is read from the target's config", "mtp_layer_types", "mtp_mlp_layer_types"),
                **unused_keys("it is read from the target's config", "mtp_per_layer_config"),
                **unused_keys(
                    "it decides only how the module was trained", "mtp_loss_weight", "mtp_loss_scaling_factor"
                ),
                **unused_keys("it describes the target, whose layers are used", "transformer_layer_config"),
            }
        ),
        ("mtp",),
        ("mtp_", "speculators_"),
    ),
    "mlp-speculator": Layout(
        file_keys(
            {
                **read_keys("n_predict", "tie_weights", "scale_input", "model_type"),
                **unused_keys(DECIDED_BY_TENSORS, "emb_dim", "inner_dim", "vocab_size", "hidden_size"),
                **unused_keys("it decides only how drafts are searched", "n_candidates", "top_k_tokens_per_head"),
                **unused_keys("it decides only how heads are served", "num_lookahead_tokens"),
                **refused_keys(
                    "stages with gates are not supported",
                    **dict.fromkeys(("tie_lstm_embs", "proj_dim", "input_hidden_dim", "emb_input_dim"), ()),
                    method=("sum_rnn",),
                ),
            }
        ),
    ),
}
