"""EAGLE: an autoregressive head of one decoder layer on the target's last features.

Y. Li, F. Wei, C. Zhang, H. Zhang, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", ICML 2024,
section 4.1. With f the target's last hidden states, after its final norm, and e the token embedding,

    f'_{t+1} = Layer(fc([e(x_{t+1}); f_t])),   logits = W f'_{t+1},   W the target's head,

and f' replaces f for drafted tokens. The same weights draft EAGLE-2's dynamic trees (Y. Li et al., "EAGLE-2: Faster
Inference of Language Models with Dynamic Draft Trees", EMNLP 2024). The norms of HASS (L. Zhang et al., "Learning
Harmonized Representations for Speculative Sampling", ICLR 2025) are applied if a checkpoint has them: to the
embeddings, before the layer, and before the head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...framework.contracts.models import Checkpoint
from .config_keys import LAYOUTS, check_head_config
from .eagle_weights import (
    biased,
    config_json,
    decoder_layer,
    layer_config,
    renamed,
    save_head_files,
    shared,
    vocabulary,
)
from .feature_head import FeatureHead
from .features import FeatureDrafter
from .rotary import Rotary, by_halves


class EagleHead(FeatureHead):
    """The head of EAGLE-1 and EAGLE-2 as a plain module; ``forward`` is :meth:`FeatureHead.forward`.

    Args:
        config: config of the decoder layers, from :func:`~crossdraft.drafters.heads.eagle_weights.make_config`.
        embedding: ``[V, H]``, ``head [Vd, H]``: not copied (usually the target's) and frozen.
        target_ids: ``[Vd]`` int64, the target's id of each row of the head; ``None`` = identical ids.
        logit_scale: factor of the logits.
        fc_bias: ``fc`` has a bias.
        input_norm: the first layer has its input norm, which the authors omit.
        embedding_norm, head_norm: HASS's norms of the embeddings and before the head.
        biased: names of the projections with a bias.
    """

    def __init__(
        self,
        config: Any,
        embedding: Tensor,
        head: Tensor,
        *,
        target_ids: Tensor | None = None,
        logit_scale: float = 1.0,
        fc_bias: bool = True,
        input_norm: bool = False,
        embedding_norm: bool = False,
        head_norm: bool = False,
        biased: frozenset[str] = frozenset(),
    ):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        size = config.hidden_size
        self.config = config
        self.embed_tokens = nn.Embedding(len(embedding), size, _weight=embedding, _freeze=True)
        self.embedding_layernorm = LlamaRMSNorm(size, config.rms_norm_eps) if embedding_norm else nn.Identity()
        self.fc = nn.Linear(2 * size, size, bias=fc_bias)
        self.layers = nn.ModuleList(decoder_layer(config, i, biased=biased) for i in range(config.num_hidden_layers))
        if not input_norm:
            self.layers[0].input_layernorm = nn.Identity()
        self.pre_lm_head_layernorm = LlamaRMSNorm(size, config.rms_norm_eps) if head_norm else nn.Identity()
        self.lm_head = shared(head, logit_scale)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.rotary_emb = Rotary(config)

    def pairs(self, embeds: Tensor, features: Tensor) -> Tensor:
        return self.fc(super().pairs(self.embedding_layernorm(embeds), features))

    def head_input(self, out: Tensor) -> Tensor:
        return self.pre_lm_head_layernorm(out)

    def save(self, directory: Path | str) -> None:
        """Write the authors' layout: ``fc.*`` and ``layers.*``, without embedding and head, which are the target's."""
        tensors = {key: t for key, t in self.state_dict().items() if not key.startswith(("embed_tokens.", "lm_head."))}
        tensors = by_halves(self.config, tensors, interleaved=False, back=True)
        more: dict[str, Any] = {"vocab_size": len(self.embed_tokens.weight), "bias": self.fc.bias is not None}
        if self.lm_head.scale != 1:
            more["logit_scale"] = self.lm_head.scale
        save_head_files(directory, config_json(self.config, "LlamaForCausalLM", **more), tensors)


class Eagle(FeatureDrafter):
    """Drafts a chain, a static tree or EAGLE-2's dynamic tree with an EAGLE-1 or EAGLE-2 head.

    Checkpoints: the authors' (``fc.*``, ``layers.*``), and those of vllm-project/speculators up to 0.3
    (``fusion_fc.*``, ``transformer.*``). ``embed_tokens`` and ``lm_head`` default to the target's.
    """

    name = "eagle"
    layout = LAYOUTS["eagle"]

    def load(self, checkpoint: Checkpoint) -> EagleHead:
        check_head_config(checkpoint, self.name, self.layout)
        target, tensors = self.context.target_model, renamed(checkpoint)
        config = layer_config(checkpoint, tensors)
        width = target.get_input_embeddings().weight.shape[1]
        if width != config.hidden_size:
            raise checkpoint.refused(
                f"they read features of width {config.hidden_size}, but the target's have width {width}"
            )
        tables = vocabulary(checkpoint, tensors, target, width)
        head = EagleHead(
            config,
            tables.embedding,
            tables.head,
            target_ids=tables.ids,
            logit_scale=tables.scale,
            fc_bias="fc.bias" in tensors,
            input_norm="layers.0.input_layernorm.weight" in tensors,
            embedding_norm="embedding_layernorm.weight" in tensors,
            head_norm="pre_lm_head_layernorm.weight" in tensors,
            biased=biased(tensors),
        )
        checkpoint.fill(head, tensors, shared=("embed_tokens.weight", "lm_head.weight"))
        return head
