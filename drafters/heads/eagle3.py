"""EAGLE-3: an autoregressive head of one decoder layer on features of three of the target's layers.

Y. Li, F. Wei, C. Zhang, H. Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025, section 3. With g_t = fc([low_t; middle_t; high_t]) and e the token embedding,

    o_{t+1} = Layer([norm(e(x_{t+1})); norm(g_t)]) + residual g_t,   logits = W norm(o_{t+1}),

and the head's own output replaces the target's features for drafted tokens: g_{t+1} = o_{t+1}. W may cover only the
most frequent tokens; q is 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from ...framework.contracts.models import Checkpoint
from ...framework.util.cache_argument import cache_argument
from .config_keys import FEEDS_NORMED, LAYOUTS, check_head_config, remark
from .eagle_weights import (
    biased,
    config_json,
    decoder_layer,
    layer_config,
    merged_config,
    renamed,
    save_head_files,
    shared,
    vocabulary,
)
from .feature_head import FeatureHead
from .features import FeatureDrafter, HeadConfig
from .rotary import Rotary, by_halves

#: Low, middle and high features, as the authors count them: the inputs of layers 2, L // 2 and L - 3.
LAYERS = (2, 0.5, -4)


class Eagle3Head(FeatureHead):
    """The head of EAGLE-3 as a plain module; ``forward`` is :meth:`FeatureHead.forward`.

    Args:
        config: config of the decoder layers, from :func:`~crossdraft.drafters.heads.eagle_weights.make_config`.
        embedding: ``[V, H]``, not copied (usually the target's) and frozen.
        feature_size: width of the concatenated features, L x Ht.
        head: ``[Vd, H]``, not copied; ``None`` = a new one, with a row per id of ``target_ids``, or V rows.
        target_ids: ``[Vd]`` int64, the target's id of each row of the head; ``None`` = identical ids.
        norm_before_residual: the residual of the first layer is the normed feature.
        norm_before_fc: one norm over the concatenated features; ``fc_norm``: number of norms, one per layer.
        feed_normed: the normed output is fed back.
        head_norm: the last norm is applied before the head.
        fc: the features are projected; False = they are the target's last hidden state as it is.
        fc_bias: ``fc`` has a bias.
        logit_scale: factor of the logits.
        biased: names of the projections with a bias.
    """

    def __init__(
        self,
        config: Any,
        embedding: Tensor,
        feature_size: int,
        *,
        head: Tensor | None = None,
        target_ids: Tensor | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: int = 0,
        feed_normed: bool = False,
        head_norm: bool = True,
        fc: bool = True,
        fc_bias: bool = False,
        logit_scale: float = 1.0,
        biased: frozenset[str] = frozenset(),
    ):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.feed_normed, self.head_norm = feed_normed, head_norm
        rows = len(embedding) if target_ids is None else len(target_ids)
        self.embed_tokens = nn.Embedding(len(embedding), size, _weight=embedding, _freeze=True)
        self.input_norm = LlamaRMSNorm(feature_size, eps) if norm_before_fc else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(feature_size // fc_norm, eps) for _ in range(fc_norm))
        self.fc: Any = nn.Linear(feature_size, size, bias=fc_bias) if fc else nn.Identity()
        self.layers = nn.ModuleList(
            decoder_layer(config, i, biased=biased, width=None if i else 2 * size)
            for i in range(config.num_hidden_layers)
        )
        first: Any = self.layers[0]
        first.__class__ = _pair_layer(type(first))
        first.hidden_norm, first.norm_before_residual = LlamaRMSNorm(size, eps), norm_before_residual
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, rows, bias=False) if head is None else shared(head, logit_scale)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.rotary_emb = Rotary(config)

    def fuse(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.dtype)
        if len(self.fc_norm):
            hidden = torch.stack([norm(hidden[..., i, :]) for i, norm in enumerate(self.fc_norm)], -2)
        hidden = hidden.flatten(-2)
        return self.fc(hidden if self.input_norm is None else self.input_norm(hidden))

    def recurrent(self, out: Tensor) -> Tensor:
        return self.norm(out) if self.feed_normed else out

    def head_input(self, out: Tensor) -> Tensor:
        return self.norm(out) if self.head_norm else out

    def save(self, directory: Path | str, *, layers: tuple[int, ...] | None = None) -> None:
        """Write the authors' layout: ``midlayer.*``, ``d2t`` and ``t2d``, without the embedding.

        Args:
            layers: the hidden states it was trained on, if not 2, L // 2 and L - 3; written as "input of layer i".

        Raises:
            ValueError: the layout cannot represent the head: ``layers`` starts with 1 (read as "output of layer 1"),
                or `feed_normed`.
        """
        if layers and layers[0] == 1:
            raise ValueError(
                "layers cannot start with 1: in this layout 1 means the output of layer 1, which is hidden state 2"
            )
        if self.feed_normed:
            raise ValueError("this layout cannot represent feed_normed, a normed output that is fed back")
        rows, vocab = len(self.lm_head.weight), len(self.embed_tokens.weight)
        own = {key: tensor for key, tensor in self.state_dict().items() if key != "embed_tokens.weight"}
        own = by_halves(self.config, own, interleaved=False, back=True)
        tensors = {key.replace("layers.0.", "midlayer.", 1): tensor for key, tensor in own.items()}
        if self.target_ids is not None:
            ids = self.target_ids.cpu()
            tensors["d2t"] = ids - torch.arange(rows)
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        more: dict[str, Any] = {"vocab_size": vocab, "draft_vocab_size": rows}
        if self.layers[0].norm_before_residual:
            more["norm_before_residual"] = True
        if not self.head_norm:
            more["norm_output"] = False
        if not isinstance(self.fc, nn.Linear):
            more["use_aux_hidden_state"] = False
        if getattr(self.lm_head, "scale", 1.0) != 1:
            more["logit_scale"] = self.lm_head.scale
        if layers:
            more["eagle_aux_hidden_state_layer_ids"] = list(layers)
        save_head_files(directory, config_json(self.config, "LlamaForCausalLMEagle3", **more), tensors)


@cache
def _pair_layer(kind: type[Any]) -> type[Any]:
    """Make the class of the first layer: a decoder layer on embeddings and features ``[B, W, 2 H]``."""

    class PairLayer(kind):
        def forward(self, pairs: Tensor, *, past_key_values: Any = None, **options: Any) -> Tensor:
            embeds, features = pairs.chunk(2, -1)
            normed = self.hidden_norm(features)
            options[cache_argument(self.self_attn.forward)] = past_key_values
            attended, _ = self.self_attn(torch.cat([self.input_layernorm(embeds), normed], -1), **options)
            out = (normed if self.norm_before_residual else features) + attended
            return out + self.mlp(self.post_attention_layernorm(out))

    return PairLayer


class Eagle3(FeatureDrafter):
    """Drafts a chain, a static tree or EAGLE-2's dynamic tree with an EAGLE-3 head.

    Checkpoints: the authors' (``midlayer.*``), SpecForge's, and those of vllm-project/speculators (``layers.0.*``).
    """

    name = "eagle3"
    layout = LAYOUTS["eagle3"]

    class Config(HeadConfig):
        layers: tuple[int, ...] | None = Field(
            None,
            description="the target's hidden states that the head reads (0 = embeddings, i = output of layer i, -1 = "
            "output of the final norm); default: 2, L // 2 and L - 3",
        )

    config: Config  # type: ignore[assignment]

    @classmethod
    def layers(cls, config: Any) -> tuple[float, ...]:
        return LAYERS if config.layers is None else config.layers

    def load(self, checkpoint: Checkpoint) -> Eagle3Head:
        return read_head(checkpoint, self.context.target_model, self.config.layers)


def read_head(
    checkpoint: Checkpoint, target: Any, layers: tuple[int, ...] | None = None, make: type[Eagle3Head] = Eagle3Head
) -> Eagle3Head:
    """Read the head of ``checkpoint``.

    Args:
        target: a causal LM of transformers; its embedding is used if the checkpoint has none.
        layers: the hidden states that the head reads, if not `LAYERS`.
        make: `Eagle3Head`, or a subclass, whose config keys the caller has checked.

    Raises:
        ModelError: not an EAGLE-3 head, names or shapes do not fit, or the head was trained on other hidden states.
    """
    if make is Eagle3Head:
        check_head_config(checkpoint, Eagle3.name, Eagle3.layout)
    tensors = renamed(checkpoint)
    config, settings = layer_config(checkpoint, tensors), merged_config(checkpoint)
    tables = vocabulary(checkpoint, tensors, target, config.hidden_size)
    width = _feature_size(checkpoint, target, layers)
    for key, name in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        if settings.get(key) and not any(tensor.startswith(name) for tensor in tensors):
            raise checkpoint.refused(f"config.json has {key}, but the tensors {name}* are missing")
    projected = settings.get("use_aux_hidden_state") is not False
    if not projected and width != config.hidden_size:
        raise checkpoint.refused(
            f"they read one hidden state of width {config.hidden_size} (use_aux_hidden_state is false), but layers "
            f"{list(layers or LAYERS)} of the target have width {width}; write layers: [-1]"
        )
    feed_normed, head_norm = _normed(checkpoint, tensors)
    head = make(
        config,
        tables.embedding,
        width,
        head=tables.head,
        target_ids=tables.ids,
        norm_before_residual=bool(settings.get("norm_before_residual", False)),
        norm_before_fc="input_norm.weight" in tensors,
        fc_norm=sum(key.startswith("fc_norm.") for key in tensors),
        feed_normed=feed_normed,
        head_norm=head_norm,
        fc=projected,
        fc_bias="fc.bias" in tensors,
        logit_scale=tables.scale,
        biased=biased(tensors),
    )
    checkpoint.fill(head, tensors, shared=("embed_tokens.weight", "lm_head.weight"))
    return head


def _normed(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> tuple[bool, bool]:
    """Read ``norm_output``: True if the normed output is fed back, and True if the output is normed before the head.

    The key has two meanings. In serving engines and in all trainers but SpecForge before 15 September 2026, true means
    that the normed output is fed back, as in EAGLE-3.1; the output is normed before the head in any case. In those
    earlier heads of SpecForge, false means that it is not normed there. A file of theirs has none of `FEEDS_NORMED`.
    """
    settings = merged_config(checkpoint)
    value, newer = settings.get("norm_output"), any(key in settings for key in FEEDS_NORMED)
    if value is not None and not newer:
        trained = "norm.weight" in tensors and not bool((tensors["norm.weight"] == 1).all())
        remark(
            checkpoint,
            f"norm_output is {str(value).lower()} in config.json, which meant "
            + ("that the head reads the normed output" if value else "that the head reads the output without its norm")
            + " in SpecForge before 2026-09-15, and since then "
            + ("that it is fed back normed" if value else "that it is fed back without its norm")
            + f"; read as {'the latter' if value else 'the former'}"
            + (", although its norm was trained" if trained and not value else "")
            + "; write fc_norm: false beside it for the meaning since then, or leave both out for EAGLE-3",
        )
    return bool(value), value is None or bool(value) or newer


def named_layers(checkpoint: Checkpoint) -> list[int] | None:
    """Hidden states of the checkpoint's config, in the numbering of `Config.layers`; None if it has none."""
    settings = merged_config(checkpoint)
    if settings.get("use_aux_hidden_state") is False:
        return [-1]
    ids = settings.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        return None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise checkpoint.refused(
            f"config.json has {ids!r:.80} for eagle_aux_hidden_state_layer_ids; it must be a list of layers"
        )
    # Ids number inputs of layers, which are hidden states, or, if they start with 1, outputs.
    outputs = ids[0] == 1 and "speculators_config" not in checkpoint.config
    return [i + 1 if outputs else i for i in ids]


def _resolved(layers: tuple[int, ...] | None, depth: int) -> list[int]:
    """Resolve ``layers`` (default: `LAYERS`) for a target of ``depth`` layers; 0 = its embedding, -1 = normed."""
    return [int(i * depth) if isinstance(i, float) else i if i == -1 else i % (depth + 1) for i in layers or LAYERS]


def _feature_size(checkpoint: Checkpoint, target: Any, layers: tuple[int, ...] | None) -> int:
    """L x Ht. Raises ModelError if ``layers`` is not given and the checkpoint was trained on other hidden states."""
    text = target.config.get_text_config()
    depth = text.num_hidden_layers
    used = _resolved(layers, depth)
    trained = named_layers(checkpoint)
    if trained and layers is None and trained != used:
        raise checkpoint.refused(
            f"they read the hidden states {trained} of the target, not {used}; write layers: {trained}"
        )
    return len(used) * text.hidden_size
