"""Some layers of a model over the slots of the whole one, see `LM.fork`; and a whole model that goes on where they end.

Early exit: M. Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024;
layers left out, and parts of layers: J. Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via
Self-Speculative Decoding", ACL 2024. A layer stands in the cache under its own number, so what the whole model
computed for committed tokens is there to be attended over. Nodes of a fork lie behind them until the whole model
writes its own there.

Where a fork's first layers are the model's own first layers, keys and values that they write for a chain are those
that the whole model would write, in the same slots. The fork keeps what these layers said, and the whole model may go
on from there (`LayerFork.finished`). Whether a model can be run in two parts is tried once, see `_continues`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from ..contracts.draft import on_device
from ..errors import ModelError
from .architectures import TRIAL_LENGTH, text_config
from .cuda_graphs import runner_for
from .layer_surgery import close, parts_add_up, seam, with_layers
from .ragged_lm import RaggedLM


class _Part(RaggedLM):
    """Some layers of a model over the slots of the whole one: ``model`` is what `with_layers` made of it."""

    def __init__(self, whole: RaggedLM, model: Any):
        self.__dict__.update(whole.__dict__)
        self._whole, self._forks, self.model = whole, WeakSet(), model
        self.hidden_layers, self.passes = (), 0
        self._run = runner_for(model)
        self.follow()

    def follow(self) -> None:
        """Hold what the whole model holds, and nothing speculative."""
        self.lengths = list(self._whole.lengths)
        self._grown, self._tree = 0, None


class _First(_Part):
    """The first ``count`` layers without the head: they say what goes into the next one."""

    def __init__(self, whole: RaggedLM, count: int):
        model = with_layers(whole.model, range(count))
        self._seam = seam(model, count - 1)
        super().__init__(whole, model.get_decoder())
        self._keep_logits = False

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
        super()._forward(*args, **kwargs, want_logits=False)
        return None, self._seam.said

    def after(self, tokens: Tensor, grown: int) -> Tensor:
        """``[B, W, H]`` behind them, of ``tokens [B, W]`` that follow ``grown`` speculative nodes."""
        self.follow()
        self._grown = grown
        hidden = self._grow(tokens, None, {})[1]
        assert hidden is not None
        return hidden


class _Rest(_Part):
    """All layers from ``first`` on, and the head."""

    def __init__(self, whole: RaggedLM, first: int):
        count = text_config(whole.model).num_hidden_layers
        model = with_layers(whole.model, range(first, count))
        self._seam = seam(model, 0)
        super().__init__(whole, model)

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
        *others, inputs, layers = args
        self._seam.given, others = inputs["given"], [*others, {}, layers]
        try:
            return super()._forward(*others, **kwargs)
        finally:
            self._seam.given = None

    def scored(self, tokens: Tensor, given: Tensor) -> Tensor:
        """Logits ``[B, W, V]`` of the chain ``tokens [B, W]``, whose hidden states are ``given [B, W, H]`` so far."""
        self.follow()
        logits = self._grow(tokens, None, {"given": given})[0]
        assert logits is not None
        return logits


class LayerFork(_Part):
    """Some layers of a model over the slots of the whole one.

    Args:
        layers, no_attention, no_mlp, embeddings: see `LM.fork`.
        tried: the model can be run in two parts; ``False`` = try that.

    Raises:
        ModelError: a model that cannot run some of its layers, or parts of them, or embeddings that do not fit.
    """

    def __init__(
        self,
        whole: RaggedLM,
        layers: Sequence[int],
        no_attention: Collection[int] = (),
        no_mlp: Collection[int] = (),
        tried: bool = False,
        embeddings: Tensor | None = None,
    ):
        left_out = {*no_attention, *no_mlp}
        model = with_layers(whole.model, layers, no_attention, no_mlp)
        real = whole.device.type != "meta"  # there is no value to compare
        if left_out and real and not parts_add_up(whole.model, min(left_out)):
            raise ModelError(
                f"{type(whole.model).__name__} does more in a layer than add up what attention and feed-forward "
                "network say, so they cannot be left out one by one; leave out whole layers"
            )
        count = text_config(whole.model).num_hidden_layers
        # So many of the model's first layers run here as they do there.
        shared = next((i for i, n in enumerate(layers) if n != i or n in left_out), len(layers))
        alike = embeddings is None and 0 < shared < count
        shares = alike and (tried or (real and _continues(whole.model, shared)))
        self._first = _First(whole, shared) if shares else None
        self._rest = _Rest(whole, shared) if shares else None
        self._seam = seam(model, shared - 1) if shares else None
        self._embeddings = None if embeddings is None else _fitting(model, embeddings)
        super().__init__(whole, model)

    @property
    def fed(self) -> Tensor | None:
        return torch.cat(self._fed, 1) if self._fed and self._chain and self._seam is not None else None

    def follow(self) -> None:
        super().follow()
        self._fed: list[Tensor] = []
        self._said: list[Tensor] = []  # after the shared layers, of each
        self._chain = True

    def finished(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, W, V]`` of the whole model for a root and chain ``tokens [B, W]``, of which some were `fed`."""
        assert self._first is not None and self._rest is not None
        said = torch.cat(self._said, 1)
        if said.shape[1] < tokens.shape[1]:
            more = self._first.after(tokens[:, said.shape[1] :], said.shape[1])
            said = torch.cat([said, more], 1)
        return self._rest.scored(tokens, said[:, : tokens.shape[1]])

    def start(self, row: int, prompt: Sequence[int], **inputs: Tensor) -> None:
        """The whole model has begun already."""
        self.follow()

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """The whole model holds it already."""

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, resume_from: Any = None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        logits, hidden = super().forward(tokens, parents, None, **inputs)
        self._chain = self._chain and parents is None and not self.hidden_layers
        if self._seam is None or self.hidden_layers:
            return logits, hidden
        assert hidden is not None
        self._fed.append(tokens)
        self._said.append(hidden)
        return logits, None

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
        logits, hidden = super()._forward(*args, **kwargs)
        return logits, hidden if self._seam is None or args[-1] else self._seam.said  # args[-1]: layers

    def _words(self, tokens: Tensor) -> dict[str, Tensor]:
        if self._embeddings is None:
            return super()._words(tokens)
        more = tokens - self.vocab_size  # from 0 on: one of the fork's own
        own = self.model.get_input_embeddings()(tokens.where(more < 0, 0))
        return {"inputs_embeds": torch.where(more[..., None] < 0, own, self._embeddings[more.clamp(min=0)])}

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        """Nothing but counting; once the whole model has kept, there is nothing left to keep."""
        if self._grown:
            self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
            self._grown, self._tree = 0, None

    def free(self, row: int) -> None:
        self.follow()

    def fork(self, layers: Sequence[int], **_: Any) -> LayerFork:
        raise ModelError("a fork of a model has no forks of its own; ask the target for another one")


def _fitting(model: Any, embeddings: Tensor) -> Tensor:
    """``embeddings [n, H]`` where the model's own lie, in its dtype; ModelError if it cannot be fed such."""
    name, weight = type(model).__name__, model.get_input_embeddings().weight
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name} takes no inputs_embeds, so it cannot be fed anything but tokens of its own")
    if embeddings.dim() != 2 or embeddings.shape[1] != weight.shape[1]:
        raise ModelError(
            f"embeddings {list(embeddings.shape)} do not stand beside those of {name}, which are vectors of "
            f"{weight.shape[1]}; take some that were made for it"
        )
    return embeddings.to(weight.device, weight.dtype)


#: Of each model, whether it may be run in two parts, by the number of layers in the first.
_known: WeakKeyDictionary[Any, dict[int, bool]] = WeakKeyDictionary()


@torch.inference_mode()
def _continues(model: Any, shared: int) -> bool:
    """Does ``model`` say the same if its first ``shared`` layers run a token at a time, and the others afterwards?

    Not so where later layers read more of earlier ones than hidden states. One small pass whole, and one in parts.
    """
    known = _known.setdefault(model, {})
    if shared not in known:
        whole = object.__new__(RaggedLM)
        whole._prepare(model, 1, TRIAL_LENGTH)
        ids = on_device([[(7 * i + 3) % whole.vocab_size for i in range(9)]], whole.device)
        try:
            whole.start(0, ids[0, :6].tolist())
            said = whole.forward(ids[:, 5:])[0]
            whole.commit([0])
            fork = LayerFork(whole, range(shared), tried=True)
            whole._forks.add(fork)
            fork.forward(ids[:, 5:6])
            fork.commit([1])
            fork.forward(ids[:, 6:7])
            known[shared] = close(whole.forward(ids[:, 5:], resume_from=fork)[0], said, model.dtype)
        except (TypeError, ValueError, IndexError, KeyError, RuntimeError, AttributeError):
            known[shared] = False  # layers that hand on something else than hidden states
    return known[shared]
