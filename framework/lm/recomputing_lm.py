"""Slots of any causal LM of transformers, without a cache: every text is computed again.

For scoring recorded texts and writing training data with models that `TransformersLM` refuses. Each row, and each path
of a tree, is one plain pass, exactly what the model computes by itself; decoding this way saves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from ..contracts.lm import LM, Fork
from ..contracts.models import TRANSFORMERS, LoadedModel
from ..errors import ModelError
from ..models.placement import input_device
from ..util.tensors import on_device, parent_lists
from .architectures import longrope_boundary, text_config
from .layer_surgery import close, recorded, resolved


class RecomputingLM:
    """B slots of ``model``: :class:`~crossdraft.framework.contracts.lm.LM` without forks.

    Attributes:
        boundary: see `longrope_boundary`.

    Raises:
        ModelError: the logits of a token depend on later tokens, or the model cannot run on a text only.
    """

    def __init__(self, model: Any, batch_size: int, max_length: int):
        model.eval()
        self.model, self.batch_size, self.max_length = model, batch_size, max_length
        config = text_config(model)
        self.device: torch.device = input_device(model)
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.hidden_layers: tuple[float, ...] = ()
        self.lengths = [0] * batch_size
        self.passes = 0
        head = getattr(model.get_output_embeddings(), "weight", None)
        if head is None:
            raise ModelError(f"{type(model).__name__} does not have one output embedding, so it cannot predict tokens")
        self.vocab_size: int = head.shape[0]
        self._num_layers = getattr(config, "num_hidden_layers", 0)
        self.boundary = longrope_boundary(config)
        self._texts: dict[int, list[int]] = {}
        self._nodes: list[list[tuple[int, int]]] = [[] for _ in range(batch_size)]  # token and parent of each node
        _refuse_acausal(self)

    @torch.inference_mode()
    def start(self, row: int, prompt: Sequence[int]) -> Tensor | None:
        self._texts[row] = list(prompt[:-1])
        self.lengths[row] = len(prompt) - 1
        self._drop_nodes()
        if not self.hidden_layers or len(prompt) < 2:
            return None
        return self.run(self._texts[row], 0)[1]

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, resume_from: Fork | None = None
    ) -> tuple[Tensor, Tensor | None]:
        first, width = len(self._nodes[0]), tokens.shape[1]
        above = parent_lists(parents, self.batch_size, first, width)
        for nodes, new, up in zip(self._nodes, tokens.tolist(), above, strict=True):
            nodes += zip(new, up, strict=True)
        self.passes += 1
        results = [self._row(row, nodes, first) for row, nodes in enumerate(self._nodes)]
        logits = [result[0] for result in results]
        hidden = [result[1] for result in results if result[1] is not None]
        return torch.stack(logits), torch.stack(hidden) if hidden else None

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        chosen = [list(range(count)) for count in counts] if path is None else path.tolist()
        for row, (count, nodes) in enumerate(zip(counts, chosen, strict=True)):
            if count:
                self._texts[row] += [self._nodes[row][node][0] for node in nodes[:count]]
                self.lengths[row] += count
        self._drop_nodes()

    def free(self, row: int) -> None:
        self._texts.pop(row, None)
        self.lengths[row] = 0

    def fork(self, layers: Sequence[int], **_: Any) -> Fork:
        raise ModelError(f"{type(self.model).__name__} runs without a cache, so some of its layers cannot be run alone")

    def _drop_nodes(self) -> None:
        self._nodes = [[] for _ in range(self.batch_size)]

    def _row(self, row: int, nodes: Sequence[tuple[int, int]], first: int) -> tuple[Tensor, Tensor | None]:
        """Logits ``[W, V]`` and hidden states ``[W, L, H]`` of the nodes from ``first`` on, one pass for each leaf."""
        paths: list[list[int]] = []
        for i, (_, parent) in enumerate(nodes):
            paths.append([*(paths[parent] if parent >= 0 else ()), i])
        logits: dict[int, Tensor] = {}
        hidden: dict[int, Tensor] = {}
        text = self._texts.get(row)
        for i in reversed(range(first, len(nodes))):
            if i in logits:
                continue
            path = paths[i] if text is not None else [i]  # the output of a free slot is unused
            start = len(text or ())
            node_logits, states = self.run([*(text or ()), *(nodes[n][0] for n in path)], start)
            for j, n in enumerate(path):
                logits[n] = node_logits[j]
                if states is not None:
                    hidden[n] = states[j]
        order = range(first, len(nodes))
        return torch.stack([logits[i] for i in order]), torch.stack([hidden[i] for i in order]) if hidden else None

    def run(self, tokens: Sequence[int], start: int) -> tuple[Tensor, Tensor | None]:
        """Logits and hidden states of ``tokens`` from index ``start`` on, each as at the end of its own text."""
        ends = [len(tokens)]
        if self.boundary is not None and start < self.boundary < len(tokens):
            ends = [self.boundary, len(tokens)]  # a longer text has other frequencies from its first token on
        parts, layers = [], resolved(self.hidden_layers, self._num_layers)
        for end in ends:
            ids = on_device([list(tokens[:end])], self.device)
            more = {"output_hidden_states": True} if layers else {}
            with recorded(self.model, layers, self._num_layers) as recorder:
                out = self.model(input_ids=ids, use_cache=False, **more)
            states = torch.stack(recorder.select(layers, out.hidden_states), 2)[0, start:] if layers else None
            parts.append((out.logits[0, start:], states))
            start = end
        logits = torch.cat([part[0] for part in parts])
        return logits, torch.cat([part[1] for part in parts if part[1] is not None]) if layers else None


@torch.inference_mode()
def _refuse_acausal(lm: RecomputingLM) -> None:
    """Raise ModelError if the logits of a text's first tokens change when more tokens follow."""
    name, longest = type(lm.model).__name__, min(32, lm.context_length or 32)
    varied = [(7 * i * i + 3) % lm.vocab_size for i in range(longest)]
    causal = True
    try:
        for ids in (varied, varied[:3] * longest):
            logits = lm.run(ids[:longest], 0)[0]
            prefixes = {n: lm.run(ids[:n], 0)[0] for n in (5, longest // 2, longest - 3) if 0 < n < longest}
            same = (close(logits[:n], part, lm.model.dtype) for n, part in prefixes.items())
            causal &= len(logits) == longest and all(same)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{name} cannot run on a text only ({type(error).__name__}: {reason})") from error
    if not causal and lm.boundary is None:
        raise ModelError(f"{name} computes other logits for a token if more tokens follow, so texts cannot be scored")


def scoring_slots(loaded: LoadedModel, batch_size: int, max_length: int, slots: Any) -> LM:
    """``slots(loaded, batch_size, max_length)``, or a `RecomputingLM` if these refuse a causal LM of transformers.

    Raises:
        ModelError: the model is refused, and cannot be recomputed either.
    """
    try:
        return slots(loaded, batch_size, max_length)
    except ModelError as refusal:
        if loaded.backend != TRANSFORMERS or not isinstance(loaded.model, PreTrainedModel):
            raise
        try:
            return RecomputingLM(loaded.model, batch_size, max_length)
        except ModelError as error:
            raise ModelError(f"{refusal}; {error}") from error
