"""Train look-ahead embeddings for a frozen target.

G. Monea, A. Joulin, E. Grave, "PaSS: Parallel Speculative Sampling", 2023, arXiv:2311.13581. Only L vectors are
trained. A text is cut at random positions and continued by the embeddings; after e_j the target should predict the
token j positions later. All cuts of a text share one pass: the embeddings of each cut are a block after the text, and
a mask lets a block attend to the text up to its cut, and to itself.

The paper trains on cross-entropy with the text's token; here the loss is the divergence from the target's distribution
of that token, as for Medusa's heads: on text sampled from the target at temperature 1 both have the same mean, and this
one has less variance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from crossdraft_drafters.self_speculation.pass_weights import read_embeddings, save_embeddings
from pydantic import Field
from torch import Tensor, nn

from crossdraft import LoadedModel, UsageError, cache_argument
from crossdraft.models import load_checkpoint

from ..contract import Batch, Text, Trainee, TrainingConfig
from ..losses import SampledHead, distil, overlap, sampled_vocab_option


class PassTraining(TrainingConfig):
    """Options of ``crossdraft train pass``."""

    name = "pass"

    learning_rate: float = Field(1e-2, description="of AdamW at its peak", gt=0, le=10)
    weight_decay: float = Field(0.0, description="of AdamW", ge=0, le=10)
    look_ahead: int = Field(4, description="number of embeddings; drafts have one more token", ge=1, le=64)
    cuts: int = Field(16, description="random positions per text and step at which it is cut", ge=1, le=1024)
    sampled_vocab: int = sampled_vocab_option()

    def trainee(self, target: LoadedModel) -> Trainee:
        return PassTrainee(target, self)


class LookAhead(nn.Module):
    """``embeddings [L, H]``, each initialised to the mean of the target's embedding."""

    def __init__(self, own: Tensor, count: int):
        super().__init__()
        self.embeddings = nn.Parameter(own.detach().float().mean(0).repeat(count, 1))


class PassTrainee(Trainee):
    """Trains L vectors; gradients flow through the frozen target."""

    student: LookAhead
    measured_by = (
        "mean sum of min(p, q), temperature 1, given the text before it; the draft's first token is the target's own "
        "and left out"
    )

    def __init__(self, target: LoadedModel, recipe: PassTraining):
        super().__init__(target, recipe)
        self.drafter = {"name": "pass"}
        self._decoder: Any = target.model.get_decoder()
        self._embed: Any = target.model.get_input_embeddings()
        self.student = LookAhead(self._embed.weight, recipe.look_ahead)

    def start_from(self, name: str) -> None:
        size = self._embed.weight.shape[1]
        embeddings = read_embeddings(load_checkpoint(name), size=size, sha256=self.target.sha256)
        if len(embeddings) != self.recipe.look_ahead:
            raise UsageError(
                f"{name} has {len(embeddings)} look-ahead embeddings, not {self.recipe.look_ahead}; add --look-ahead "
                f"{len(embeddings)}"
            )
        with torch.no_grad():
            self.student.embeddings.copy_(embeddings)

    def prepare(self, texts: Sequence[Text]) -> None:
        self._check_length(max(len(text.ids) for text in texts))
        occurring = (token for text in texts for token in text.response)
        self._rows = SampledHead(self.head, occurring, self.recipe.sampled_vocab, self.recipe.seed)

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        rows, bias = self._rows.at(step)
        states, keep, target = self._aligned(batch)
        r = self.recipe
        losses, same = zip(
            *(
                distil(state[kept], hidden[kept], rows, bias, r.divergence, beta=r.beta)
                for state, kept, hidden in zip(states, keep, target, strict=True)
            ),
            strict=True,
        )
        return torch.stack(losses).mean(), same[0]

    def acceptance(self, batch: Batch) -> list[Tensor]:
        return [
            overlap(state[kept][None], hidden[kept], self.head, self.head)[0]
            for state, kept, hidden in zip(*self._aligned(batch), strict=True)
        ]

    def _aligned(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Align embeddings and target on the n cuts of all texts.

        Returns:
            ``[L, n, H]`` the target's last hidden states after each embedding; ``[L, n]`` bool, True if the draft can
            occur in decoding; and ``[L, n, H]`` the target's hidden states for the same tokens.
        """
        cuts, exists = self._cuts(batch)
        positions = cuts[..., None] + 1 + torch.arange(self.recipe.look_ahead, device=cuts.device)  # [texts, cuts, L]
        inside, length = positions < batch.ids.shape[1], batch.ids.shape[1]
        index = positions.clamp(max=length - 1)
        rows = torch.arange(len(cuts), device=cuts.device)[:, None, None]
        keep = exists[..., None] & inside & batch.predicts[rows, index]
        states = self._states(batch, cuts)
        target = batch.hidden[rows, index, 0]
        return tuple(x.flatten(0, 1).transpose(0, 1) for x in (states, keep, target))  # type: ignore[return-value]

    def _cuts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Draw cuts: ``[texts, cuts]`` int64, the index of the last token before each, and bool, True if it exists.

        Cuts lie after the prompt's last token or later, with at least two tokens of the response after them.
        """
        possible = batch.predicts[:, :-1] & batch.predicts[:, 1:]
        # Drawn on the CPU: the same cuts on every device.
        order = torch.rand(possible.shape).to(possible.device).masked_fill(~possible, -1.0)
        cuts = order.topk(min(self.recipe.cuts, possible.shape[1])).indices
        return cuts, possible.gather(1, cuts)

    def _states(self, batch: Batch, cuts: Tensor) -> Tensor:
        """``[texts, cuts, L, H]``: the target's last hidden states of the embeddings after each cut."""
        from transformers import DynamicCache

        (n, length), count, look_ahead = batch.ids.shape, cuts.shape[1], self.recipe.look_ahead
        self._check_length(length)
        cache = DynamicCache()
        cached = {cache_argument(self._decoder.forward): cache, "use_cache": True}
        with torch.no_grad():  # the text has no gradient
            self._decoder(input_ids=batch.ids, attention_mask=batch.mask, **cached)
        step = torch.arange(look_ahead, device=cuts.device)
        block = torch.arange(count, device=cuts.device).repeat_interleave(look_ahead)
        position = step.repeat(count)
        text = torch.arange(length, device=cuts.device) <= cuts.repeat_interleave(look_ahead, 1)[..., None]
        own = (block[:, None] == block) & (position[:, None] >= position)
        allowed = torch.cat([text, own.expand(n, -1, -1)], 2)[:, None]
        embeddings = self.student.embeddings.to(self._embed.weight.dtype)
        dtype = embeddings.dtype
        # Positions beyond the text are masked, and may exceed the context length.
        positions = (cuts[..., None] + 1 + step).flatten(1).clamp(max=length - 1)
        out = self._decoder(
            inputs_embeds=embeddings.repeat(count, 1).expand(n, -1, -1),
            attention_mask=torch.zeros((), dtype=dtype, device=cuts.device).where(allowed, torch.finfo(dtype).min),
            position_ids=positions,
            **cached,
        )
        return out.last_hidden_state.unflatten(1, (count, look_ahead))

    def _check_length(self, length: int) -> None:
        """Raise UsageError if a layer of the target has an attention window shorter than ``length`` tokens."""
        config = self.target.model.config.get_text_config()
        try:
            sliding = getattr(config, "sliding_window", None)
        except RuntimeError:  # raised by transformers for several windows; the decoder rejects such a model
            sliding = None
        if getattr(config, "use_sliding_window", True) is False:
            sliding = None
        for window in (sliding, getattr(config, "attention_chunk_size", None)):
            if window is not None and length > window:
                raise UsageError(
                    f"a text has {length} tokens, but layers of {self.target_name} have an attention window of "
                    f"{window}; shorten the texts with --max-prompt and --max-response"
                )

    def export(self, directory: Path, held_out: Iterable[Batch]) -> None:
        save_embeddings(directory, self.student.embeddings, target=self.target_name, sha256=self.target.sha256)

    def describe(self) -> tuple[str, str, str]:
        count, size = self.student.embeddings.shape
        return (
            f"Look-ahead embeddings for {self.target_name}",
            f"{count} vectors of {size} with which `{self.target_name}` itself drafts {count + 1} tokens in one pass "
            "(PaSS). The first of them follows the target's distribution and is not part of the figures here; a "
            "step is two passes of the target.",
            f"{self.recipe.divergence} to the target's distribution of each token, at {self.recipe.cuts} random "
            f"positions per text and step, over the tokens that occur in the texts and {self.recipe.sampled_vocab} "
            "random ones per step for the rest (0: the full vocabulary)",
        )
