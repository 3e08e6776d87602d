"""Hidden states of the target along texts, computed once per text and cached in memory up to a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from crossdraft import LoadedModel, UsageError
from crossdraft.models import recorded

from .contract import Batch, Text
from .texts import pad


class Features:
    """Hidden states of the layers requested by a trainee.

    Args:
        target: the frozen target.
        layers: as in `Trainee.hidden_layers`.
        gib: size of the cache in GiB (bfloat16, on the host); texts that do not fit are recomputed each time.
    """

    def __init__(self, target: LoadedModel, layers: Sequence[int], gib: float):
        self.target, self.layers = target, tuple(layers)
        self.free_bytes = int(gib * 2**30)
        self._kept: dict[int | None, Tensor] = {}  # [L, layers, H] by number, never None

    def batch(self, texts: Sequence[Text], numbers: Sequence[int | None]) -> Batch:
        """Batch of texts and features; ``numbers[i]`` is the cache key of text i (None: not cached)."""
        device = self.target.model.device
        ids, mask, predicts = pad(texts, device)
        lacking = [i for i, number in enumerate(numbers) if number not in self._kept]
        # One at a time on a CPU, so that features do not depend on the batch and a resumed run is bit-identical. The
        # tokens of a single text keep the CPU busy anyway.
        new: dict[int, Tensor] = {}  # by index in the batch
        for part in [[i] for i in lacking] if device.type == "cpu" else [lacking] * bool(lacking):
            width = max(len(texts[i].ids) for i in part)
            states = self._states(ids[part, :width], mask[part, :width])
            new |= {i: states[row, : len(texts[i].ids)].cpu() for row, i in enumerate(part)}
        hidden = [new[i] if i in new else self._kept[number] for i, number in enumerate(numbers)]
        for i, states in new.items():
            number, size = numbers[i], states.numel() * states.element_size()
            if number is not None and size <= self.free_bytes:
                self.free_bytes -= size
                self._kept[number] = states
        padded = torch.nn.utils.rnn.pad_sequence(hidden, batch_first=True)
        return Batch(ids, mask, predicts, padded.to(device).float())

    def batches(self, texts: Sequence[Text], first: int, size: int = 8) -> Iterator[Batch]:
        """Yield batches of ``size`` texts; cache keys count down from ``first``."""
        for start in range(0, len(texts), size):
            part = texts[start : start + size]
            yield self.batch(part, [first - start - i for i in range(len(part))])

    @torch.no_grad()
    def _states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states ``[n, L, layers, H]`` bfloat16."""
        inner = any(layer != -1 for layer in self.layers)
        model: Any = self.target.model
        with recorded(model, self.layers, model.config.get_text_config().num_hidden_layers) as recorder:
            out = _decoder(model)(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=inner)
        states = recorder.select(self.layers, [*(out.hidden_states[:-1] if inner else ()), out.last_hidden_state])
        return torch.stack(states, 2).to(torch.bfloat16)


def _decoder(model: Any) -> Any:
    """The part of a causal LM that returns hidden states."""
    decoder = model.get_decoder()
    if decoder is not model and isinstance(decoder, PreTrainedModel):
        return decoder
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), decoder)


@torch.no_grad()
def check_head(target: LoadedModel) -> None:
    """Raise UsageError if the target's logits are not its head times the last hidden state."""
    model: Any = target.model
    module = model.get_output_embeddings()
    ids = torch.arange(2, device=model.device)[None]
    hidden = _decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
    plain = hidden @ module.weight.T.to(hidden.dtype)
    difference = model(ids).logits.float().softmax(-1) - plain.float().softmax(-1)
    if not float(difference.abs().sum(-1).max()) < 0.05:
        raise UsageError(
            f"the head of {target.name} is more than a matrix (it has a bias, a scale or a soft cap), which crossdraft "
            "train does not support; use another target"
        )
