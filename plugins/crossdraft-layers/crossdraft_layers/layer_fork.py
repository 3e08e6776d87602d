"""Forks: some layers of a model over the slots of the whole one, see `LM.fork`; and early-exit resume.

Early exit: M. Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024;
layers left out, and parts of layers: J. Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via
Self-Speculative Decoding", ACL 2024.

A layer keeps its own number in the cache, so a fork attends over what the whole model computed for committed tokens.
Nodes of a fork lie behind them until the whole model writes its own nodes there.

If the first layers of a fork are the model's own first layers, the keys and values that they write for a chain equal
those of the whole model, in the same slots. The fork keeps the hidden states behind these layers, and the whole model
can resume from them (`LayerFork.resume`). `_can_split` tests once per model if it can be run in two parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from crossdraft import ModelError, on_device
from crossdraft.models import ForwardPass, RaggedLM, WritePlan, close

from .some_layers import Seam, insert_seam, once_per_model, parts_add_up, with_layers


class _PartialPass(ForwardPass):
    """Passes of some layers of the model of ``model_pass``, over its cache.

    Args:
        model: the layers, see `with_layers`.
        seam: `run` starts at this layer if it receives hidden states, ``inputs["given"]``; otherwise it returns those
            behind this layer, unless those of other layers are requested.
        embeddings: see `ForwardPass`.
        head: False if ``model`` has no head and returns no logits.
    """

    def __init__(
        self,
        model_pass: ForwardPass,
        model: Any,
        seam: Seam | None = None,
        embeddings: Tensor | None = None,
        head: bool = True,
    ):
        graphs = None if model_pass.graphs.records else model_pass.graphs
        parts = model_pass.dims, model_pass.masks, model_pass.cache, model_pass.preparations
        super().__init__(model, *parts, embeddings, graphs)
        self._seam, self._head = seam, head

    def run(
        self,
        tokens: Tensor,
        plan: WritePlan,
        visibility: Any,
        inputs: Mapping[str, Tensor],
        layers: tuple[float, ...],
        want_logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        seam = self._seam
        if seam is not None and "given" in inputs:
            with seam.replacing(inputs["given"]):
                return super().run(tokens, plan, visibility, {}, layers, want_logits)
        logits, hidden = super().run(tokens, plan, visibility, inputs, layers, want_logits and self._head)
        if seam is None:
            return logits, hidden
        output, seam.output = seam.output, None  # a graph overwrites it
        return logits, hidden if layers else output


class _PartialLM(RaggedLM):
    """Some layers of a model over its slots; parts of equal ``key`` and the same embeddings share passes and graphs."""

    def __init__(self, full: RaggedLM, forward_pass: ForwardPass, key: Hashable):
        parts = full.forward_pass.parts
        if key not in parts or parts[key].embeddings is not forward_pass.embeddings:
            parts[key] = forward_pass
        super().__init__(parts[key], full.batch_size, full.max_length)
        self._full = full
        self.lengths = list(full.lengths)

    def follow(self) -> None:
        """Take over the lengths of the whole model and drop all speculative nodes."""
        self.lengths = list(self._full.lengths)
        self._drop_nodes()


class _FirstLayers(_PartialLM):
    """The first ``count`` layers without the head."""

    def __init__(self, full: RaggedLM, count: int):
        model = with_layers(full.model, range(count))
        seam = insert_seam(model, count - 1)
        super().__init__(full, _PartialPass(full.forward_pass, model.get_decoder(), seam, head=False), ("first", count))

    def hidden_states(self, tokens: Tensor, nodes: int) -> Tensor:
        """``[B, W, H]`` behind these layers, of ``tokens [B, W]`` that follow ``nodes`` speculative nodes."""
        self.follow()
        self._nodes = nodes
        hidden = self._add_nodes(tokens, None, {})[1]
        assert hidden is not None
        return hidden


class _LastLayers(_PartialLM):
    """All layers from ``first`` on, and the head."""

    def __init__(self, full: RaggedLM, first: int):
        model = with_layers(full.model, range(first, full.forward_pass.dims.num_layers))
        super().__init__(full, _PartialPass(full.forward_pass, model, insert_seam(model, 0)), ("last", first))

    def logits(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Logits ``[B, W, V]`` of the chain ``tokens [B, W]``, from its hidden states ``[B, W, H]`` on."""
        self.follow()
        logits = self._add_nodes(tokens, None, {"given": hidden})[0]
        assert logits is not None
        return logits


class LayerFork(_PartialLM):
    """Some layers of a model over the slots of the whole one.

    Args:
        layers, no_attention, no_mlp, embeddings: see `LM.fork`.
        splittable: the model is known to run in two parts; ``False`` = test it.

    Raises:
        ModelError: the model cannot run these layers, or parts of them, or the embeddings do not fit.
    """

    def __init__(
        self,
        full: RaggedLM,
        layers: Sequence[int],
        no_attention: Collection[int] = (),
        no_mlp: Collection[int] = (),
        splittable: bool = False,
        embeddings: Tensor | None = None,
    ):
        skipped = {*no_attention, *no_mlp}
        model = with_layers(full.model, layers, no_attention, no_mlp)
        has_values = full.device.type != "meta"
        if skipped and has_values and not parts_add_up(full.model, min(skipped)):
            raise ModelError(
                f"{type(full.model).__name__} does more in a layer than add the outputs of attention and feed-forward "
                "network, so neither can be skipped; skip whole layers"
            )
        # Leading layers that run exactly as in the whole model.
        shared = next((i for i, n in enumerate(layers) if n != i or n in skipped), len(layers))
        resumable = embeddings is None and 0 < shared < full.forward_pass.dims.num_layers
        resumable = resumable and (splittable or (has_values and _can_split(full.model, shared)))
        self._first = _FirstLayers(full, shared) if resumable else None
        self._rest = _LastLayers(full, shared) if resumable else None
        seam = insert_seam(model, shared - 1) if resumable else None
        if embeddings is not None:
            embeddings = _fitted_embeddings(model, embeddings)
        key = (*layers, *map(frozenset, (no_attention, no_mlp)), resumable, embeddings is None)
        super().__init__(full, _PartialPass(full.forward_pass, model, seam, embeddings), key)
        self._chain = True
        self._tokens: list[Tensor] = []
        self._hidden: list[Tensor] = []  # of each of these, behind the shared layers

    @property
    def fed(self) -> Tensor | None:
        return torch.cat(self._tokens, 1) if self._tokens and self._chain and self._rest is not None else None

    def follow(self) -> None:
        super().follow()
        self._chain, self._tokens, self._hidden = True, [], []

    def resume(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, W, V]`` of the whole model for a root and chain ``tokens [B, W]`` that starts with `fed`."""
        assert self._first is not None and self._rest is not None
        hidden = torch.cat(self._hidden, 1)
        done = hidden.shape[1]
        if done < tokens.shape[1]:
            hidden = torch.cat([hidden, self._first.hidden_states(tokens[:, done:], done)], 1)
        return self._rest.logits(tokens, hidden[:, : tokens.shape[1]])

    def start(self, row: int, prompt: Sequence[int], **inputs: Tensor) -> None:
        """Compute nothing: the whole model has started already."""
        self.follow()

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Compute nothing: the whole model holds the prompts already."""

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, resume_from: Any = None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        logits, hidden = super().forward(tokens, parents, None, **inputs)
        self._chain = self._chain and parents is None and not self.hidden_layers
        if self._rest is None or self.hidden_layers:
            return logits, hidden
        assert hidden is not None
        self._tokens.append(tokens)
        self._hidden.append(hidden)
        return logits, None

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        """Count the tokens only; after the whole model's commit there are no nodes left to count."""
        if self._nodes:
            self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
            self._drop_nodes()

    def free(self, row: int) -> None:
        self.follow()

    def fork(self, layers: Sequence[int], **_: Any) -> LayerFork:
        raise ModelError("a fork cannot be forked; call fork() of the target")


def _fitted_embeddings(model: Any, embeddings: Tensor) -> Tensor:
    """``embeddings [n, H]`` on the device and in the dtype of the model's own; ModelError if they do not fit."""
    name, weight = type(model).__name__, model.get_input_embeddings().weight
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name} takes no inputs_embeds, so it cannot run tokens with embeddings of a drafter")
    if embeddings.dim() != 2 or embeddings.shape[1] != weight.shape[1]:
        raise ModelError(
            f"embeddings have shape {list(embeddings.shape)}, but those of {name} are vectors of {weight.shape[1]}; "
            "use embeddings that were made for this model"
        )
    return embeddings.to(weight.device, weight.dtype)


@once_per_model
def _can_split(model: Any, shared: int) -> bool:
    """True if logits stay the same when the first ``shared`` layers run token by token and the others afterwards.

    False for models whose later layers read more of earlier ones than hidden states. Runs one small pass whole, and
    one in parts.
    """
    full_lm = RaggedLM.for_trial(model, 1)
    ids = on_device([[(7 * i + 3) % full_lm.vocab_size for i in range(9)]], full_lm.device)
    full_lm.start(0, ids[0, :6].tolist())
    expected = full_lm.forward(ids[:, 5:])[0]
    full_lm.commit([0])
    fork = LayerFork(full_lm, range(shared), splittable=True)
    full_lm.register_fork(fork)
    fork.forward(ids[:, 5:6])
    fork.commit([1])
    fork.forward(ids[:, 6:7])
    return close(full_lm.forward(ids[:, 5:], resume_from=fork)[0], expected, model.dtype)
