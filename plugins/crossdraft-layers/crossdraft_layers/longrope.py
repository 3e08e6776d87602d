"""Slots of models with longrope positions that may outgrow the short frequencies.

Such a model rotates every token of a text by one set of frequencies up to a length, its boundary, and by another one
in longer texts, from the first token on. So a slot has two caches: one for nodes that end a short text, and from the
first step whose nodes may pass the boundary, one for those that end a long text. A step that needs both makes two
passes; the first of them also feeds the committed tokens again, once per sequence.

Longrope: Y. Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", ICML 2024.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from crossdraft import Fork, ModelError, ModelPreparation, ancestor_mask, on_device
from crossdraft.framework.lm.architectures import longrope_boundary, needs_trial, outgrows_longrope
from crossdraft.framework.lm.ragged_lm import borrowed
from crossdraft.models import ForwardPass, RaggedLM, check_model, text_config

_thread = threading.local()


class _ForcedLong:
    """Added to the class of rotary embeddings: inside `_long_frequencies` they use the long frequencies."""

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        boundary, plain = getattr(_thread, "boundary", None), super().forward  # type: ignore[misc]
        if boundary is None:
            return plain(x, position_ids, *args, **kwargs)
        # The longest position of a pass decides, so each row gets one more token, which is cut off again.
        last = torch.full_like(position_ids[..., :1], boundary)
        out = plain(x, torch.cat([position_ids, last], -1), *args, **kwargs)
        return tuple(part[..., :-1, :] for part in out) if isinstance(out, tuple) else out[..., :-1, :]


@contextmanager
def _long_frequencies(boundary: int) -> Iterator[None]:
    """Within the context, in this thread, longrope uses the frequencies of texts longer than ``boundary`` tokens."""
    before = getattr(_thread, "boundary", None)
    _thread.boundary = boundary
    try:
        yield
    finally:
        _thread.boundary = before


@cache
def _forced(cls: type) -> type:
    return type(cls.__name__, (_ForcedLong, cls), {"__module__": cls.__module__})


def _has_longrope(module: nn.Module) -> bool:
    kind = getattr(module, "rope_type", None)
    return "longrope" in (kind.values() if isinstance(kind, dict) else [kind])


class _LongPass(ForwardPass):
    """Passes with the long frequencies."""

    boundary: int

    def run(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
        with _long_frequencies(self.boundary):
            return super().run(*args, **kwargs)


class LongRopeLM:
    """B slots of a causal LM with longrope: :class:`~crossdraft.framework.contracts.lm.LM` without forks.

    Args:
        model: a supported model.
        boundary: longest text with the short frequencies, see `longrope_boundary`.
    """

    def __init__(self, model: Any, batch_size: int, max_length: int, boundary: int):
        for module in model.modules():
            if _has_longrope(module) and not isinstance(module, _ForcedLong):
                module.__class__ = _forced(type(module))
        self._short = RaggedLM(borrowed(ForwardPass, model, batch_size, max_length), batch_size, max_length).lend()
        long = borrowed(_LongPass, model, batch_size, max_length)
        assert isinstance(long, _LongPass)
        long.boundary = boundary
        self._long = RaggedLM(long, batch_size, max_length).lend()
        self.context_length = self._long.context_length
        # Nodes behind the boundary must not change the frequencies of a short pass, whose outputs for them are unused.
        self._short.context_length = boundary
        self.model, self.boundary, self.batch_size, self.max_length = model, boundary, batch_size, max_length
        self.vocab_size, self.device = self._long.vocab_size, self._long.device
        self.lengths = [0] * batch_size
        self.passes = 0
        self.hidden_layers: tuple[float, ...] = ()
        self._in_short, self._in_long = [False] * batch_size, [False] * batch_size
        self._tokens = torch.zeros(batch_size, max_length, dtype=torch.long, device=self.device)
        self._calls: list[tuple[Tensor, Tensor | None]] = []  # of `forward` since the last commit
        self._fed = 0  # of these, calls that the long pass has seen

    @torch.inference_mode()
    def start(self, row: int, prompt: Sequence[int]) -> Tensor | None:
        self._drop_nodes()
        self._short.hidden_layers = self._long.hidden_layers = self.hidden_layers
        count = self.lengths[row] = len(prompt) - 1
        self._in_short[row], self._in_long[row] = count < self.boundary, count >= self.boundary
        self._tokens[row, :count] = on_device(list(prompt[:-1]), self.device)
        return (self._short if self._in_short[row] else self._long).start(row, prompt)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, resume_from: Fork | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self._short.hidden_layers = self._long.hidden_layers = self.hidden_layers
        self._calls.append((tokens, parents))
        total = sum(call.shape[1] for call, _ in self._calls)
        crossing = [
            row
            for row, length in enumerate(self.lengths)
            if self._in_short[row] and not self._in_long[row] and length + total > self.boundary
        ]
        for row in crossing:
            self._long.start(row, [*self._tokens[row, : self.lengths[row]].tolist(), 0])
            self._in_long[row], self._fed = True, 0  # a start drops the nodes of all rows
        short = self._short.forward(tokens, parents) if any(self._in_short) or not any(self._in_long) else None
        long = None
        if any(self._in_long):
            for call in self._calls[self._fed :]:
                long = self._long.forward(*call)
            self._fed = len(self._calls)
        self.passes = self._short.passes + self._long.passes
        if long is None or short is None:
            result = long or short
            assert result is not None
            return result
        is_short = self._positions()[:, -tokens.shape[1] :] < self.boundary
        # A row that is in one of them only, whatever the other returned for it.
        only_short = on_device([int(not inside) for inside in self._in_long], self.device).bool()
        is_short = is_short | only_short[:, None]
        logits = torch.where(is_short[..., None], short[0], long[0])
        if short[1] is None or long[1] is None:
            return logits, None
        return logits, torch.where(is_short[..., None, None], short[1], long[1])

    def _positions(self) -> Tensor:
        """``[B, N]``, of all nodes since the last commit."""
        parents, count = [], 0
        for tokens, own in self._calls:
            width = tokens.shape[1]
            chain = torch.arange(count - 1, count + width - 1, device=self.device)
            parents.append(chain.expand_as(tokens) if own is None else own)
            count += width
        depth = ancestor_mask(torch.cat(parents, 1), count).sum(-1) - 1
        return on_device(self.lengths, self.device)[:, None] + depth

    @torch.inference_mode()
    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        if self._calls and any(counts):
            nodes = torch.cat([tokens for tokens, _ in self._calls], 1)
            chosen = nodes if path is None else nodes.gather(1, path.clamp(min=0))
            for row, (count, length) in enumerate(zip(counts, self.lengths, strict=True)):
                self._tokens[row, length : length + count] = chosen[row, :count]
        for lm, rows in ((self._short, self._in_short), (self._long, self._in_long)):
            own = [count if inside else 0 for count, inside in zip(counts, rows, strict=True)]
            lm.commit(own, path if any(own) else None)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        for row, length in enumerate(self.lengths):
            if self._in_short[row] and self._in_long[row] and length >= self.boundary:
                self._short.free(row)
                self._in_short[row] = False
        self._drop_nodes()

    @torch.inference_mode()
    def free(self, row: int) -> None:
        self._short.free(row)
        self._long.free(row)
        self._in_short[row] = self._in_long[row] = False
        self.lengths[row] = 0

    def fork(self, layers: Sequence[int], **_: Any) -> Fork:
        raise ModelError(
            f"{type(self.model).__name__} has longrope positions and slots longer than {self.boundary} tokens, so some "
            "of its layers cannot be run alone; shorten the prompts or max_new_tokens"
        )

    def _drop_nodes(self) -> None:
        self._calls, self._fed = [], 0


class LongRope(ModelPreparation):
    """`LongRopeLM` for models whose texts may outgrow the short frequencies."""

    name = "longrope"

    @classmethod
    def slots(cls, model: Any, batch_size: int, max_length: int) -> LongRopeLM | None:
        config = text_config(model)
        boundary = longrope_boundary(config)
        if boundary is None or not outgrows_longrope(config, max_length):
            return None
        check_model(model, max_length, needs_trial(model), both_ropes=True)
        return LongRopeLM(model, batch_size, max_length, boundary)
