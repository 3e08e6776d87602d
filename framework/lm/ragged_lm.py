"""Slots of a transformers causal language model: passes over a ragged cache, for a whole model or some of its layers.

They grow token trees over a ragged cache with explicit 4-D masks and position ids: a query sees its row's
committed tokens and, among the speculative nodes, itself and its ancestors; its position is its depth. The
masks are additive floats, the one form that every attention implementation reads the same way, but for FlexAttention.

What is launched on the device for a pass is one function of tensors, `RaggedLM._score`. On a CPU it is called
with the reach that the pass needs; on CUDA with the next of a few steps, so that few shapes come again and again and
graphs can replay them (``graphs.py``). Where shapes were recorded ahead, a pass is as wide as the next one that was.
What lies beyond a row's own nodes is masked either way.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from ..errors import ModelError
from ..models.placement import input_device
from ..util.tensors import descent, on_device
from .architectures import sliding_window, text_config
from .attention import own_attention
from .cuda_graphs import Outputs, ahead, runner_for
from .flex_attention import FLEX, block_mask
from .graph_buckets import at_width, reaches, stepped, wider, widths
from .kv_cache import Begun, Placement, RaggedCache
from .small_batch_linear import speed_up_small_batches

#: Longest piece of a prompt that one prefill pass feeds, in tokens: bounds the mask's memory.
PREFILL_CHUNK = 1024
#: Graphs attend over a multiple of so many slots (`stepped`), or over all of them. Also a mask whose rows PyTorch's
#: kernels take as they are: rows that are no multiple of 8 or 16 numbers they copy first.
BUCKET = 256
#: Passes over more tokens than this keep a GPU busy for longer than launching them takes.
MOST_GRAPHED = 4096
#: Whether transformers' hooks keep the hidden states of a selection of layers; releases before numbered it otherwise.
SELECTS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)


class RaggedLM:
    """B slots of a causal LM, all of :class:`~crossdraft.framework.contracts.lm.LM` but ``fork``.

    `TransformersLM` is a whole model, what `forks` has are some of its layers. ``start`` and ``forward`` hand further
    inputs by name to the model, for drafting heads that read more than tokens.
    """

    def _prepare(self, model: Any, batch_size: int, max_length: int) -> None:
        self.model = model.eval()
        speed_up_small_batches(model)
        self.batch_size, self.max_length = batch_size, max_length
        config = text_config(model)
        self._depth: int = getattr(config, "num_hidden_layers", 0)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.device: torch.device = input_device(model)
        self.lengths = [0] * batch_size
        self.passes = 0
        self.hidden_layers: tuple[float, ...] = ()
        self._begun: dict[int, Begun] = {}
        self.cache = RaggedCache(batch_size, max_length)
        self._run = runner_for(model)
        self._forks: WeakSet[Any] = WeakSet()  # they follow for as long as somebody drafts with them
        # What is added to the score of a slot that a query sees, and of one that it does not.
        dtype = model.dtype
        self._zero, self._lowest = torch.tensor([0.0, torch.finfo(dtype).min], dtype=dtype, device=self.device).unbind()
        self._columns = torch.arange(max_length, device=self.device)
        self._grown = 0  # speculative nodes of every row
        self._tree: Tensor | None = None  # [B, grown] int64, the parent of each of them; None = chains
        self._layer_types = set(getattr(config, "layer_types", None) or ())
        self._window = sliding_window(config)
        if self._layer_types and "sliding_attention" not in self._layer_types:
            self._window = None
        if getattr(config, "use_sliding_window", True) is False:
            self._window = None
        self._chunk: int | None = None
        if "chunked_attention" in self._layer_types:
            self._chunk = config.attention_chunk_size
        self._flex = getattr(config, "_attn_implementation", None) == FLEX
        self._keep_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    # -- protocol ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def start(self, row: int, prompt: Sequence[int], **inputs: Tensor) -> Tensor | None:
        """What was not prefilled before is fed here, by itself, so that it does not depend on its neighbours.

        ``inputs``: ``[len(prompt) - 1, ..]`` each, of all prompt tokens but the last.
        """
        self._feed(row, list(prompt[:-1]), inputs)
        hidden = self._begun.pop(row).hidden
        return torch.cat(hidden) if hidden else None

    @torch.inference_mode()
    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        if len(prompts) > 1:
            self._feed_together({row: list(tokens) for row, tokens in prompts.items() if tokens})
        else:
            for row, tokens in prompts.items():  # one
                self._feed(row, list(tokens), {})
        for fork in self._forks:  # what they draft must not lie on what was fed
            fork.follow()

    def _feed(self, row: int, tokens: list[int], inputs: Mapping[str, Tensor]) -> None:
        """Slot ``row`` is to hold ``tokens``: one pass for each piece that it does not hold yet."""
        self._grown, self._tree = 0, None  # an interrupted step may have left nodes
        fed = self._begun.get(row)
        if fed is None or inputs or fed.layers != self.hidden_layers or fed.tokens != tokens[: len(fed.tokens)]:
            fed = self._begun[row] = Begun(self.hidden_layers)
        self.lengths[row] = len(fed.tokens)
        body = on_device([tokens], self.device)
        for start in range(len(fed.tokens), len(tokens), PREFILL_CHUNK):
            piece = body[:, start : start + PREFILL_CHUNK]
            reach = start + piece.shape[1]
            slots = self._columns[None, start:reach]
            allowed = self._columns[:reach] <= slots[..., None]
            here = {name: value[None, start:reach] for name, value in inputs.items()}
            place = Placement(slots, reach, start, row)
            _, states = self._forward(piece, place, slots, allowed, slots, here, self.hidden_layers, want_logits=False)
            if states is not None:
                fed.hidden.append(states[0])
            fed.tokens = tokens[:reach]
            self.lengths[row] = reach

    def _feed_together(self, prompts: Mapping[int, list[int]]) -> None:
        """Slots are to hold these tokens: one pass, as wide as the longest of them."""
        self._grown, self._tree = 0, None
        if not prompts:
            return
        width = max(map(len, prompts.values()))
        # Padding, which nothing that counts sees, repeats the row's own last token: it is NaN only if the row is.
        padded = [[*tokens, *tokens[-1:] * (width - len(tokens))] for tokens in prompts.values()]
        fed, several = on_device(padded, self.device), on_device(list(prompts), self.device)
        slots = self._columns[None, :width]
        allowed = (slots[0] <= slots[..., None]).expand(len(prompts), -1, -1)
        place = Placement(slots, width, 0, several=several)
        _, states = self._forward(fed, place, slots, allowed, slots, {}, self.hidden_layers, want_logits=False)
        for i, (row, tokens) in enumerate(prompts.items()):
            hidden = [] if states is None else [states[i, : len(tokens)]]
            self._begun[row] = Begun(self.hidden_layers, tokens, hidden)
            self.lengths[row] = len(tokens)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, resume_from: Any = None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        plain = parents is None and not self._grown and not self.hidden_layers
        if plain and resume_from is not None and resume_from in self._forks:
            self._grown = tokens.shape[1]
            self.passes += 1
            return resume_from.finished(tokens), None
        logits, hidden = self._grow(tokens, parents, inputs)
        assert logits is not None
        return logits, hidden

    def _grow(
        self, tokens: Tensor, parents: Tensor | None, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        first, total = self._grown, self._grown + tokens.shape[1]
        longest = max(self.lengths)
        reach = longest + total
        if reach > self.max_length:
            raise ModelError(
                f"a sequence of {longest} tokens and {total} drafted ones exceed max_length {self.max_length}"
            )
        tensors = {"tokens": tokens, "starts": on_device([n + first for n in self.lengths], self.device), **inputs}
        if parents is not None or self._tree is not None:
            if self._tree is None:
                self._tree = torch.arange(-1, first - 1, device=self.device).expand(self.batch_size, -1)
            if parents is None:
                parents = torch.arange(first - 1, total - 1, device=self.device).expand_as(tokens)
            tensors |= {"parents": parents, "tree": self._tree}
        self._grown = total
        self.passes += 1
        if self._run.records and tokens.numel() <= MOST_GRAPHED:
            logits, hidden, self._tree = self._replayed(first, tensors)
        else:
            start = longest + first if min(self.lengths) == longest else None
            logits, hidden, self._tree = self._score(reach, start, self.hidden_layers, **tensors)
        return logits, hidden

    @torch.inference_mode()
    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        if path is not None and path.shape[1] and self._grown:
            tensors = {"path": path, "committed": on_device(self.lengths, self.device)}
            if self._run.records:
                self._prepare_moves(tensors)
                tensors |= at_width({"path": path}, self._width("moves", path.shape[1], max(self.lengths)))
            self._run(self._compact, tensors)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._grown, self._tree = 0, None
        for fork in self._forks:
            fork.follow()

    def free(self, row: int) -> None:
        self.lengths[row] = 0
        self._begun.pop(row, None)
        self.cache.clear(row)
        for fork in self._forks:
            fork.follow()

    # -- what graphs replay -----------------------------------------------------------------------------

    def _replayed(self, first: int, tensors: dict[str, Tensor]) -> Outputs:
        """`_score` over a width and a reach that come again; ``first`` nodes have been grown before."""
        tokens, tree = tensors["tokens"], "tree" in tensors
        wide = {name: one for name, one in tensors.items() if name in ("tokens", "parents") or one.dim() > 2}
        # Those that name positions, as a head does whose logits are wanted at one of them.
        naming = {name: one for name, one in tensors.items() if name not in wide and name not in ("starts", "tree")}
        family = (
            first if tree else None,
            self.hidden_layers,
            *((name, one.shape[2:], one.dtype) for name, one in wide.items()),
            *((name, one.shape, one.dtype) for name, one in naming.items()),
        )
        width, longest = tokens.shape[1], max(self.lengths) + first
        self._prepare_passes(family, first, tensors, wide, naming)
        padded = self._width(family, width, longest)
        reach = min(stepped(longest + padded, BUCKET), self.max_length)
        found = self._run(self._score, tensors | at_width(wide, padded), reach, None, self.hidden_layers)
        if padded == width:
            return found
        logits, hidden, of = found
        if not naming:  # who names positions reads what is said there
            logits, hidden = (None if one is None else one[:, :width] for one in (logits, hidden))
        return logits, hidden, None if of is None else of[:, : first + width]

    def _width(self, family: Hashable, width: int, longest: int) -> int:
        """The next width of a kind of pass that was recorded ahead and has room; ``width`` where there is none."""
        known = self._run.widths.get(family, ())
        return min((n for n in known if width <= n <= self.max_length - longest), default=width)

    def _prepare_passes(
        self,
        family: Hashable,
        first: int,
        tensors: Mapping[str, Tensor],
        wide: Mapping[str, Tensor],
        naming: Mapping[str, Tensor],
    ) -> None:
        """Record what may come of this kind of pass, if that is to be done ahead: other widths, and every reach.

        Nothing that is said counts, and every slot that is written to is written again before it is read, or belongs to
        a sequence of the warm-up.
        """
        most, width = ahead(), wide["tokens"].shape[1]
        if most is None:
            return
        if "tree" not in tensors:
            several = wider(width, most.depth) if naming else widths(width, most.depth + 1)
        else:  # levels of a tree are as wide as they are
            several = [width] if first or naming else widths(width, most.nodes + 1)
        known = self._run.widths.setdefault(family, set())
        for n in several:
            if n in known or n * self.batch_size > MOST_GRAPHED:
                continue
            for reach in reaches(BUCKET, self.max_length):
                if reach < first + n:
                    continue
                room = {name: torch.zeros_like(one) for name, one in naming.items()}
                room |= at_width(wide, n) | {"starts": tensors["starts"].clamp(max=reach - n)}
                if self._run.records:
                    self._run(self._score, {**tensors, **room}, reach, None, self.hidden_layers)
                    known.add(n)

    def _prepare_moves(self, tensors: Mapping[str, Tensor]) -> None:
        most, path = ahead(), tensors["path"]
        if most is None:
            return
        known = self._run.widths.setdefault("moves", set())
        for n in widths(path.shape[1], most.depth + 1):
            if n not in known and max(self.lengths) + n <= self.max_length:
                still = {"path": path.new_full((len(path), n), -1)}
                self._run(self._compact, {**tensors, **still})
                known.add(n)

    # -- internals --------------------------------------------------------------------------------------

    def _score(
        self,
        reach: int,
        start: int | None,
        layers: tuple[float, ...],
        tokens: Tensor,
        starts: Tensor,
        parents: Tensor | None = None,
        tree: Tensor | None = None,
        **inputs: Tensor,
    ) -> Outputs:
        """Feed ``tokens [B, W]``, row b's into the slots from ``starts[b]`` on; all that is done on the device for it.

        A function of its arguments, weights and cache alone, because graphs replay it: it may not read ``lengths``.

        Args:
            reach: slots attended over.
            start: the first slot where it is the same in all rows; ``None`` = where ``starts [B]`` says.
            layers: whose hidden states are wanted.
            parents: ``[B, W]``, see `LM.forward`; ``None`` = chains.
            tree: ``[B, grown]``, the parents of the nodes grown before.

        Returns:
            logits ``[B, W, V]``, hidden states ``[B, W, L, H]`` or None, the parents of old and new nodes or None.
        """
        column, slots = self._columns[:reach], starts[:, None]
        if tokens.shape[1] > 1:
            slots = slots + self._columns[: tokens.shape[1]]
        if tree is None:
            allowed, key_positions, positions = column <= slots[..., None], None, slots
        else:
            assert parents is not None
            first = tree.shape[1]
            tree = torch.cat([tree, parents], 1) if first else parents
            above = descent(tree, tree.shape[1])
            # A query sees every committed slot, its own node and those above it, and nothing that lies behind.
            seen = functional.pad(functional.pad(above[:, first:], (1, 0), value=True), (0, 1), value=False)
            before = starts[:, None] - (first + 1)  # the last committed slot
            node = (column - before).clamp_(0, tree.shape[1] + 1)
            allowed = seen.gather(2, node[:, None].expand(-1, tokens.shape[1], -1))
            depth = above.sum(-1)
            positions, key_positions = before + depth[:, first:], None
            if self._window is not None or self._chunk is not None:
                speculative = (node > 0) & (node <= tree.shape[1])
                key_positions = before + depth.gather(1, (node - 1).clamp_(0, tree.shape[1] - 1))
                key_positions = torch.where(speculative, key_positions, column)
        place = Placement(slots, reach, start)
        return *self._forward(tokens, place, positions, allowed, key_positions, inputs, layers), tree

    def _compact(self, path: Tensor, committed: Tensor) -> Outputs:
        """Move nodes ``path [B, D]`` (-1 = none) behind the ``committed [B]`` slots of their row."""
        target = committed[:, None] + self._columns[: path.shape[1]]
        self.cache.move(torch.where(path >= 0, committed[:, None] + path, target), target)
        return ()

    def _forward(
        self,
        tokens: Tensor,
        placement: Placement,
        positions: Tensor,
        allowed: Tensor,
        key_positions: Tensor | None,
        inputs: Mapping[str, Tensor],
        layers: tuple[float, ...],
        want_logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """One pass: ``tokens [R, W]`` at ``positions [R, W]``, ``allowed [R, W, reach]`` bool."""
        self.cache.placement = placement
        position_ids = positions.expand_as(tokens)
        if self.context_length is not None and placement.reach > self.context_length:
            # Padding behind a row that ends with the context has no position there; nobody reads what it computes.
            position_ids = position_ids.clamp(max=self.context_length - 1)
        extra: dict[str, Any] = dict(inputs)
        wanted = [int(i * self._depth) if isinstance(i, float) else i for i in layers]
        if layers:
            extra["output_hidden_states"] = wanted if SELECTS else True
        if self._keep_logits and not want_logits:
            extra["logits_to_keep"] = 1  # 0 would mean all of them
        with own_attention():
            out = self.model(
                **self._words(tokens),
                attention_mask=self._masks(allowed, positions, key_positions),
                position_ids=position_ids,
                past_key_values=self.cache,
                use_cache=True,
                **extra,
            )
        hidden = None
        if layers:
            hidden = torch.stack([out.hidden_states[i] for i in wanted], 2)
        return (out.logits if want_logits else None), hidden

    def _words(self, tokens: Tensor) -> dict[str, Tensor]:
        """What the model is fed for ``tokens [R, W]``."""
        return {"input_ids": tokens}

    def _masks(self, allowed: Tensor, positions: Tensor, key_positions: Tensor | None) -> Any:
        """Additive ``[R, 1, W, reach]``, or of `block_mask`; by layer type where full and other layers are mixed."""
        masks = {"full_attention": self._mask(allowed)}
        if self._window is None and self._chunk is None:
            return masks["full_attention"]
        if key_positions is None or key_positions.shape[-1] != allowed.shape[-1]:
            key_positions = torch.arange(allowed.shape[-1], device=allowed.device)[None]
        at, keys = positions[..., None], key_positions[:, None]
        if self._window is not None:
            masks["sliding_attention"] = self._mask(allowed & (at - keys < self._window))
        if self._chunk is not None:
            masks["chunked_attention"] = self._mask(allowed & (at // self._chunk == keys // self._chunk))
        return masks if self._layer_types else masks["sliding_attention"]

    def _mask(self, allowed: Tensor) -> Any:
        if self._flex:
            return block_mask(allowed)
        return torch.where(allowed, self._zero, self._lowest)[:, None]
