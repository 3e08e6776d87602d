"""EAGLE-3: a decoder layer that reads features of three of the target's layers drafts tokens.

Y. Li, F. Wei, C. Zhang, H. Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025, section 3. With g_t = fc([low_t; middle_t; high_t]) and e the token embedding,

    o_{t+1} = Layer([norm(e(x_{t+1})); norm(g_t)]) + residual g_t,   logits = W norm(o_{t+1}),

and where the target has not been, its place is taken by the head's own output: g_{t+1} = o_{t+1}. W may cover the most
frequent tokens alone; q is 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor, nn

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
    target_ids,
    write,
)
from .feature_head import FeatureHead
from .features import FeatureDrafter, HeadConfig
from .misconfigurations import draft_vocabulary, eagle3_norms, other_embedding, other_layers, rotary_bases

if TYPE_CHECKING:
    from ...framework.contracts.misconfiguration import Misconfiguration
    from ...framework.contracts.models import Checkpoint

#: Low, middle, high, as the authors count: the inputs of layers 2, L // 2 and L - 3.
LAYERS = (2, 0.5, -4)


class Eagle3Head(FeatureHead):
    """The head of EAGLE-3 as a plain module; ``forward`` is :meth:`FeatureHead.forward`.

    Args:
        config: of its decoder layers, from :func:`~crossdraft.drafters.heads.eagle_weights.make_config`.
        embedding: ``[V, H]``, used as it is (the target's own, usually) and never trained.
        feature_size: width of the concatenated features, L x Ht.
        head: ``[Vd, H]``, used as it is; ``None`` = a head of its own, with ``target_ids`` or V rows.
        target_ids: ``[Vd]`` int64, the target's id of each row of the head; ``None`` = the same ids.
        norm_before_residual: the residual of the first layer is the normed feature.
        norm_before_fc: one norm over the concatenated features; ``fc_norm``: one for each of so many layers.
        feed_normed: what is fed back is the output after the last norm.
        head_norm: the last norm comes before the head.
        fc_bias: ``fc`` has a bias.
        biased: attention projections that have a bias.
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
        fc_bias: bool = False,
        biased: frozenset[str] = frozenset(),
    ):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.norm_before_residual, self.feed_normed, self.head_norm = norm_before_residual, feed_normed, head_norm
        rows = len(embedding) if target_ids is None else len(target_ids)
        self.embed_tokens = nn.Embedding(len(embedding), size, _weight=embedding, _freeze=True)
        self.input_norm = LlamaRMSNorm(feature_size, eps) if norm_before_fc else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(feature_size // fc_norm, eps) for _ in range(fc_norm))
        self.fc = nn.Linear(feature_size, size, bias=fc_bias)
        self.layers = nn.ModuleList(
            decoder_layer(config, i, biased=biased, width=None if i else 2 * size)
            for i in range(config.num_hidden_layers)
        )
        self.layers[0].hidden_norm = LlamaRMSNorm(size, eps)
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, rows, bias=False) if head is None else shared(head)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def fuse(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.dtype)
        if len(self.fc_norm):
            hidden = torch.stack([norm(hidden[..., i, :]) for i, norm in enumerate(self.fc_norm)], -2)
        hidden = hidden.flatten(-2)
        return self.fc(hidden if self.input_norm is None else self.input_norm(hidden))

    def advance(self, embeds: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any) -> Tensor:
        rotary = self.rotary_emb(embeds, position_ids)
        options = {"position_embeddings": rotary, "position_ids": position_ids, "past_key_values": cache}
        first: Any = self.layers[0]
        normed = first.hidden_norm(features)
        pair = torch.cat([first.input_layernorm(embeds), normed], -1)
        attended, _ = first.self_attn(hidden_states=pair, attention_mask=mask_of(mask, self.config, 0), **options)
        out = (normed if self.norm_before_residual else features) + attended
        out = out + first.mlp(first.post_attention_layernorm(out))
        for i, layer in enumerate(self.layers[1:], 1):
            out = layer(out, attention_mask=mask_of(mask, self.config, i), **options)
        return out

    def recurrent(self, out: Tensor) -> Tensor:
        return self.norm(out) if self.feed_normed else out

    def head_input(self, out: Tensor) -> Tensor:
        return self.norm(out) if self.head_norm else out

    def save(self, directory: Path | str, *, layers: tuple[int, ...] | None = None) -> None:
        """Write the authors' layout: ``midlayer.*``, ``d2t`` and ``t2d``, the embedding left out.

        ``layers``: the hidden states it was trained on, if they are not 2, L // 2 and L - 3 (written as "inputs of
        layer i", which an id 1 in the first place would not mean).

        Raises:
            ValueError: something that this layout cannot say: ``layers`` that start with 1 (its readers take that for
                "output of layer 1"), or that the normed output is fed back.
        """
        if layers and layers[0] == 1:
            raise ValueError("layers cannot start with 1: in this layout that means the output of layer 1, which is 2")
        if self.feed_normed:
            raise ValueError("this layout cannot say that the normed output is fed back (feed_normed)")
        rows, vocab = len(self.lm_head.weight), len(self.embed_tokens.weight)
        tensors = {
            key.replace("layers.0.", "midlayer.", 1): tensor
            for key, tensor in self.state_dict().items()
            if key != "embed_tokens.weight"
        }
        if self.target_ids is not None:
            ids = self.target_ids.cpu()
            tensors["d2t"] = ids - torch.arange(rows)
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        more: dict[str, Any] = {"vocab_size": vocab, "draft_vocab_size": rows}
        if self.norm_before_residual:
            more["norm_before_residual"] = True
        if not self.head_norm:
            more["norm_output"] = False
        if layers:
            more["eagle_aux_hidden_state_layer_ids"] = list(layers)
        write(directory, config_json(self.config, "LlamaForCausalLMEagle3", **more), tensors)


class Eagle3(FeatureDrafter):
    """Drafts a chain, a fixed tree or EAGLE-2's dynamic tree with an EAGLE-3 head.

    Checkpoints: the authors' (``midlayer.*``), SpecForge's, and those of vllm-project/speculators (``layers.0.*``).
    """

    name = "eagle3"

    class Config(HeadConfig):
        layers: tuple[int, ...] | None = Field(
            None,
            description="the target's hidden states that the head reads (0 = embeddings, i = output of layer i); "
            "default: 2, L // 2 and L - 3",
        )

    config: Config  # type: ignore[assignment]

    @classmethod
    def layers(cls, config: Any) -> tuple[float, ...]:
        return LAYERS if config.layers is None else config.layers

    @classmethod
    def misconfigurations(cls, config: Any, heads: Checkpoint, target_model: Any) -> Iterator[Misconfiguration]:
        depth = target_model.config.get_text_config().num_hidden_layers
        yield from other_layers(_read(config.layers, depth), depth)
        yield from eagle3_norms(heads, len(_read(config.layers, depth)))
        yield from rotary_bases(heads, target_model)
        yield from draft_vocabulary(heads)
        yield from other_embedding(heads)

    def load(self) -> Eagle3Head:
        target = self.context.target_model
        return read_head(self.context.load_heads(self.config.model), target, self.config.layers)


def read_head(
    checkpoint: Checkpoint, target: Any, layers: tuple[int, ...] | None = None, make: type[Eagle3Head] = Eagle3Head
) -> Eagle3Head:
    """The head in ``checkpoint``.

    Args:
        target: a causal LM of transformers, whose embedding it takes if it has none.
        layers: the hidden states that it is to be given, if not `LAYERS`.
        make: `Eagle3Head`, or what is more than one.

    Raises:
        ModelError: no EAGLE-3 head, names or shapes that do not fit, or a head that was made for other hidden states.
    """
    raw, tensors = checkpoint.config, renamed(checkpoint.tensors)
    if not is_eagle3(tensors):
        raise checkpoint.refused("they are no EAGLE-3 heads: neither midlayer.hidden_norm nor layers.0.hidden_norm")
    if make is Eagle3Head and "mask_hidden" in tensors:
        raise checkpoint.refused("they are P-EAGLE's (mask_hidden); take drafter 'p-eagle'")
    config = layer_config(checkpoint, tensors)
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    size, vocab = config.hidden_size, len(output)
    ids = target_ids(checkpoint, tensors, vocab)
    rows = vocab if ids is None else len(ids)
    embed = table(checkpoint, tensors, "embed_tokens.weight", embedding, (vocab, size))
    output = table(checkpoint, tensors, "lm_head.weight", output, (rows, size))
    width = _feature_size(checkpoint, target, layers)
    for key, name in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        if raw.get(key) and not any(tensor.startswith(name) for tensor in tensors):
            raise checkpoint.refused(f"config.json says {key}, but there is no tensor {name}*")
    feed_normed, head_norm = _normed(raw)
    head = make(
        config,
        embed,
        width,
        head=output,
        target_ids=ids,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc="input_norm.weight" in tensors,
        fc_norm=sum(key.startswith("fc_norm.") for key in tensors),
        feed_normed=feed_normed,
        head_norm=head_norm,
        fc_bias="fc.bias" in tensors,
        biased=biased(tensors),
    )
    checkpoint.fill(head, tensors, shared=("embed_tokens.weight", "lm_head.weight"))
    return head


def _normed(config: dict[str, Any]) -> tuple[bool, bool]:
    """Is the normed output fed back, and is the output normed before the head? What ``norm_output`` says.

    One key, two meanings. In EAGLE-3.1, and wherever such heads are served, true is that the normed output is fed back;
    it is normed before the head in any case. SpecForge's earlier heads say false where it is not normed there. Those of
    EAGLE-3.1 name ``fc_norm`` beside it, and speculators' are EAGLE-3.1's.
    """
    said = config.get("norm_output")
    newer = "speculators_config" in config or "fc_norm" in config
    return bool(said), said is None or bool(said) or newer


def named_layers(checkpoint: Checkpoint) -> list[int] | None:
    """The hidden states that the config says the head reads, as `Config.layers` counts them; None = it does not say."""
    settings = {**checkpoint.config, **(checkpoint.config.get("eagle_config") or {})}
    named = settings.get("eagle_aux_hidden_state_layer_ids")
    if not named:
        return None
    # Ids are written as "input of layer i", which is hidden state i, or, starting with 1, as outputs.
    outputs = named[0] == 1 and "speculators_config" not in checkpoint.config
    return [i + 1 if outputs else i for i in named]


def _read(layers: tuple[int, ...] | None, depth: int) -> list[int]:
    """The hidden states of a target with ``depth`` layers, or `LAYERS`, counted from its embedding."""
    return [int(i * depth) if isinstance(i, float) else i % (depth + 1) for i in layers or LAYERS]


def _feature_size(checkpoint: Checkpoint, target: Any, layers: tuple[int, ...] | None) -> int:
    """L x Ht. Raises ModelError where the checkpoint names other hidden states and ``layers`` says nothing."""
    text = target.config.get_text_config()
    depth = text.num_hidden_layers
    read = _read(layers, depth)
    wanted = named_layers(checkpoint)
    if wanted and layers is None and wanted != read:
        raise checkpoint.refused(
            f"they read the hidden states {wanted} of the target, not {read}; write layers: {wanted}"
        )
    return len(read) * text.hidden_size
