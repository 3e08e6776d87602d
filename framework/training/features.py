"""The target's hidden states of texts: one pass of the target a text, kept in memory while there is room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contracts.models import LoadedModel
from ..contracts.training import Batch, Text
from ..errors import UsageError
from .texts import pad


class Features:
    """Hidden states of the layers that a trainee asks for.

    Args:
        target: the frozen target.
        layers: as in `Trainee.hidden_layers`.
        gib: most memory, in GiB, for what is kept, in bfloat16 on the host; texts that come later are computed anew
            each time.
    """

    def __init__(self, target: LoadedModel, layers: Sequence[int], gib: float):
        self.target, self.layers = target, tuple(layers)
        self.room = int(gib * 2**30)
        self._kept: dict[int | None, Tensor] = {}  # [L, layers, H] by number, never None

    def batch(self, texts: Sequence[Text], numbers: Sequence[int | None]) -> Batch:
        """The texts, and the features of text ``numbers[i]``, which is always the same text (None: not kept)."""
        device = self.target.model.device
        ids, mask, predicts = pad(texts, device)
        lacking = [i for i, number in enumerate(numbers) if number not in self._kept]
        # On a CPU one at a time: so a text's features do not depend on its neighbours in the batch, and a run that
        # was interrupted repeats them bit for bit. The processor is busy with the rows of a single text anyway.
        new: dict[int, Tensor] = {}  # by place in the batch
        for part in [[i] for i in lacking] if device.type == "cpu" else [lacking] * bool(lacking):
            width = max(len(texts[i].ids) for i in part)
            states = self._states(ids[part, :width], mask[part, :width])
            new |= {i: states[row, : len(texts[i].ids)].cpu() for row, i in enumerate(part)}
        hidden = [new[i] if i in new else self._kept[number] for i, number in enumerate(numbers)]
        for i, states in new.items():
            number, size = numbers[i], states.numel() * states.element_size()
            if number is not None and size <= self.room:
                self.room -= size
                self._kept[number] = states
        padded = torch.nn.utils.rnn.pad_sequence(hidden, batch_first=True)
        return Batch(ids, mask, predicts, padded.to(device).float())

    def batches(self, texts: Sequence[Text], first: int, size: int = 8) -> Iterator[Batch]:
        """All ``texts``, ``size`` at a time; their numbers count down from ``first``."""
        for start in range(0, len(texts), size):
            part = texts[start : start + size]
            yield self.batch(part, [first - start - i for i in range(len(part))])

    @torch.no_grad()
    def _states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """``[n, L, layers, H]`` bfloat16."""
        inner = any(layer != -1 for layer in self.layers)
        out = self.target.model.get_decoder()(
            input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=inner
        )
        states = [out.last_hidden_state if layer == -1 else out.hidden_states[layer] for layer in self.layers]
        return torch.stack(states, 2).to(torch.bfloat16)


@torch.no_grad()
def check_head(target: LoadedModel) -> None:
    """Raise UsageError if the target's law is more than the softmax of its head times its last hidden state."""
    model: Any = target.model
    module = model.get_output_embeddings()
    ids = torch.arange(2, device=model.device)[None]
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    plain = hidden @ module.weight.T.to(hidden.dtype)
    difference = model(ids).logits.float().softmax(-1) - plain.float().softmax(-1)
    if not float(difference.abs().sum(-1).max()) < 0.05:
        raise UsageError(
            f"the head of {target.name} is more than a matrix (a bias, a scale or a soft cap follows it), which "
            "crossdraft train does not know; train for another target"
        )
