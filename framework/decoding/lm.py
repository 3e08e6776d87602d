"""Any transformers causal language model behind the :class:`~crossdraft.framework.lm.LM` protocol.

It grows token trees over a ragged cache with explicit 4-D masks and position ids: a query sees its row's
committed tokens and, among the speculative nodes, itself and its ancestors; its position is its depth. The
masks are additive floats, the one form that every attention implementation reads the same way.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ModelError
from ..lm import LM
from .cpu import speed_up_small_batches
from .kvcache import Placement, RaggedCache

#: Layers whose cache is keys and values by position, so that a rejected token can be forgotten.
_ROLLBACK_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
#: Longest piece of a prompt that one prefill pass feeds, in tokens: bounds the mask's memory.
PREFILL_CHUNK = 1024


def refuse_unsupported(model: Any) -> None:
    """Raise ModelError, naming the reason, for a model that this decoder would run wrongly."""
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; crossdraft decodes decoder-only causal models")
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    recurrent = sorted(kinds - _ROLLBACK_LAYERS)
    if recurrent or getattr(model, "_is_stateful", False):
        what = f"layers of type {', '.join(recurrent)}" if recurrent else "recurrent layers"
        raise ModelError(
            f"{name} has {what}: their state cannot be rolled back when a draft is rejected, so speculative decoding "
            "would silently continue from rejected tokens; use a model whose layers are all attention"
        )
    if "chunked_attention" in kinds:
        raise ModelError(f"{name} uses chunked attention, whose mask crossdraft does not build; use another model")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"{name} takes no position_ids (its positions follow from the padding mask), so rows of different "
            "length cannot share a batch; use a model with explicit positions"
        )


class TransformersLM:
    """B slots of a transformers causal LM; see :class:`~crossdraft.framework.lm.LM` for the protocol.

    Args:
        model: a loaded ``*ForCausalLM``; put in eval mode, and on a CPU in float32 its linear layers get a faster
            product for few rows (see ``cpu.py``).
        batch_size: number of slots.
        max_length: longest sequence a slot will hold, speculative nodes included, in tokens.
        hidden_layers: layers whose hidden states ``grow`` and ``begin`` return, see `DraftTraits.hidden_layers`.

    ``begin`` and ``grow`` hand further inputs by name to the model, for drafting heads that read more than tokens.
    """

    def __init__(self, model: Any, batch_size: int, max_length: int, hidden_layers: Sequence[float] = ()):
        refuse_unsupported(model)
        self.model = model.eval()
        if model.device.type == "cpu" and model.dtype == torch.float32:
            speed_up_small_batches(model)
        self.batch_size, self.max_length = batch_size, max_length
        config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.device: torch.device = model.device
        self.lengths = [0] * batch_size
        self.passes = 0
        self.hidden_layers = tuple(hidden_layers)
        self.cache = RaggedCache(batch_size, max_length)
        self._grown = 0  # speculative nodes of every row
        self._tree: Tensor | None = None  # [B, grown, grown] bool, node i descends from (or is) node j
        self._window: int | None = getattr(config, "sliding_window", None)
        self._layer_types = set(getattr(config, "layer_types", None) or ())
        if self._layer_types and "sliding_attention" not in self._layer_types:
            self._window = None
        if getattr(config, "use_sliding_window", True) is False:
            self._window = None
        self._keep_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    # -- protocol ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, row: int, prompt: Sequence[int], **inputs: Tensor) -> Tensor | None:
        """Each prompt is prefilled by itself, so its keys and values do not depend on its neighbours.

        ``inputs``: ``[len(prompt) - 1, ..]`` each, of all prompt tokens but the last.
        """
        self.lengths[row] = 0
        rows = torch.tensor([row], device=self.device)
        hidden = []
        body = torch.tensor([list(prompt[:-1])], dtype=torch.long, device=self.device)
        for start in range(0, body.shape[1], PREFILL_CHUNK):
            piece = body[:, start : start + PREFILL_CHUNK]
            slots = torch.arange(start, start + piece.shape[1], device=self.device)[None]
            reach = start + piece.shape[1]
            allowed = torch.arange(reach, device=self.device) <= slots[..., None]
            here = {name: value[None, start:reach] for name, value in inputs.items()}
            _, states = self._forward(
                piece, Placement(rows, slots, None, reach), slots, allowed, slots, here, want_logits=False
            )
            if states is not None:
                hidden.append(states)
        self.lengths[row] = body.shape[1]
        return torch.cat(hidden, 1)[0] if hidden else None

    @torch.inference_mode()
    def grow(self, tokens: Tensor, parents: Tensor | None = None, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        width = tokens.shape[1]
        first, total = self._grown, self._grown + width
        longest = max(self.lengths)
        if longest + total > self.max_length:
            raise ModelError(
                f"a sequence of {longest} tokens and {total} drafted ones exceed max_length {self.max_length}"
            )
        same = min(self.lengths) == longest
        committed = torch.tensor(self.lengths, device=self.device)[:, None]
        order = torch.arange(first, total, device=self.device)
        slots = committed + order
        reach = longest + total
        column = torch.arange(reach, device=self.device)
        if parents is None and self._tree is None:
            allowed, key_positions, positions = column <= slots[..., None], None, slots
        else:
            tree = self._extend_tree(width, parents)
            depth = tree.sum(-1)  # [B, total], 1 for the first speculative node
            relative = column - committed  # [B, reach], which speculative node a slot holds
            node = relative.clamp(0, total - 1)
            seen = tree[:, first:].gather(2, node[:, None].expand(-1, width, -1))
            speculative = (relative >= 0) & (relative < total)
            allowed = torch.where(speculative[:, None], seen, (relative < 0)[:, None])
            positions = committed + depth[:, first:] - 1
            key_positions = torch.where(speculative, committed + depth.gather(1, node) - 1, column)
        placement = Placement(None, slots, longest + first if same else None, reach)
        self._grown = total
        self.passes += 1
        logits, hidden = self._forward(tokens, placement, positions, allowed, key_positions, inputs)
        assert logits is not None
        return logits, hidden

    @torch.inference_mode()
    def keep(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        if path is not None and path.shape[1]:
            committed = torch.tensor(self.lengths, device=self.device)[:, None]
            target = committed + torch.arange(path.shape[1], device=self.device)
            self.cache.move(torch.where(path >= 0, committed + path, target), target)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._grown, self._tree = 0, None

    def retire(self, row: int) -> None:
        self.lengths[row] = 0

    # -- internals --------------------------------------------------------------------------------------

    def _extend_tree(self, width: int, parents: Tensor | None) -> Tensor:
        """The ancestor-or-self matrix ``[B, grown + width, grown + width]`` after adding ``width`` nodes."""
        first, total = self._grown, self._grown + width
        tree = torch.zeros(self.batch_size, total, total, dtype=torch.bool, device=self.device)
        if self._tree is not None:
            tree[:, :first, :first] = self._tree
        elif first:
            tree[:, :first, :first] = torch.ones(first, first, dtype=torch.bool, device=self.device).tril()
        rows = torch.arange(self.batch_size, device=self.device)
        for i in range(width):
            node = first + i
            if parents is None:
                inherited = tree[:, node - 1] if node else tree[:, node]
            else:
                parent = parents[:, i]
                inherited = tree[rows, parent.clamp(min=0)] & (parent >= 0)[:, None]
            tree[:, node] = inherited
            tree[:, node, node] = True
        self._tree = tree
        return tree

    def _forward(
        self,
        tokens: Tensor,
        placement: Placement,
        positions: Tensor,
        allowed: Tensor,
        key_positions: Tensor | None,
        inputs: Mapping[str, Any],
        want_logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """One pass: ``tokens [R, W]`` at ``positions [R, W]``, ``allowed [R, W, reach]`` bool."""
        self.cache.placement = placement
        position_ids = positions.expand_as(tokens)
        if self.context_length is not None:
            # Padding behind a row that ends with the context has no position there; nobody reads what it computes.
            position_ids = position_ids.clamp(max=self.context_length - 1)
        extra: dict[str, Any] = dict(inputs)
        if self.hidden_layers:
            # All of them: transformers numbered the layers of a selection differently in its earlier 5.x releases.
            extra["output_hidden_states"] = True
        if self._keep_logits and not want_logits:
            extra["logits_to_keep"] = 1  # 0 would mean all of them
        out = self.model(
            input_ids=tokens,
            attention_mask=self._masks(allowed, positions, key_positions),
            position_ids=position_ids,
            past_key_values=self.cache,
            use_cache=True,
            **extra,
        )
        hidden = None
        if self.hidden_layers:
            states = out.hidden_states
            wanted = [int(i * (len(states) - 1)) if isinstance(i, float) else i for i in self.hidden_layers]
            hidden = torch.stack([states[i] for i in wanted], 2)
        return (out.logits if want_logits else None), hidden

    def _masks(self, allowed: Tensor, positions: Tensor, key_positions: Tensor | None) -> Tensor | dict[str, Tensor]:
        """Additive masks ``[R, 1, W, reach]``; a dict by layer type for models that mix full and sliding layers."""
        full = self._additive(allowed)
        if self._window is None:
            return full
        if key_positions is None or key_positions.shape[-1] != allowed.shape[-1]:
            key_positions = torch.arange(allowed.shape[-1], device=allowed.device)[None]
        near = positions[..., None] - key_positions[:, None] < self._window
        sliding = self._additive(allowed & near)
        if not self._layer_types:
            return sliding
        return {"full_attention": full, "sliding_attention": sliding}

    def _additive(self, allowed: Tensor) -> Tensor:
        dtype = self.model.dtype
        zero = torch.zeros((), dtype=dtype, device=allowed.device)
        return torch.where(allowed, zero, torch.finfo(dtype).min)[:, None]


class FittedLM:
    """A drafting model whose logits are brought to the width of the target's.

    Tables are padded to round sizes, so that models with one tokenizer may differ in width. Ids that only the
    target has get logit -inf; ids that only the drafting model has are cut: the tokenizer knows none of them.
    """

    def __init__(self, lm: TransformersLM, vocab_size: int):
        self._lm, self._own, self.vocab_size = lm, lm.vocab_size, vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def begin(self, row: int, prompt: Sequence[int]) -> Tensor | None:
        return self._lm.begin(row, [min(token, self._own - 1) for token in prompt])

    def grow(self, tokens: Tensor, parents: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, hidden = self._lm.grow(tokens.clamp(max=self._own - 1), parents)
        extra = self.vocab_size - self._own
        if extra > 0:
            return functional.pad(logits, (0, extra), value=-math.inf), hidden
        return logits[..., : self.vocab_size], hidden


def fitted(lm: TransformersLM, vocab_size: int) -> LM:
    """``lm``, its logits brought to ``vocab_size`` if they are not that wide."""
    # FittedLM passes on what it does not define, which a type checker cannot see.
    return lm if lm.vocab_size == vocab_size else cast(LM, FittedLM(lm, vocab_size))
