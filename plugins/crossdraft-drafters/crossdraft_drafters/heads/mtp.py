"""Multi-token prediction: drafting with the MTP module that a target was trained with.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2, equations 21 to 23. With h the target's last hidden
states, after its final norm, and e its token embedding,

    h'_{t+1} = norm(Layer(eh_proj([enorm(e(x_{t+1})); hnorm(h_t)]))),   logits = W h'_{t+1},   W the target's head.

The paper has the pair in reverse order; this is the order of the released weights, besides MiMo's. Layer is a decoder
layer of the target's type. Most targets are released with one module; it is applied to its own output for every
further token, as in Y. Cai et al., "FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction", 2025. Of
several, module k drafts token k, see `ModulesLM`.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from crossdraft import Checkpoint, ModelError, cache_argument
from crossdraft.heads import (
    UNUSED_TENSOR,
    FeatureDrafter,
    FeatureHead,
    HeadConfig,
    HeadOutput,
    check_head_config,
    save_head_files,
    shared,
    vocabulary,
)

from .config_keys import LAYOUTS
from .experts import dequantized, stacked
from .modules_lm import ModulesLM

#: Names of the tensors of module k: DeepSeek's, under ``model.layers.{L + k}``, L the number of the target's layers;
#: those of MiMo and of vllm-project/speculators, under ``mtp_layers.{k}``; and Qwen's, under ``mtp.layers.{k}``.
_MODULE = re.compile(r"(mtp\.layers|(?:model\.)?(?:mtp_layers|layers))\.(\d{1,4})\.(.+)")
#: Qwen's tensors that all modules share, under ``mtp``, and the beginning of a layer's.
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
        index: number of the module, from 0.
        hidden_first: the hidden state is the first half of the pair, and the embedding the second one.

    Attributes:
        later: the modules that draft the second token, the third, ..; empty = this one drafts all.

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
        index: int = 0,
        hidden_first: bool = False,
    ):
        super().__init__()
        decoder, config = target.get_decoder(), copy.deepcopy(target.config.get_text_config())
        rotary, norm, layers = (getattr(decoder, name, None) for name in ("rotary_emb", "norm", "layers"))
        kind, types = _layer_type(config, index), getattr(config, "mtp_layer_types", None)
        by_type = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        if rotary is None or norm is None or not layers or (by_type and not types):
            raise ModelError(
                f"{type(target).__name__} lacks decoder layers with one rotary embedding and a final norm, which a "
                "module of multi-token prediction needs; use 'eagle' or 'eagle3' heads"
            )
        count = config.num_hidden_layers
        if getattr(config, "layer_types", None):
            config.layer_types = [kind] * count
        if mlp := _mlp_type(config, index):
            config.mlp_layer_types = [mlp] * count
        # Of the last layer's type: models with experts may begin with dense layers.
        layer = type(layers[-1])(config, count - 1)
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = 0  # index in the cache
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = [kind]
        embedding = embedding if embedding is not None else target.get_input_embeddings().weight
        assert embedding is not None
        (vocab, size), eps = embedding.shape, config.rms_norm_eps
        self.config, self.kind, self.hidden_first = config, kind, hidden_first
        self._rotary_options = {"layer_type": kind} if by_type else {}
        self.later = nn.ModuleList()
        self.embed_tokens = nn.Embedding(vocab, size, _weight=embedding, _freeze=True)
        self.enorm, self.hnorm, self.norm = (type(norm)(size, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = layer
        self.lm_head = shared(target.get_output_embeddings().weight if head is None else head, logit_scale)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.rotary_emb = copy.deepcopy(rotary)

    def pairs(self, embeds: Tensor, features: Tensor) -> Tensor:
        pair = [self.enorm(embeds), self.hnorm(features)]
        return self.eh_proj(torch.cat(pair[::-1] if self.hidden_first else pair, -1))

    @wraps(FeatureHead.forward)
    def forward(self, *inputs: Any, position_ids: Any = None, offset: Any = 0, **named: Any) -> HeadOutput:
        """`FeatureHead.forward`; ``offset [B, W]`` is added to the positions of pairs behind a gap."""
        return super().forward(*inputs, position_ids=None if position_ids is None else position_ids + offset, **named)

    def advance(self, embeds: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any) -> Tensor:
        out = self.layer(
            self.pairs(embeds, features),
            attention_mask=mask[self.kind] if isinstance(mask, Mapping) else mask,
            position_embeddings=self.rotary_emb(embeds, position_ids, **self._rotary_options),
            position_ids=position_ids,
            **{cache_argument(self.layer.forward): cache},
        )
        return self.norm(out[0] if isinstance(out, tuple) else out)

    def save(self, directory: Path | str) -> None:
        """Write Qwen's layout (``mtp.fc.weight``, ``mtp.layers.0.*``, ..) of this module, without its tables."""
        tensors = {}
        for key, tensor in self.state_dict().items():
            if key.startswith(("embed_tokens.", "lm_head.", "later.")):
                continue
            for new, own in _QWEN.items():
                if key.startswith(own):
                    key = new + key.removeprefix(own)
                    break
            tensors[f"mtp.{key}"] = tensor
        config = {"model_type": self.config.model_type, "num_nextn_predict_layers": 1}
        save_head_files(directory, config, tensors)


def _layer_type(config: Any, index: int) -> str:
    """Attention of module ``index``: the config's for modules; in EXAONE 4, that of the layer with this index."""
    types = getattr(config, "mtp_layer_types", None)
    if not types and config.model_type == "exaone4":
        types = config.layer_types
    return types[index % len(types)] if types else "full_attention"


def _mlp_type(config: Any, index: int) -> str | None:
    """Feed-forward network of module ``index``, ``None`` = that of the last layer; dense in EXAONE MoE."""
    types = getattr(config, "mtp_mlp_layer_types", None) or (["dense"] if config.model_type == "exaone_moe" else None)
    return types[index % len(types)] if types and getattr(config, "mlp_layer_types", None) else None


def mtp_tensors(tensors: Mapping[str, Tensor], modules: int | None = None) -> list[dict[str, Tensor]]:
    """Tensors of each module in a checkpoint, under `MtpHead`'s names; of the first ``modules`` if given.

    DeepSeek's: ``model.layers.{L + k}.`` with ``enorm``, ``hnorm``, ``eh_proj``, ``shared_head.norm``, copies of the
    target's ``embed_tokens`` and ``shared_head.head``, and the keys of the decoder layer. Qwen's: ``mtp.``
    with ``pre_fc_norm_embedding``, ``pre_fc_norm_hidden``, ``fc``, ``norm`` and ``layers.{k}.*``. MiMo's
    ``model.mtp_layers.{k}.`` and speculators' ``mtp_layers.{k}.``: ``token_layernorm``, ``hidden_layernorm``,
    ``input_proj``, ``final_layernorm`` and the keys of the layer.
    """
    by_kind: dict[str, dict[int, dict[str, str]]] = {}
    common: dict[str, str] = {}
    for name in tensors:
        if UNUSED_TENSOR.fullmatch(name):
            continue
        if match := _MODULE.fullmatch(name):
            kind = match[1].removeprefix("model.")
            by_kind.setdefault(kind, {}).setdefault(int(match[2]), {})[match[3]] = name
        elif name.startswith("mtp."):
            common[name.removeprefix("mtp.")] = name
    kind = next((kind for kind in ("mtp.layers", "mtp_layers", "layers") if kind in by_kind), "")
    named = by_kind.get(kind, {})
    if kind == "layers":  # the others are the target's
        named = {index: names for index, names in named.items() if "eh_proj.weight" in names}
    elif kind == "mtp.layers" or common:
        layer = {index: {f"layers.0.{key}": name for key, name in names.items()} for index, names in named.items()}
        named = {index: {**common, **names} for index, names in (layer or {0: {}}).items()}
    # Only these tensors are loaded.
    return [{_own(key): tensors[name] for key, name in named[index].items()} for index in sorted(named)[:modules]]


def _own(key: str) -> str:
    """The name in `MtpHead` of a module's tensor."""
    for old, own in _RENAMED.items():
        if key.startswith(old):
            key = own + key.removeprefix(old)
            break
    return key if key.startswith(_OWN) else f"layer.{key}"


class Mtp(FeatureDrafter):
    """Drafts a chain, a static tree or a dynamic tree with the target's modules of multi-token prediction.

    ``model`` is the target's own checkpoint, if it has modules, or a directory with them; see `mtp_tensors` for the
    names. Only their tensors are loaded. Experts may be separate tensors or stacked like the target's; block-scaled
    float8 is dequantised.
    """

    name = "mtp"
    layout = LAYOUTS["mtp"]

    class Config(HeadConfig):
        modules: int | None = Field(
            None,
            ge=1,
            description="number of the checkpoint's modules to use; default: all. One drafts every token; of several, "
            "each drafts the token of its position, in turn if the draft is longer",
        )

    config: Config  # type: ignore[assignment]

    def _slots(self, slack: int) -> Any:
        head: Any = self.head
        modules = [head, *head.later]
        if len(modules) == 1:
            return super()._slots(slack)
        room = self.config.gamma + 1 + len(modules)
        return ModulesLM(modules, [self.context.slots(m, extra_tokens=2 * room) for m in modules], self.context, room)

    def load(self, checkpoint: Checkpoint) -> MtpHead:
        target = self.context.target_model
        check_head_config(checkpoint, self.name, self.layout)
        own = self.config
        useful = None if own.tree else max(own.gamma, 1)
        modules = mtp_tensors(checkpoint.tensors, min(filter(None, (own.modules, useful)), default=None))
        if not modules:
            raise checkpoint.refused(
                "they lack a module of multi-token prediction: they have "
                "neither mtp.* nor mtp_layers.0.* nor model.layers.{L}.eh_proj"
                + ("; model.mtp.* is Inkling's, which is not supported" if _has(checkpoint, "model.mtp.") else "")
            )
        if len(modules) > 1 and own.tree is not None:
            raise checkpoint.refused(
                f"they have {len(modules)} modules, which draft a chain; leave out tree, or write modules: 1 to draft "
                "every token with the first one"
            )
        # The names of MiMo's modules are those of speculators', whose pairs are in the order of the others.
        hidden_first = _has(checkpoint, "model.mtp_layers.") or (
            _has(checkpoint, "mtp_layers.") and "speculators_model_type" not in checkpoint.config
        )
        heads = []
        for index, tensors in enumerate(modules):
            tensors = dequantized(checkpoint, tensors)
            tables = vocabulary(checkpoint, tensors, target, target.get_input_embeddings().weight.shape[1])
            head = MtpHead(
                target,
                tables.embedding,
                tables.head,
                target_ids=tables.ids,
                logit_scale=tables.scale,
                index=index,
                hidden_first=hidden_first,
            )
            filled = stacked(checkpoint, tensors, head.state_dict())
            checkpoint.fill(head, filled, shared=("embed_tokens.weight", "lm_head.weight"))
            heads.append(head)
        heads[0].later.extend(heads[1:])
        return heads[0]


def _has(checkpoint: Checkpoint, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in checkpoint.tensors)
