"""DFlash: a few layers that read the target's features denoise a whole block of tokens in one pass.

J. Chen, Y. Liang, Z. Liu, "DFlash: Block Diffusion for Flash Speculative Decoding", 2026, arXiv:2602.06036. With g_t =
norm(fc([h_t of several layers])) of the tokens t < n that are committed, and the block x = [root, MASK, .., MASK] at
positions n, n + 1, ..,

    keys and values of every layer: W_k g_t, W_v g_t of the text, W_k norm(x), W_v norm(x) of the block,
    queries: of the block alone, each of which sees the text and the whole block,

    logits = W norm(out), W the target's head, e the target's embedding.

Position n + i of the block predicts the token that stands there, i = 1, 2, ..; in heads that sample from the anchor
(DeepSpec's) position n + i predicts the one after, so the root's own position drafts too. The tokens of a block are
told nothing of each other: their laws are independent given the text, and each is reported as it is. The authors draft
greedily, which is `temperature: 0`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ...framework.contracts.draft import Sequences, on_device
from ...framework.contracts.misconfiguration import Misconfiguration
from ...framework.util.limits import MOST_LEVELS
from .blocks import BlockDrafter
from .eagle_weights import biased, decoder_layer, layer_config, renamed, shared, table, target_ids
from .feature_head import Head
from .misconfigurations import draft_vocabulary, other_embedding, other_layers, rotary_bases

if TYPE_CHECKING:
    from ...framework.contracts.models import Checkpoint

#: What only DSpark's checkpoints hold.
DSPARK = ("markov_head.", "confidence_head.")


@dataclass
class BlockOutput:
    """What a pass over a block gives: ``logits [B, S, Vd]`` of its S drafts, and the last layer's normed ``states``."""

    logits: Tensor | None
    states: Tensor

    @property
    def hidden_states(self) -> tuple[Tensor]:
        return (self.states,)


class DFlashHead(Head):
    """The drafter of DFlash as a plain module.

    Args:
        config: of its decoder layers, of `make_config`; all of them attend over everything.
        embedding: ``[V, H]``, used as it is (the target's own, usually) and never trained; ``scale``: what the target
            multiplies it by.
        feature_size: width of the concatenated features, L x Ht.
        head: ``[Vd, H]``, used as it is.
        target_ids: ``[Vd]`` int64, the target's id of each row of the head; ``None`` = the same ids.
        block_size: tokens of a block, the root included.
        mask_token: the id that stands for a token to be drafted.
        from_anchor: the root's position drafts, too.
        fc_bias: ``fc`` has a bias; ``biased``: attention projections that have one.
    """

    def __init__(
        self,
        config: Any,
        embedding: Tensor,
        feature_size: int,
        *,
        head: Tensor,
        target_ids: Tensor | None = None,
        block_size: int,
        mask_token: int,
        from_anchor: bool = False,
        scale: float = 1.0,
        fc_bias: bool = False,
        biased: frozenset[str] = frozenset(),
    ):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

        size, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.scale = config, scale
        self.block_size, self.mask_token, self.from_anchor = block_size, mask_token, from_anchor
        self.embed_tokens = nn.Embedding(len(embedding), size, _weight=embedding, _freeze=True)
        self.fc = nn.Linear(feature_size, size, bias=fc_bias)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.layers = nn.ModuleList(decoder_layer(config, i, biased=biased) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = shared(head)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def fuse(self, hidden: Tensor) -> Tensor:
        """``hidden [.., L, Ht]``, the target's hidden states of the L layers asked for -> features ``[.., H]``."""
        return self.hidden_norm(self.fc(hidden.to(self.dtype).flatten(-2)))

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        attention_mask: Tensor | None = None,
        first: Tensor | None = None,
        **_: Any,
    ) -> BlockOutput:
        """Feed features, and a block behind them.

        Args:
            input_ids: ``[B, W]``, of which the block's tokens are read.
            features: ``[B, W, H]``, fused; what lies in the block or behind it is not read.
            position_ids: ``[B, W]``.
            past_key_values: a transformers cache.
            attention_mask: additive ``[B, 1, W, keys]``, causal: what the last position of a block may see, all see.
            first: ``[B]``, where in its row the block begins; ``None`` = there is none, keys and values are all.
        """
        cos, sin = self.rotary_emb(features, position_ids)
        layers: Any = self.layers
        if first is None:
            for i, layer in enumerate(layers):
                self._keys(layer.self_attn, i, features, cos, sin, past_key_values)
            return BlockOutput(None, features)
        rows = torch.arange(len(first), device=first.device)[:, None]
        place = first[:, None] + torch.arange(self.block_size, device=first.device)
        assert attention_mask is not None
        mask = attention_mask[rows[:, 0], :, place[:, -1]][:, :, None].expand(-1, -1, self.block_size, -1)
        hidden = self.embed_tokens(input_ids[rows, place]) * self.scale
        for i, layer in enumerate(layers):
            block = layer.input_layernorm(hidden)
            read = features.scatter(1, place[..., None].expand_as(block), block)
            keys, values = self._keys(layer.self_attn, i, read, cos, sin, past_key_values)
            queries = _heads(layer.self_attn, "q", block, cos[rows, place], sin[rows, place])
            attended = self._attention(layer.self_attn, queries, keys, values, mask)
            hidden = hidden + layer.self_attn.o_proj(attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        states = self.norm(hidden if self.from_anchor else hidden[:, 1:])
        return BlockOutput(self.lm_head(states), states)

    def _keys(
        self, attention: Any, index: int, read: Tensor, cos: Tensor, sin: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of what a layer reads ``[B, W, H]``, behind those in the cache."""
        values = attention.v_proj(read).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        return cache.update(_heads(attention, "k", read, cos, sin), values, index)

    def _attention(self, attention: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """``[B, block, heads x dim]``, by the function that transformers' own layers of this config call."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = function(attention, queries, keys, values, mask, dropout=0.0, scaling=attention.scaling)
        return out.flatten(2)


def _heads(attention: Any, kind: str, read: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries (``q``) or keys (``k``) ``[B, heads, W, dim]``, normed where the layer norms them, and rotated."""
    from transformers.models.llama.modeling_llama import rotate_half

    heads = getattr(attention, f"{kind}_proj")(read).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{kind}_norm", None)
    heads = (heads if norm is None else norm(heads)).transpose(1, 2)
    return heads * cos[:, None] + rotate_half(heads) * sin[:, None]


class DFlash(BlockDrafter):
    """Drafts a chain: the tokens of one block, drawn independently.

    Checkpoints: the authors' (``z-lab/*-DFlash``), DeepSpec's and those of vllm-project/speculators. ``embed_tokens``
    and ``lm_head`` are the target's where they are left out.
    """

    name = "dflash"

    @classmethod
    def misconfigurations(cls, config: Any, heads: Checkpoint, target_model: Any) -> Iterator[Misconfiguration]:
        yield from other_layers(config.layers or (), target_model.config.get_text_config().num_hidden_layers)
        yield from rotary_bases(heads, target_model)
        yield from draft_vocabulary(heads)
        yield from other_embedding(heads)
        drafts = not _from_anchor(heads, heads.tensors)
        yield Misconfiguration(
            f"the root's position {'drafts, too' if drafts else 'does not draft'}",
            f"write sample_from_anchor: {str(drafts).lower()} into the heads' config.json",
            change=lambda given: given.with_config(sample_from_anchor=drafts),
        )

    def load(self) -> DFlashHead:
        checkpoint = self.context.load_heads(self.config.model)
        tensors = renamed(checkpoint.tensors)
        if any(key.startswith(DSPARK) for key in tensors):
            raise checkpoint.refused("they are DSpark's (markov_head, confidence_head); take drafter 'dspark'")
        head = DFlashHead(**backbone(checkpoint, tensors, self.context.target_model, self.config.layers))
        checkpoint.fill(head, tensors, shared=("embed_tokens.weight", "lm_head.weight"))
        return head

    def block(self) -> int:
        return self.head.block_size - (not self.head.from_anchor)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self._pending[row] = []
        self.policy.start(row)
        features = self._no_features() if len(prompt) == 1 else self._features(hidden)
        self.lm.start(row, prompt, features=features)

    def feed(self, sequences: Sequences, features: list[Tensor], steps: int) -> tuple[Tensor, Tensor | None]:
        counts, block, mask = [len(row) for row in features], self.head.block_size, self.head.mask_token
        width = max(counts)
        tokens = [
            [*[0] * n, history[-1] if history else 0, *[mask] * (block - 1), *[0] * (width - n)]
            for n, history in zip(counts, sequences.history, strict=True)
        ]
        logits, states = self.lm.forward(
            on_device(tokens, sequences.device),
            features=functional.pad(pad_sequence(features, batch_first=True), (0, 0, 0, block)),
            first=on_device(counts, sequences.device),
        )
        self.lm.commit(counts)
        return logits, None if states is None else states[:, :, 0]


def backbone(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], target: Any, layers: tuple[int, ...] | None
) -> dict[str, Any]:
    """The arguments of `DFlashHead` for a checkpoint; takes embedding and head out of its ``tensors``.

    Raises:
        ModelError: sizes or options that are missing, or that no such head has; hidden states that it was not told.
    """
    config = layer_config(checkpoint, tensors)
    kinds = getattr(config, "layer_types", None) or ()
    if other := sorted(set(kinds) - {"full_attention"}):
        raise checkpoint.refused(f"they have layers of type {', '.join(other)}; only full_attention is read here")
    if not kinds and getattr(config, "sliding_window", None):
        raise checkpoint.refused("config.json names a sliding_window; only layers that attend over everything are read")
    source = target.get_input_embeddings()
    embedding, output = source.weight, target.get_output_embeddings().weight
    vocab, size = len(output), config.hidden_size
    ids = target_ids(checkpoint, tensors, vocab)
    own = "embed_tokens.weight" in tensors
    embed = table(checkpoint, tensors, "embed_tokens.weight", embedding, (vocab, size))
    head = table(checkpoint, tensors, "lm_head.weight", output, (vocab if ids is None else len(ids), size))
    read = check_layers(checkpoint, target, layers, config.num_hidden_layers)
    return {
        "config": config,
        "embedding": embed,
        "feature_size": len(read) * target.config.get_text_config().hidden_size,
        "head": head,
        "target_ids": ids,
        "block_size": _number(checkpoint, "block_size", 2, MOST_LEVELS),
        "mask_token": _number(checkpoint, "mask_token_id", 0, vocab - 1),
        "from_anchor": _from_anchor(checkpoint, tensors),
        # Some targets scale what their embedding says, and heads that borrow it read it so.
        "scale": 1.0 if own else float(getattr(source, "embed_scale", 1.0)),
        "fc_bias": "fc.bias" in tensors,
        "biased": biased(tensors),
    }


def settings_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the config says of the block: at the top or, in the authors' newer files, in ``dflash_config``."""
    nested = checkpoint.config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise checkpoint.refused(f"dflash_config is {nested!r:.80} in config.json; it is a mapping")
    return {**checkpoint.config, **nested}


def _number(checkpoint: Checkpoint, key: str, least: int, most: int) -> int:
    value = settings_of(checkpoint).get(key)
    if type(value) is not int or not least <= value <= most:
        what = "config.json lacks" if value is None else f"config.json says {value!r:.80} for"
        raise checkpoint.refused(f"{what} {key}, a whole number from {least} to {most}")
    return value


def _from_anchor(checkpoint: Checkpoint, tensors: Iterable[str]) -> bool:
    """Does the root's position draft? DeepSpec's heads do, its DFlash ones too, and say so by their class alone."""
    said = settings_of(checkpoint).get("sample_from_anchor")
    if said is not None:
        return bool(said)
    classes = str(checkpoint.config.get("architectures"))
    return "DSpark" in classes or any(key.startswith(DSPARK) for key in tensors)


def check_layers(checkpoint: Checkpoint, target: Any, layers: tuple[int, ...] | None, drafting: int) -> tuple[int, ...]:
    """The hidden states of the target that the heads are to be given: ``layers``, which has to be said.

    Raises:
        ModelError: it was not said; the sentence has what the config says, or follows from ``drafting`` layers.
    """
    depth = target.config.get_text_config().num_hidden_layers
    if layers is None:
        raise checkpoint.refused(
            f"which hidden states of the target they read has to be said; write layers: "
            f"{named_layers(checkpoint, depth, drafting)}"
        )
    if strange := [i for i in layers if not -depth - 1 <= i <= depth]:
        raise checkpoint.refused(f"layers {strange} are to be read, but the target has hidden states 0 to {depth}")
    return layers


def named_layers(checkpoint: Checkpoint, depth: int, drafting: int) -> list[int]:
    """The hidden states that the config says the heads read, as `BlockConfig.layers` counts them.

    ``aux_hidden_state_layer_ids`` (speculators) are these numbers; ``target_layer_ids`` (the authors, DeepSpec) name
    outputs of layers, -1 = the embedding. Where neither is there they are as many as layers, evenly from 1 to
    ``depth`` - 3, the authors' rule.
    """
    settings = settings_of(checkpoint)
    for key, by in (("aux_hidden_state_layer_ids", 0), ("target_layer_ids", 1)):
        found = settings.get(key)
        if found is None:
            continue
        if not isinstance(found, list) or not all(type(i) is int and 0 <= i + by <= depth for i in found):
            raise checkpoint.refused(f"config.json says {found!r:.80} for {key}, which are no layers of this target")
        return [i + by for i in found]
    if drafting == 1:
        return [depth // 2 + 1]
    return [round(1 + i * (depth - 4) / (drafting - 1)) + 1 for i in range(drafting)]
