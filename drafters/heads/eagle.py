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

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...framework.util.cache_argument import cache_argument
from .eagle_weights import (
    biased,
    config_json,
    decoder_layer,
    is_eagle3,
    layer_config,
    mask_of,
    renamed,
    shared,
    table,
    write,
)
from .feature_head import FeatureHead
from .features import FeatureDrafter
from .misconfigurations import embedding_scales, other_embedding, rotary_bases, swapped_inputs

if TYPE_CHECKING:
    from ...framework.contracts.misconfiguration import Misconfiguration
    from ...framework.contracts.models import Checkpoint


class EagleHead(FeatureHead):
    """The head of EAGLE-1 and EAGLE-2 as a plain module; ``forward`` is :meth:`FeatureHead.forward`.

    Args:
        config: config of the decoder layers, from :func:`~crossdraft.drafters.heads.eagle_weights.make_config`.
        embedding, head: ``[V, H]``, not copied (usually the target's) and frozen.
        fc_bias: ``fc`` has a bias.
        input_norm: the first layer has its input norm, which the authors omit.
        embedding_norm, head_norm: HASS's norms of the embeddings and before the head.
        biased: names of the attention projections with a bias.
    """

    target_ids = None

    def __init__(
        self,
        config: Any,
        embedding: Tensor,
        head: Tensor,
        *,
        fc_bias: bool = True,
        input_norm: bool = False,
        embedding_norm: bool = False,
        head_norm: bool = False,
        biased: frozenset[str] = frozenset(),
    ):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

        size = config.hidden_size
        self.config = config
        self.embed_tokens = nn.Embedding(len(embedding), size, _weight=embedding, _freeze=True)
        self.embedding_layernorm = LlamaRMSNorm(size, config.rms_norm_eps) if embedding_norm else nn.Identity()
        self.fc = nn.Linear(2 * size, size, bias=fc_bias)
        self.layers = nn.ModuleList(decoder_layer(config, i, biased=biased) for i in range(config.num_hidden_layers))
        if not input_norm:
            self.layers[0].input_layernorm = nn.Identity()
        self.pre_lm_head_layernorm = LlamaRMSNorm(size, config.rms_norm_eps) if head_norm else nn.Identity()
        self.lm_head = shared(head)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def advance(self, embeds: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any) -> Tensor:
        out = self.fc(torch.cat([self.embedding_layernorm(embeds), features], -1))
        rotary = self.rotary_emb(embeds, position_ids)
        for i, layer in enumerate(self.layers):
            out = layer(
                out,
                attention_mask=mask_of(mask, self.config, i),
                position_embeddings=rotary,
                position_ids=position_ids,
                **{cache_argument(layer.forward): cache},
            )
        return out

    def head_input(self, out: Tensor) -> Tensor:
        return self.pre_lm_head_layernorm(out)

    def save(self, directory: Path | str) -> None:
        """Write the authors' layout: ``fc.*`` and ``layers.*``, without embedding and head, which are the target's."""
        tensors = {key: t for key, t in self.state_dict().items() if not key.startswith(("embed_tokens.", "lm_head."))}
        more = {"vocab_size": len(self.embed_tokens.weight), "bias": self.fc.bias is not None}
        write(directory, config_json(self.config, "LlamaForCausalLM", **more), tensors)


class Eagle(FeatureDrafter):
    """Drafts a chain, a static tree or EAGLE-2's dynamic tree with an EAGLE-1 or EAGLE-2 head.

    Checkpoints: the authors' (``fc.*``, ``layers.*``), and those of vllm-project/speculators up to 0.3
    (``fusion_fc.*``, ``transformer.*``). ``embed_tokens`` and ``lm_head`` default to the target's.
    """

    name = "eagle"

    @classmethod
    def misconfigurations(cls, config: Any, heads: Checkpoint, target_model: Any) -> Iterator[Misconfiguration]:
        yield from swapped_inputs(heads, "fc.weight")
        yield from rotary_bases(heads, target_model)
        yield from other_embedding(heads)
        yield from embedding_scales(heads, target_model)

    def load(self) -> EagleHead:
        checkpoint, target = self.context.load_heads(self.config.model), self.context.target_model
        tensors = renamed(checkpoint.tensors)
        if is_eagle3(tensors):
            raise checkpoint.refused("they are EAGLE-3 heads (hidden_norm in the first layer); use drafter 'eagle3'")
        config = layer_config(checkpoint, tensors)
        embedding, size = target.get_input_embeddings().weight, config.hidden_size
        shape = (self.context.vocab_size, size)
        if embedding.shape[1] != size:
            raise checkpoint.refused(
                f"they read features of width {size}, but the target's have width {embedding.shape[1]}"
            )
        embed = table(checkpoint, tensors, "embed_tokens.weight", embedding, shape)
        output = table(checkpoint, tensors, "lm_head.weight", target.get_output_embeddings().weight, shape)
        head = EagleHead(
            config,
            embed,
            output,
            fc_bias="fc.bias" in tensors,
            input_norm="layers.0.input_layernorm.weight" in tensors,
            embedding_norm="embedding_layernorm.weight" in tensors,
            head_norm="pre_lm_head_layernorm.weight" in tensors,
            biased=biased(tensors),
        )
        checkpoint.fill(head, tensors, shared=("embed_tokens.weight", "lm_head.weight"))
        return head
