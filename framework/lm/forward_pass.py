"""The device work of a forward pass: everything that is launched for it, as functions of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import plugins
from ..contracts.models import ModelPreparation
from ..errors import ModelError
from ..models.placement import input_device
from ..util.cache_argument import cache_argument
from .architectures import RECENT, attends, text_config
from .attention_masks import AttentionMasks, Visibility
from .cuda_graphs import CudaGraphRunner, Outputs, runner_for
from .kv_cache import KVCache, RaggedCache, WritePlan
from .layer_surgery import recorded, resolved


@dataclass
class ModelDims:
    """Sizes of a whole model, which forks with fewer layers share; see `RaggedLM.context_length`."""

    vocab_size: int
    context_length: int | None
    num_layers: int
    device: torch.device

    @classmethod
    def of(cls, model: Any) -> ModelDims:
        config = text_config(model)
        return cls(
            vocab_size=model.get_output_embeddings().weight.shape[0],
            context_length=getattr(config, "max_position_embeddings", None),
            num_layers=getattr(config, "num_hidden_layers", 0),
            device=input_device(model),
        )


class ForwardPass:
    """Passes of one model over one cache.

    CUDA graphs replay `score` and `compact`, so both depend only on their arguments, the weights and the cache. The
    state that the host keeps (lengths, nodes) lives in `RaggedLM`.

    Args:
        preparations: of the model, see `prepare`.
        embeddings: ``[n, H]``, of the tokens V, V + 1, ..
        graphs: calls the passes, and captures and replays them if possible; `runner_for` the model by default.
    """

    def __init__(
        self,
        model: Any,
        dims: ModelDims,
        masks: AttentionMasks,
        cache: KVCache,
        preparations: Sequence[ModelPreparation],
        embeddings: Tensor | None = None,
        graphs: CudaGraphRunner | None = None,
    ):
        self.model, self.dims, self.masks, self.cache = model, dims, masks, cache
        self.preparations, self.embeddings = preparations, embeddings
        self._keep_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        # Models that are recurrent throughout have no attention: no cache of keys, no masks, no positions.
        self._attends = attends(model)
        self._cache_argument = cache_argument(model.forward)
        if not getattr(cache, "recordable", True):
            graphs = CudaGraphRunner(None, type(model).__name__)
        self.graphs = runner_for(model) if graphs is None else graphs
        self.parts: dict[Hashable, Any] = {}  # passes of some of the layers, see `LM.fork`

    @classmethod
    def of(
        cls,
        model: Any,
        batch_size: int,
        max_length: int,
        cache: KVCache | None = None,
        graphs: CudaGraphRunner | None = None,
    ) -> ForwardPass:
        """Passes of a whole model, over a new cache by default; puts the model in eval mode."""
        model.eval()
        preparations = prepare(model)
        dims = ModelDims.of(model)
        masks = AttentionMasks(text_config(model), model.dtype, dims.device, max_length)
        caches = [preparation.new_cache(batch_size, max_length) for preparation in preparations]
        own: list[KVCache] = [cache for cache in caches if cache is not None]
        if cache is None:
            cache = own[0] if own else RaggedCache(batch_size, max_length)
        elif own and not isinstance(cache, type(own[0])):
            raise ModelError(
                f"{type(model).__name__} needs a {type(own[0]).__name__} and got a {type(cache).__name__}, which does "
                "not keep the states of its layers; pass such a cache, or no cache"
            )
        return cls(model, dims, masks, cache, preparations, graphs=graphs)

    def score(
        self,
        kv_len: int,
        start: int | None,
        layers: tuple[float, ...],
        tokens: Tensor,
        starts: Tensor,
        parents: Tensor | None = None,
        tree: Tensor | None = None,
        **inputs: Tensor,
    ) -> Outputs:
        """Score ``tokens [B, W]``, written to the slots of row b from ``starts[b]`` on.

        Args:
            kv_len: slots attended over.
            start: the first slot if it is the same in all rows; ``None`` = see ``starts [B]``.
            layers: layers whose hidden states are returned.
            parents: ``[B, W]``, see `LM.forward`; ``None`` = chains.
            tree: ``[B, N]``, the parents of the nodes of earlier passes.

        Returns:
            logits ``[B, W, V]``, hidden states ``[B, W, L, H]`` or None, the parents of old and new nodes or None.
        """
        slots, width = starts[:, None], tokens.shape[1]
        if width > 1:
            slots = slots + self.masks.slots[:width]
        if tree is None:
            visibility = self.masks.causal(slots, kv_len)
        else:
            assert parents is not None
            tree = torch.cat([tree, parents], 1) if tree.shape[1] else parents
            visibility = self.masks.tree(starts, tree, width, kv_len)
        plan = WritePlan(slots, kv_len, start, parents=tree)
        return *self.run(tokens, plan, visibility, inputs, layers), tree

    def compact(self, path: Tensor, committed: Tensor) -> Outputs:
        """Move nodes ``path [B, D]`` (-1 = none) behind the ``committed [B]`` slots of their row."""
        target = committed[:, None] + self.masks.slots[: path.shape[1]]
        self.cache.move(torch.where(path >= 0, committed[:, None] + path, target), target)
        return ()

    def run(
        self,
        tokens: Tensor,
        plan: WritePlan,
        visibility: Visibility,
        inputs: Mapping[str, Tensor],
        layers: tuple[float, ...],
        want_logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run the model on ``tokens [R, W]``; return logits and the hidden states of ``layers``, or None for either."""
        position_ids = visibility.positions.expand_as(tokens)
        context = self.dims.context_length
        if context is not None and plan.kv_len > context:
            # Padding behind a row that fills the context has no position; its outputs are not used.
            position_ids = position_ids.clamp(max=context - 1)
        extra: dict[str, Any] = dict(inputs)
        if layers:
            selected = resolved(layers, self.dims.num_layers)
            extra["output_hidden_states"] = selected if RECENT else True  # older ones number them differently
        if self._keep_logits and not want_logits:
            extra["logits_to_keep"] = 1  # 0 means all of them
        cache = self.cache.begin_pass(plan)
        if self._attends:
            mask = self.masks.build(visibility)
            extra |= {"attention_mask": mask, "position_ids": position_ids, self._cache_argument: cache}
        hidden = None
        with ExitStack() as contexts:
            for preparation in self.preparations:
                contexts.enter_context(preparation.around_pass(cache, visibility))
            if layers:
                states = contexts.enter_context(recorded(self.model, selected, self.dims.num_layers))
            extra |= {"input_ids": tokens} if self.embeddings is None else {"inputs_embeds": self.embed(tokens)}
            out = self.model(use_cache=self._attends, **extra)
        if layers:
            hidden = torch.stack(states.select(selected, out.hidden_states), 2)
        return (out.logits if want_logits else None), hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings ``[R, W, H]`` of ``tokens [R, W]``."""
        assert self.embeddings is not None
        index = tokens - self.dims.vocab_size  # >= 0: one of the own embeddings
        own = self.model.get_input_embeddings()(tokens.where(index < 0, 0))
        return torch.where(index[..., None] < 0, own, self.embeddings[index.clamp(min=0)])


def prepare(model: Any) -> list[ModelPreparation]:
    """Run all registered preparations on ``model``; return those that its passes need."""
    return [preparation for preparation in each_preparation("prepare", model) if preparation is not None]


def each_preparation(method: str, *arguments: Any) -> Iterator[Any]:
    """Call a class method of every registered preparation; yield the results.

    Raises:
        ContractError: a preparation of a plug-in fails; names the plug-in.
    """
    for name in plugins.entries("preparations"):
        cls = plugins.get("preparations", name)
        with plugins.guarded("preparations", name, f"{method}()"):
            result = getattr(cls, method)(*arguments)
        yield result
