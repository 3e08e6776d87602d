"""DFlash: a few layers on the target's features denoise a block of tokens in one pass.

J. Chen, Y. Liang, Z. Liu, "DFlash: Block Diffusion for Flash Speculative Decoding", 2026, arXiv:2602.06036. With g_t =
norm(fc([h_t of several layers])) of the committed tokens t < n, and the block x = [root, MASK, .., MASK] at
positions n, n + 1, ..,

    keys and values of every layer: W_k g_t, W_v g_t of the text, W_k norm(x), W_v norm(x) of the block,
    queries: of the block, each attends to the text and to the whole block,

    logits = W norm(out), W the target's head, e the target's embedding.

Position n + i of the block predicts its own token, i = 1, 2, ..; in heads that sample from the anchor (DeepSpec's),
position n + i predicts the next one, so the root's position drafts, too. The tokens of a block are not conditioned on
each other: their distributions are independent given the text. The authors draft greedily, which is `temperature: 0`.

DFlash 2 (Inco AI, Z Lab, 2026) adds two modules. A convolution over the block's last positions, before and after
attention and MLP, with a kernel of its base and a correction by the input y of that side's sublayer,

    c_i = sum_t (base_t + [W y_i]_t) * y_{i-t},   t < taps, within the block;

and a selector: of position i only the k most probable tokens are drafted, with the logits of token c after token b

    l_i[c] + sum_r (B[b] * W_h h_i)_r C[c]_r,   h the last layer's normed state,

so that a token depends on the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from crossdraft import MOST_LEVELS, DraftContext, Misconfiguration, Sequences, StrategyConfig, first_line, on_device
from crossdraft.heads import (
    HeadModule,
    Rotary,
    biased,
    check_head_config,
    decoder_layer,
    layer_config,
    layer_section,
    merged_config,
    renamed,
    shared,
    vocabulary,
    with_options,
)

from .blocks import BlockDrafter
from .config_keys import LAYOUTS

if TYPE_CHECKING:
    from crossdraft import Checkpoint

#: Key prefixes of DSpark's checkpoints.
DSPARK = ("markov_head.", "confidence_head.")
#: Those of DFlash 2's selector, and parts of the keys of its convolutions.
SELECTOR, CONVOLUTIONS = "candidate_selector.", ("attention_conv", "mlp_conv")


class BlockConvolution(nn.Module):
    """Grouped dynamic depthwise convolution over the positions of a block, before and after a sublayer.

    Args:
        size: H; ``taps``: positions that one reads, itself included; ``group_size``: channels with a common correction.
    """

    def __init__(self, size: int, taps: int, group_size: int):
        super().__init__()
        self.base_kernel = nn.Parameter(functional.pad(torch.ones(2, 1, size), (0, 0, 0, taps - 1)))  # identity
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group_size), bias=False)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute ``sublayer`` of ``x [B, block, H]`` between the two convolutions."""
        _, taps, size = self.base_kernel.shape
        corrections = self.kernel_projection(x).unflatten(-1, (2, taps, -1))
        group_size = size // corrections.shape[-1]
        kernels = self.base_kernel + corrections.repeat_interleave(group_size, -1)  # [B, block, 2, taps, H]
        return self._convolve(sublayer(self._convolve(x, kernels[:, :, 0])), kernels[:, :, 1])

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        n = x.shape[1]
        shifted = [functional.pad(x, (0, 0, tap, 0))[:, :n] for tap in range(kernel.shape[2])]
        return (kernel * torch.stack(shifted, 2)).sum(2)


class CandidateSelector(nn.Module):
    """Logits of the most probable tokens of a position, given the token before it.

    Args:
        vocab_size: V; ``rank``: r; ``size``: H; ``top_k``: number of these tokens.
    """

    def __init__(self, vocab_size: int, rank: int, size: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def forward(self, logits: Tensor, token: Tensor, state: Tensor) -> Tensor:
        """``[B, V]``: ``logits [B, V]`` after ``token [B]``, given the ``state [B, H]``; -inf for other tokens."""
        unary, candidates = logits.topk(min(self.top_k, logits.shape[-1]))
        context = self.predecessor_codebook[token] * self.hidden_projection(state)
        transition = (self.successor_codebook[candidates] @ context[..., None]).squeeze(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, candidates, unary + transition.to(unary.dtype))


class LayerAttention(NamedTuple):
    """Attention of a layer.

    Attributes:
        window: number of positions that one attends to, itself included; None = the whole text.
        causal: a position of a block attends to those before it only (JetSpec, and sliding layers by default).
    """

    window: int | None = None
    causal: bool = False


@dataclass
class BlockOutput:
    """Output of a pass over a block: ``logits [B, S, Vd]`` of its S drafts, and the last layer's normed ``states``."""

    logits: Tensor | None
    states: Tensor

    @property
    def hidden_states(self) -> tuple[Tensor]:
        return (self.states,)


class DFlashHead(HeadModule):
    """The drafter of DFlash as a plain module.

    Args:
        config: config of the decoder layers, from `make_config`.
        embedding: ``[V, H]``, not copied (usually the target's) and frozen; ``scale``: the target's embedding scale.
        feature_size: width of the concatenated features, L x Ht.
        head: ``[Vd, H]``, not copied.
        target_ids: ``[Vd]`` int64, the target's id of each row of the head; ``None`` = identical ids.
        block_size: tokens of a block, including the root.
        mask_token: id of the mask token.
        from_anchor: the root's position drafts, too.
        attention: of each layer, see `LayerAttention`; default: to the whole text and block.
        mask_embedding: the mask token has an embedding of its own.
        logit_scale: factor of the logits.
        fc_bias: ``fc`` has a bias; ``biased``: names of the projections with a bias.
        convolution: taps and group size of DFlash 2's convolutions; ``selector``: rank and top k of its selector.
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
        attention: Sequence[LayerAttention] = (),
        mask_embedding: bool = False,
        scale: float = 1.0,
        logit_scale: float = 1.0,
        fc_bias: bool = False,
        biased: frozenset[str] = frozenset(),
        convolution: tuple[int, int] | None = None,
        selector: tuple[int, int] | None = None,
    ):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        size, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.scale = config, scale
        self.block_size, self.mask_token = block_size, mask_token
        self.from_anchor = from_anchor
        self.attention = tuple(attention) or (LayerAttention(),) * config.num_hidden_layers
        self.mask_embedding = nn.Parameter(torch.zeros(size), requires_grad=False) if mask_embedding else None
        self.embed_tokens = nn.Embedding(len(embedding), size, _weight=embedding, _freeze=True)
        self.fc = nn.Linear(feature_size, size, bias=fc_bias)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.layers = nn.ModuleList(decoder_layer(config, i, biased=biased) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = shared(head, logit_scale)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.rotary_emb = Rotary(config)
        for layer, name in product(self.layers, CONVOLUTIONS):
            setattr(layer, name, BlockConvolution(size, *convolution) if convolution else None)
        self.candidate_selector = (
            CandidateSelector(len(embedding), selector[0], size, selector[1]) if selector else None
        )

    def fuse(self, hidden: Tensor) -> Tensor:
        """Compute features ``[.., H]`` from ``hidden [.., L, Ht]``, the target's hidden states of L layers."""
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
        """Feed features, followed by a block.

        Args:
            input_ids: ``[B, W]``; only the block's tokens are read.
            features: ``[B, W, H]``, fused; only those before the block are read.
            position_ids: ``[B, W]``.
            past_key_values: a transformers cache.
            attention_mask: additive ``[B, 1, W, keys]``, causal; in layers that are not causal, the row of the block's
                last position is used for all.
            first: ``[B]``, index of the block's first position; ``None`` = no block, keys and values only.
        """
        cos, sin = self.rotary_emb(features, position_ids)
        layers: Any = self.layers
        if first is None:
            for i, layer in enumerate(layers):
                self._keys(layer.self_attn, i, features, cos, sin, past_key_values)
            return BlockOutput(None, features)
        rows = torch.arange(len(first), device=first.device)[:, None]
        index = first[:, None] + torch.arange(self.block_size, device=first.device)
        assert attention_mask is not None
        keys_before = position_ids[rows, index][:, None, :, None] - torch.arange(
            attention_mask.shape[-1], device=index.device
        )

        def mask_of(kind: LayerAttention) -> Tensor:
            mask = attention_mask[rows, 0, index if kind.causal else index[:, -1:].expand_as(index)][:, None]
            hidden_keys = keys_before >= kind.window if kind.window else None
            return mask if hidden_keys is None else mask.masked_fill(hidden_keys, torch.finfo(mask.dtype).min)

        masks = {kind: mask_of(kind) for kind in set(self.attention)}
        block_ids = input_ids[rows, index]
        hidden = self.embed_tokens(block_ids)
        if self.mask_embedding is not None:
            hidden = torch.where((block_ids == self.mask_token)[..., None], self.mask_embedding, hidden)
        hidden = hidden * self.scale
        for i, layer in enumerate(layers):

            def attend(
                block: Tensor, attention: Any = layer.self_attn, i: int = i, mask: Any = masks[self.attention[i]]
            ) -> Tensor:
                x = features.scatter(1, index[..., None].expand_as(block), block)
                keys, values = self._keys(attention, i, x, cos, sin, past_key_values)
                queries = _heads(attention, "q", block, cos[rows, index], sin[rows, index])
                return attention.o_proj(self._attention(attention, queries, keys, values, mask))

            hidden = hidden + _convolved(layer.attention_conv, attend, layer.input_layernorm(hidden))
            hidden = hidden + _convolved(layer.mlp_conv, layer.mlp, layer.post_attention_layernorm(hidden))
        states = self.norm(hidden if self.from_anchor else hidden[:, 1:])
        return BlockOutput(self.lm_head(states), states)

    def _keys(
        self, attention: Any, layer: int, x: Tensor, cos: Tensor, sin: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute keys and values of ``x [B, W, H]`` and append them to the cache; return all of them."""
        values = attention.v_proj(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        return cache.update(_heads(attention, "k", x, cos, sin), values, layer)

    def _attention(self, attention: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention output ``[B, block, heads x dim]``, by transformers' attention function of the config."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = function(attention, queries, keys, values, mask, dropout=0.0, scaling=attention.scaling)
        return out.flatten(2)


def _convolved(convolution: BlockConvolution | None, sublayer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return sublayer(x) if convolution is None else convolution(x, sublayer)


def _heads(attention: Any, kind: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries (``q``) or keys (``k``) ``[B, heads, W, dim]``, rotated, after the layer's norm if it has one."""
    from transformers.models.llama.modeling_llama import rotate_half

    heads = getattr(attention, f"{kind}_proj")(x).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{kind}_norm", None)
    heads = (heads if norm is None else norm(heads)).transpose(1, 2)
    return heads * cos[:, None] + rotate_half(heads) * sin[:, None]


class DFlash(BlockDrafter):
    """Drafts a chain: the tokens of one block, drawn independently, or each after the previous one (DFlash 2).

    Checkpoints: the authors' (``z-lab/*-DFlash``, and ``*-DFlash2``), DeepSpec's and those of vllm-project/speculators.
    ``embed_tokens`` and ``lm_head`` default to the target's.
    """

    name = "dflash"
    layout = LAYOUTS["dflash"]

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        if self.head.candidate_selector is not None:
            self.lm.hidden_layers = (-1,)  # input of the selector

    @classmethod
    def misconfigurations(cls, config: Any, heads: Checkpoint, target_model: Any) -> Iterator[Misconfiguration]:
        causal = _causal(heads)
        yield Misconfiguration(
            f"positions of a block attend to {'the whole block' if causal else 'those before them only'}",
            f"write is_causal: {str(not causal).lower()} into the heads' config.json",
            change=lambda heads: with_options(heads, is_causal=not causal),
        )
        drafts = not _from_anchor(heads, heads.tensors)
        yield Misconfiguration(
            f"the root's position {'drafts, too' if drafts else 'does not draft'}",
            f"write sample_from_anchor: {str(drafts).lower()} into the heads' config.json",
            change=lambda heads: with_options(heads, sample_from_anchor=drafts),
        )

    def load(self, checkpoint: Checkpoint) -> DFlashHead:
        check_head_config(checkpoint, self.name, self.layout)
        tensors = renamed(checkpoint)
        options = backbone(checkpoint, tensors, self.context.target_model, self.config.layers)
        options |= _dflash2(checkpoint, tensors, options)
        head = DFlashHead(**options)
        checkpoint.fill(head, tensors, shared=("embed_tokens.weight", "lm_head.weight"))
        return head

    def next_logits(self, logits: Tensor, states: Tensor | None) -> Callable[[Tensor], Tensor]:
        selector = self.head.candidate_selector
        if selector is None:
            return super().next_logits(logits, states)
        assert states is not None
        rows = iter(zip(logits.unbind(1), states.unbind(1), strict=True))

        def selected(token: Tensor) -> Tensor:
            row, state = next(rows)
            return selector(row, token[:, 0], state)[:, None]

        return selected

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
    """Collect the arguments of `DFlashHead` for a checkpoint; removes embedding and head from its ``tensors``.

    Raises:
        ModelError: sizes or options are missing or not supported, or ``layers`` is not given.
    """
    config = layer_config(checkpoint, tensors)
    mask_token = _number(checkpoint, "mask_token_id", 0, target.get_input_embeddings().weight.shape[0] - 1)
    mask_embedding = _mask_embedding(checkpoint, tensors, mask_token, config.hidden_size)
    tables = vocabulary(checkpoint, tensors, target, config.hidden_size)
    layers = check_layers(checkpoint, target, layers, config.num_hidden_layers)
    # Some targets scale their embedding; heads that share it need the same scale.
    scale = 1.0 if tables.own else float(getattr(target.get_input_embeddings(), "embed_scale", 1.0))
    return {
        "config": config,
        "embedding": tables.embedding,
        "feature_size": len(layers) * target.config.get_text_config().hidden_size,
        "head": tables.head,
        "target_ids": tables.ids,
        "block_size": _number(checkpoint, "block_size", 2, MOST_LEVELS),
        "mask_token": mask_token,
        "mask_embedding": mask_embedding,
        "from_anchor": _from_anchor(checkpoint, tensors),
        "attention": _attention(checkpoint, config),
        "scale": scale * float(merged_config(checkpoint).get("input_embedding_scale") or 1),
        "logit_scale": tables.scale,
        "fc_bias": "fc.bias" in tensors,
        "biased": biased(tensors),
    }


def _attention(checkpoint: Checkpoint, config: Any) -> list[LayerAttention]:
    """Attention of each layer, by ``layer_types`` or ``use_swa``, as serving engines read them; resets ``config``.

    Sliding layers are causal unless a key decides otherwise; ``use_swa`` makes all layers slide if none does.

    Raises:
        ModelError: another type of layer, or a window that is missing or, in layers that are not causal, is shorter
            than a block.
    """
    settings, count = merged_config(checkpoint), config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    if other := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise checkpoint.refused(f"they have layers of type {', '.join(other)}, which are not supported")
    sliding = [kind == "sliding_attention" for kind in kinds]
    causal = _flag(checkpoint, "is_causal", "causal")
    sliding_causal = not _flag(checkpoint, "sliding_window_non_causal")
    causal = [one and sliding_causal if causal is None else causal for one in sliding]
    if _flag(checkpoint, "use_swa") and not any(sliding):
        sliding = [True] * count
    window = settings.get("swa_window_size")
    window = layer_section(checkpoint).get("sliding_window") if window is None else window
    if window and not any(sliding) and not getattr(config, "layer_types", None):
        raise checkpoint.refused("config.json has a sliding_window, but neither layer_types nor use_swa")
    both_ways = any(slides and not one for slides, one in zip(sliding, causal, strict=True))
    minimum = 1 if not both_ways else _number(checkpoint, "block_size", 2, MOST_LEVELS)
    if any(sliding) and (type(window) is not int or window < minimum):
        raise checkpoint.refused(
            f"config.json has {window!r:.80} for the window of sliding layers; it must be at least {minimum}"
        )
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * count  # the head computes its own masks
    config.sliding_window = None
    return [LayerAttention(window if slides else None, one) for slides, one in zip(sliding, causal, strict=True)]


def _mask_embedding(checkpoint: Checkpoint, tensors: dict[str, Tensor], mask_token: int, size: int) -> bool:
    """True if the mask token has its own embedding, which is added to ``tensors`` from ``mask_embedding.pt``.

    Raises:
        ModelError: the file is damaged, of another token, or of another size.
    """
    file = checkpoint.path / "mask_embedding.pt"
    if "mask_embedding" not in tensors and file.is_file():
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of zipfile, struct, the disk, pickle
            raise checkpoint.refused(f"{file} is damaged or more than tensors: {first_line(error)}") from None
        embedding = state.get("embedding") if isinstance(state, dict) else state
        token = state.get("mask_token_id", mask_token) if isinstance(state, dict) else mask_token
        if token != mask_token or not isinstance(embedding, Tensor) or embedding.numel() != size:
            raise checkpoint.refused(f"{file} is not the embedding of {size} numbers of token {mask_token}")
        tensors["mask_embedding"] = embedding.reshape(-1)
    return "mask_embedding" in tensors


def _dflash2(checkpoint: Checkpoint, tensors: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `DFlashHead` for the modules of DFlash 2; empty for a DFlash checkpoint.

    Raises:
        ModelError: sizes are missing, or an option is not supported.
    """
    if not any(key.startswith(SELECTOR) for key in tensors):
        return {}
    size, vocab = options["config"].hidden_size, len(options["embedding"])
    taps = _number(checkpoint, "conv_kernel_size", 1, options["block_size"])
    group_size = _number(checkpoint, "conv_group_size", 1, size)
    if size % group_size:
        raise checkpoint.refused(f"conv_group_size is {group_size}, which does not divide the hidden size, {size}")
    if options["target_ids"] is not None:
        raise checkpoint.refused("a candidate_selector is not supported with a vocabulary of its own (d2t)")
    selector = _number(checkpoint, "selector_rank", 1, size), _number(checkpoint, "selector_top_k", 1, vocab)
    return {"convolution": (taps, group_size), "selector": selector}


def _number(checkpoint: Checkpoint, key: str, minimum: int, maximum: int) -> int:
    value = merged_config(checkpoint).get(key)
    if type(value) is not int or not minimum <= value <= maximum:
        fault = "config.json lacks" if value is None else f"config.json has {value!r:.80} for"
        raise checkpoint.refused(f"{fault} {key}, a whole number from {minimum} to {maximum}")
    return value


def _flag(checkpoint: Checkpoint, *keys: str) -> bool | None:
    """The first of the options that the config sets. Raises ModelError if it is neither true nor false."""
    settings = merged_config(checkpoint)
    key = next((key for key in keys if settings.get(key) is not None), None)
    if key is not None and type(settings[key]) is not bool:
        raise checkpoint.refused(f"config.json has {settings[key]!r:.80} for {key}, which is neither true nor false")
    return None if key is None else settings[key]


def _from_anchor(checkpoint: Checkpoint, tensors: Iterable[str]) -> bool:
    """True if the root's position drafts. In DeepSpec's heads it does, which only their class name shows."""
    value = _flag(checkpoint, "sample_from_anchor", "shift_label")  # speculators', SpecForge's
    if value is not None:
        return value
    classes = str(checkpoint.config.get("architectures"))
    return "DSpark" in classes or any(key.startswith(DSPARK) for key in tensors)


def _causal(checkpoint: Checkpoint) -> bool:
    """True if blocks are causal, as in JetSpec. The precedence of the keys is that of serving engines."""
    return bool(_flag(checkpoint, "is_causal", "causal"))


def check_layers(checkpoint: Checkpoint, target: Any, layers: tuple[int, ...] | None, drafting: int) -> tuple[int, ...]:
    """Return ``layers``, the hidden states of the target that the heads read, after checks.

    Raises:
        ModelError: ``layers`` is not given or not valid; the message has the value of the config, or the authors'
            default for a head of ``drafting`` layers.
    """
    depth = target.config.get_text_config().num_hidden_layers
    if layers is None:
        named = named_layers(checkpoint, depth)
        advice = f"write layers: {named}"
        if named is None:
            advice = (
                "their config.json lacks target_layer_ids, which would name them, and trainers have different "
                f"defaults; see their documentation. DFlash's authors would take layers: {_default(depth, drafting)}"
            )
        raise checkpoint.refused(
            f"the option layers is missing, the hidden states of the target that they read; {advice}"
        )
    if invalid := [i for i in layers if not -depth - 1 <= i <= depth]:
        raise checkpoint.refused(
            f"layers has {invalid}, but the target has hidden states 0 to {depth}; name some of these"
        )
    return layers


def named_layers(checkpoint: Checkpoint, depth: int) -> list[int] | None:
    """Hidden states that the heads read by their config, in the numbering of `BlockConfig.layers`; None if it has none.

    ``aux_hidden_state_layer_ids`` (speculators) has this numbering; ``target_layer_ids`` (the authors, DeepSpec) number
    outputs of layers, -1 = the embedding.
    """
    settings = merged_config(checkpoint)
    for key, offset in (("aux_hidden_state_layer_ids", 0), ("target_layer_ids", 1)):
        ids = settings.get(key)
        if ids is None:
            continue
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i + offset <= depth for i in ids):
            raise checkpoint.refused(f"config.json has {ids!r:.80} for {key}, which are not layers of this target")
        return [i + offset for i in ids]
    return None


def _default(depth: int, drafting: int) -> list[int]:
    """The authors' default: one hidden state per layer of the head, evenly from 1 to ``depth`` - 3."""
    if drafting == 1:
        return [depth // 2 + 1]
    return [round(1 + i * (depth - 4) / (drafting - 1)) + 1 for i in range(drafting)]
