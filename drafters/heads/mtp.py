"""Multi-token prediction: the module that a target was trained with drafts tokens.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2, equations 21 to 23. With h the target's last hidden
states, after its final norm, and e its token embedding,

    h'_{t+1} = norm(Layer(eh_proj([enorm(e(x_{t+1})); hnorm(h_t)]))),   logits = W h'_{t+1},   W the target's head.

The paper writes the pair the other way round; this is the order of the released weights. Layer is a decoder layer of
the target's own kind. Targets are released with one module; it is applied again to its own output for every further
token, as in Y. Cai et al., "FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction", 2025.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...framework.errors import ModelError
from .eagle_weights import shared, table, write
from .experts import stacked, unscaled
from .feature_head import FeatureHead
from .features import FeatureDrafter
from .misconfigurations import other_embedding, swapped_inputs

if TYPE_CHECKING:
    from ...framework.contracts.misconfiguration import Misconfiguration
    from ...framework.contracts.models import Checkpoint

#: DeepSeek's names, inside ``model.layers.{L}``, L the number of the target's layers, and Qwen's, inside ``mtp``.
_DEEPSEEK = re.compile(r"(?:model\.)?layers\.(\d{1,4})\.(.+)")
_RENAMED = {
    "shared_head.norm.": "norm.",
    "shared_head.head.": "lm_head.",
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "layers.0.": "layer.",
}
_OWN = ("enorm.", "hnorm.", "eh_proj.", "norm.", "embed_tokens.", "lm_head.", "layer.")


class MtpHead(FeatureHead):
    """A module of multi-token prediction; ``forward`` is :meth:`FeatureHead.forward`.

    Args:
        target: the transformers model whose kind of layer, norm and rotary embedding it has.
        embedding, head: ``[V, H]``, used as they are; the target's own by default, never trained.

    Raises:
        ModelError: a target whose layers cannot be made one at a time like this.
    """

    target_ids = None

    def __init__(self, target: Any, embedding: Tensor | None = None, head: Tensor | None = None):
        super().__init__()
        decoder = target.get_decoder()
        rotary, norm, layers = (getattr(decoder, name, None) for name in ("rotary_emb", "norm", "layers"))
        if rotary is None or norm is None or not layers or "layer_type" in inspect.signature(rotary.forward).parameters:
            raise ModelError(
                f"{type(target).__name__} has no decoder layers with one rotary embedding and a final norm, which a "
                "module of multi-token prediction is made of; use 'eagle' or 'eagle3' heads"
            )
        config = copy.deepcopy(target.config.get_text_config())
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        # Of the kind of the last one: a model with experts may begin with layers that have none.
        layer = type(layers[-1])(config, config.num_hidden_layers - 1)
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = 0  # its place in the cache
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
        self.lm_head = shared(target.get_output_embeddings().weight if head is None else head)
        self.rotary_emb = copy.deepcopy(rotary)

    def advance(self, embeds: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any) -> Tensor:
        out = self.layer(
            self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(features)], -1)),
            attention_mask=mask["full_attention"] if isinstance(mask, Mapping) else mask,
            position_embeddings=self.rotary_emb(embeds, position_ids),
            position_ids=position_ids,
            past_key_values=cache,
        )
        return self.norm(out[0] if isinstance(out, tuple) else out)

    def save(self, directory: Path | str) -> None:
        """Write Qwen's names (``mtp.fc.weight``, ``mtp.layers.0.*``, ..); embedding and head are the target's."""
        tensors = {}
        for key, tensor in self.state_dict().items():
            if key.startswith(("embed_tokens.", "lm_head.")):
                continue
            for new, own in _RENAMED.items():
                if not new.startswith("shared_head.") and key.startswith(own):
                    key = new + key.removeprefix(own)
            tensors[f"mtp.{key}"] = tensor
        config = {"model_type": self.config.model_type, "num_nextn_predict_layers": 1}
        write(directory, config, tensors)


def module_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the first module in a checkpoint, whole or separate, under `MtpHead`'s names; {} if there is none.

    DeepSeek's: ``model.layers.{L}.`` with ``enorm``, ``hnorm``, ``eh_proj``, ``shared_head.norm`` and, as copies of the
    target's, ``embed_tokens`` and ``shared_head.head``; the decoder layer's own keys lie beside them. Qwen's: ``mtp.``
    with ``pre_fc_norm_embedding``, ``pre_fc_norm_hidden``, ``fc``, ``norm`` and ``layers.0.*``.
    """
    if any(name.startswith("mtp.") for name in tensors):
        found = {name.removeprefix("mtp."): name for name in tensors if name.startswith("mtp.")}
    else:
        parts = [(match, name) for name in tensors if (match := _DEEPSEEK.fullmatch(name))]
        indices = [int(match[1]) for match, _ in parts if match[2] == "eh_proj.weight"]
        found = {match[2]: name for match, name in parts if indices and int(match[1]) == min(indices)}
    out = {}
    for key, name in found.items():
        if re.match(r"layers\.[1-9]", key) or key.endswith("rotary_emb.inv_freq"):
            continue
        for old, own in _RENAMED.items():
            if key.startswith(old):
                key = own + key.removeprefix(old)
                break
        out[key if key.startswith(_OWN) else f"layer.{key}"] = tensors[name]  # read now, and no other
    return out


class Mtp(FeatureDrafter):
    """Drafts a chain, a fixed tree or a dynamic tree with the target's module of multi-token prediction.

    ``model`` is the target's own checkpoint, if the module is in it, or a directory with the module alone; see
    `module_of` for the names. Of several modules the first is used, and nothing but its tensors is read. Experts are
    one tensor each, or stacked as the target's own; float8 with scales of blocks is unscaled.
    """

    name = "mtp"

    @classmethod
    def misconfigurations(cls, config: Any, heads: Checkpoint, target_model: Any) -> Iterator[Misconfiguration]:
        for name in ("fc.weight", "eh_proj.weight"):
            yield from swapped_inputs(heads, name)
        yield from other_embedding(heads)

    def load(self) -> MtpHead:
        checkpoint, target = self.context.load_heads(self.config.model), self.context.target_model
        tensors = module_of(checkpoint.tensors)
        if not tensors:
            raise checkpoint.refused(
                "there is no module of multi-token prediction in them: neither keys mtp.* nor model.layers.{L}.eh_proj"
            )
        tensors = unscaled(checkpoint, tensors)
        embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        shape = (self.context.vocab_size, embedding.shape[1])
        embed = table(checkpoint, tensors, "embed_tokens.weight", embedding, shape)
        head = MtpHead(target, embed, table(checkpoint, tensors, "lm_head.weight", output, shape))
        checkpoint.fill(
            head, stacked(checkpoint, tensors, head.state_dict()), shared=("embed_tokens.weight", "lm_head.weight")
        )
        return head
