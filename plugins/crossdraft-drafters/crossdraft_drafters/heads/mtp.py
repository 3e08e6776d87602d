"""Multi-token prediction: drafting with the MTP module that a target was trained with.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2, equations 21 to 23. With h the target's last hidden
states, after its final norm, and e its token embedding,

    h'_{t+1} = norm(Layer(eh_proj([enorm(e(x_{t+1})); hnorm(h_t)]))),   logits = W h'_{t+1},   W the target's head.

The paper has the pair in reverse order; this is the order of the released weights. Layer is a decoder layer of the
target's type. Targets are released with one module; it is applied to its own output for every further token, as in Y.
Cai et al., "FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction", 2025.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crossdraft.drafters.heads.config_keys import check_head_config
from crossdraft.drafters.heads.eagle_weights import save_head_files, shared, vocabulary
from crossdraft.drafters.heads.feature_head import FeatureHead
from crossdraft.drafters.heads.features import FeatureDrafter
from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.errors import ModelError
from crossdraft.framework.util.cache_argument import cache_argument

from .config_keys import LAYOUTS
from .experts import dequantized, stacked

#: DeepSeek's names, under ``model.layers.{L}``, L the number of the target's layers; Qwen's, under ``mtp``; and those
#: of vllm-project/speculators, under ``mtp_layers.0``.
_DEEPSEEK = re.compile(r"(?:model\.)?layers\.(\d{1,4})\.(.+)")
_QWEN = {"fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "layers.0.": "layer."}
_RENAMED = {
    **_QWEN,
    "shared_head.norm.": "norm.",
    "shared_head.head.": "lm_head.",
    "input_proj.": "eh_proj.",
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "final_layernorm.": "norm.",
}
_OWN = ("enorm.", "hnorm.", "eh_proj.", "norm.", "embed_tokens.", "lm_head.", "layer.")


class MtpHead(FeatureHead):
    """A module of multi-token prediction; ``forward`` is :meth:`FeatureHead.forward`.

    Args:
        target: the transformers model whose types of layer, norm and rotary embedding are used.
        embedding: ``[V, H]``, ``head [Vd, H]``: not copied, frozen; default: the target's.
        target_ids: ``[Vd]`` int64, the target's id of each row of the head; ``None`` = identical ids.
        logit_scale: factor of the logits.

    Raises:
        ModelError: the target's architecture is not supported.
    """

    def __init__(
        self,
        target: Any,
        embedding: Tensor | None = None,
        head: Tensor | None = None,
        *,
        target_ids: Tensor | None = None,
        logit_scale: float = 1.0,
    ):
        super().__init__()
        decoder = target.get_decoder()
        rotary, norm, layers = (getattr(decoder, name, None) for name in ("rotary_emb", "norm", "layers"))
        if rotary is None or norm is None or not layers or "layer_type" in inspect.signature(rotary.forward).parameters:
            raise ModelError(
                f"{type(target).__name__} lacks decoder layers with one rotary embedding and a final norm, which a "
                "module of multi-token prediction needs; use 'eagle' or 'eagle3' heads"
            )
        config = copy.deepcopy(target.config.get_text_config())
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        # Of the last layer's type: models with experts may begin with dense layers.
        layer = type(layers[-1])(config, config.num_hidden_layers - 1)
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = 0  # index in the cache
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"]
        embedding = embedding if embedding is not None else target.get_input_embeddings().weight
        assert embedding is not None
        (vocab, size), eps = embedding.shape, config.rms_norm_eps
        self.config = config
        self.embed_tokens = nn.Embedding(vocab, size, _weight=embedding, _freeze=True)
        self.enorm, self.hnorm, self.norm = (type(norm)(size, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = layer
        self.lm_head = shared(target.get_output_embeddings().weight if head is None else head, logit_scale)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.rotary_emb = copy.deepcopy(rotary)

    def advance(self, embeds: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any) -> Tensor:
        out = self.layer(
            self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(features)], -1)),
            attention_mask=mask["full_attention"] if isinstance(mask, Mapping) else mask,
            position_embeddings=self.rotary_emb(embeds, position_ids),
            position_ids=position_ids,
            **{cache_argument(self.layer.forward): cache},
        )
        return self.norm(out[0] if isinstance(out, tuple) else out)

    def save(self, directory: Path | str) -> None:
        """Write Qwen's layout (``mtp.fc.weight``, ``mtp.layers.0.*``, ..), without embedding and head."""
        tensors = {}
        for key, tensor in self.state_dict().items():
            if key.startswith(("embed_tokens.", "lm_head.")):
                continue
            for new, own in _QWEN.items():
                if key.startswith(own):
                    key = new + key.removeprefix(own)
                    break
            tensors[f"mtp.{key}"] = tensor
        config = {"model_type": self.config.model_type, "num_nextn_predict_layers": 1}
        save_head_files(directory, config, tensors)


def mtp_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the first module in a checkpoint, under `MtpHead`'s names; {} if it has no module.

    DeepSeek's: ``model.layers.{L}.`` with ``enorm``, ``hnorm``, ``eh_proj``, ``shared_head.norm``, copies of the
    target's ``embed_tokens`` and ``shared_head.head``, and the keys of the decoder layer. Qwen's: ``mtp.``
    with ``pre_fc_norm_embedding``, ``pre_fc_norm_hidden``, ``fc``, ``norm`` and ``layers.0.*``. Speculators':
    ``mtp_layers.0.`` with ``token_layernorm``, ``hidden_layernorm``, ``input_proj``, ``final_layernorm`` and the keys
    of the layer.
    """
    prefix = next((prefix for prefix in ("mtp.", "mtp_layers.0.") if any(n.startswith(prefix) for n in tensors)), None)
    if prefix is not None:
        names = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    else:
        parts = [(match, name) for name in tensors if (match := _DEEPSEEK.fullmatch(name))]
        indices = [int(match[1]) for match, _ in parts if match[2] == "eh_proj.weight"]
        names = {match[2]: name for match, name in parts if indices and int(match[1]) == min(indices)}
    out = {}
    for key, name in names.items():
        if re.match(r"layers\.[1-9]", key) or key.endswith("rotary_emb.inv_freq"):
            continue
        for old, own in _RENAMED.items():
            if key.startswith(old):
                key = own + key.removeprefix(old)
                break
        out[key if key.startswith(_OWN) else f"layer.{key}"] = tensors[name]  # loads only this tensor
    return out


class Mtp(FeatureDrafter):
    """Drafts a chain, a static tree or a dynamic tree with the target's module of multi-token prediction.

    ``model`` is the target's own checkpoint, if it has the module, or a directory with the module; see `mtp_tensors`
    for the names. The first module is used, and only its tensors are loaded. Experts may be separate tensors or stacked
    like the target's; block-scaled float8 is dequantised.
    """

    name = "mtp"
    layout = LAYOUTS["mtp"]

    def load(self, checkpoint: Checkpoint) -> MtpHead:
        target = self.context.target_model
        check_head_config(checkpoint, self.name, self.layout)
        tensors = mtp_tensors(checkpoint.tensors)
        if not tensors:
            raise checkpoint.refused(
                "they lack a module of multi-token prediction: they have "
                "neither mtp.* nor mtp_layers.0.* nor model.layers.{L}.eh_proj"
            )
        tensors = dequantized(checkpoint, tensors)
        tables = vocabulary(checkpoint, tensors, target, target.get_input_embeddings().weight.shape[1])
        head = MtpHead(target, tables.embedding, tables.head, target_ids=tables.ids, logit_scale=tables.scale)
        checkpoint.fill(
            head, stacked(checkpoint, tensors, head.state_dict()), shared=("embed_tokens.weight", "lm_head.weight")
        )
        return head
