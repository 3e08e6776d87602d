"""Train look-ahead embeddings for a frozen target.

G. Monea, A. Joulin, E. Grave, "PaSS: Parallel Speculative Sampling", 2023, arXiv:2311.13581. L vectors are all that is
learnt. At random places of a text its rest is cut off, the embeddings stand there instead, and behind e_j the target is
to say the token that is j places further on. All places of a text share one pass over it: the embeddings of each are a
block of their own behind the text, and a mask lets a block see the text up to its place, and itself.

Where the paper has cross-entropy with the text's token, the embeddings here learn the target's whole law of that token,
as Medusa's heads do: on text that was sampled from the target at temperature 1 both have the same mean, and this one
has less noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...framework.contracts.models import LoadedModel
from ...framework.contracts.training import Batch, Text, Trainee, TrainingConfig
from ...framework.contracts.training_options import option
from ...framework.errors import UsageError
from ...framework.models.checkpoint import load_checkpoint
from ...framework.training.losses import SampledHead, distil, overlap
from .pass_weights import read_embeddings, save_embeddings


@dataclass(frozen=True, kw_only=True)
class PassTraining(TrainingConfig):
    """How to train look-ahead embeddings."""

    name = "pass"

    learning_rate: float = option(1e-2, "of AdamW at its peak", above=0, at_most=10)
    weight_decay: float = option(0.0, "of AdamW", at_least=0, at_most=10)
    look_ahead: int = option(4, "embeddings; one more token can be drafted", at_least=1, at_most=64)
    cuts: int = option(
        16, "places of each text, other ones at each step, at which it is cut off", at_least=1, at_most=1024
    )
    sampled_vocab: int = option(
        2048,
        "random tokens a step that stand for all that do not occur in the texts (0: full vocabulary)",
        at_least=0,
        at_most=10_000_000,
    )

    def trainee(self, target: LoadedModel) -> Trainee:
        return PassTrainee(target, self)


class LookAhead(nn.Module):
    """``embeddings [L, H]``; at first each is the mean of the target's own."""

    def __init__(self, own: Tensor, count: int):
        super().__init__()
        self.embeddings = nn.Parameter(own.detach().float().mean(0).repeat(count, 1))


class PassTrainee(Trainee):
    """L vectors; the target, through which their gradients flow, stays as it is."""

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
        found = read_embeddings(load_checkpoint(name), size=size, sha256=self.target.sha256)
        if len(found) != self.recipe.look_ahead:
            raise UsageError(
                f"{name} has {len(found)} look-ahead embeddings, not {self.recipe.look_ahead}; say --look-ahead "
                f"{len(found)}"
            )
        with torch.no_grad():
            self.student.embeddings.copy_(found)

    def prepare(self, texts: Sequence[Text]) -> None:
        self._fits(max(len(text.ids) for text in texts))
        occurring = (token for text in texts for token in text.response)
        self._rows = SampledHead(self.head, occurring, self.recipe.sampled_vocab, self.recipe.seed)

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        rows, bias = self._rows.at(step)
        states, keep, target = self._aligned(batch)
        r = self.recipe
        losses, same = zip(
            *(
                distil(mine[kept], law[kept], rows, bias, r.divergence, beta=r.beta)
                for mine, kept, law in zip(states, keep, target, strict=True)
            ),
            strict=True,
        )
        return torch.stack(losses).mean(), same[0]

    def acceptance(self, batch: Batch) -> list[Tensor]:
        return [
            overlap(mine[kept][None], law[kept], self.head, self.head)[0]
            for mine, kept, law in zip(*self._aligned(batch), strict=True)
        ]

    def _aligned(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """What drafts the same token, side by side, for the places of all texts.

        Returns ``[L, n, H]``, what the target hands to its head behind each embedding, ``[L, n]`` bool, whether that
        is a draft that can come up, and ``[L, n, H]``, the target's hidden states for the same tokens.
        """
        cuts, there = self._cuts(batch)
        ahead = cuts[..., None] + 1 + torch.arange(self.recipe.look_ahead, device=cuts.device)  # [texts, cuts, L]
        inside, length = ahead < batch.ids.shape[1], batch.ids.shape[1]
        at = ahead.clamp(max=length - 1)
        rows = torch.arange(len(cuts), device=cuts.device)[:, None, None]
        keep = there[..., None] & inside & batch.predicts[rows, at]
        states = self._behind(batch, cuts)
        law = batch.hidden[rows, at, 0]
        return tuple(x.flatten(0, 1).transpose(0, 1) for x in (states, keep, law))  # type: ignore[return-value]

    def _cuts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """``[texts, cuts]`` int64, the last token of the text that is left, and bool, whether there is such a place.

        All from the prompt's last token on, up to where two tokens of the response follow.
        """
        possible = batch.predicts[:, :-1] & batch.predicts[:, 1:]
        # Drawn on the CPU: the same places on every device.
        order = torch.rand(possible.shape).to(possible.device).masked_fill(~possible, -1.0)
        cuts = order.topk(min(self.recipe.cuts, possible.shape[1])).indices
        return cuts, possible.gather(1, cuts)

    def _behind(self, batch: Batch, cuts: Tensor) -> Tensor:
        """``[texts, cuts, L, H]``: the target's last hidden states of the embeddings that stand behind ``cuts``."""
        from transformers import DynamicCache

        (n, length), count, look_ahead = batch.ids.shape, cuts.shape[1], self.recipe.look_ahead
        self._fits(length)
        cache = DynamicCache()
        with torch.no_grad():  # what no embedding precedes
            self._decoder(input_ids=batch.ids, attention_mask=batch.mask, past_key_values=cache, use_cache=True)
        step = torch.arange(look_ahead, device=cuts.device)
        block = torch.arange(count, device=cuts.device).repeat_interleave(look_ahead)
        place = step.repeat(count)
        text = torch.arange(length, device=cuts.device) <= cuts.repeat_interleave(look_ahead, 1)[..., None]
        own = (block[:, None] == block) & (place[:, None] >= place)
        allowed = torch.cat([text, own.expand(n, -1, -1)], 2)[:, None]
        embeddings = self.student.embeddings.to(self._embed.weight.dtype)
        dtype = embeddings.dtype
        # Positions beyond the text are nobody's draft, and may be beyond the context.
        positions = (cuts[..., None] + 1 + step).flatten(1).clamp(max=length - 1)
        out = self._decoder(
            inputs_embeds=embeddings.repeat(count, 1).expand(n, -1, -1),
            attention_mask=torch.zeros((), dtype=dtype, device=cuts.device).where(allowed, torch.finfo(dtype).min),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return out.last_hidden_state.unflatten(1, (count, look_ahead))

    def _fits(self, length: int) -> None:
        """Raise UsageError if some layer of the target does not see all of a text of ``length`` tokens."""
        config = self.target.model.config.get_text_config()
        try:
            sliding = getattr(config, "sliding_window", None)
        except RuntimeError:  # of several, transformers says; the decoder refuses such a model
            sliding = None
        if getattr(config, "use_sliding_window", True) is False:
            sliding = None
        for window in (sliding, getattr(config, "attention_chunk_size", None)):
            if window is not None and length > window:
                raise UsageError(
                    f"a text of {length} tokens reaches beyond the window of {window} that layers of "
                    f"{self.target_name} look back; shorten the texts with --max-prompt and --max-response"
                )

    def export(self, directory: Path, held_out: Iterable[Batch]) -> None:
        save_embeddings(directory, self.student.embeddings, target=self.target_name, sha256=self.target.sha256)

    def describe(self) -> tuple[str, str, str]:
        count, size = self.student.embeddings.shape
        return (
            f"Look-ahead embeddings for {self.target_name}",
            f"{count} vectors of {size} behind which `{self.target_name}` itself drafts {count + 1} tokens in one pass "
            "(PaSS). The first of them follows its own law, and is no part of the figures here; a step is two passes "
            "of the target.",
            f"{self.recipe.divergence} to the target's law of each token, at {self.recipe.cuts} random places of each "
            f"text a step, over the tokens that occur in the texts and {self.recipe.sampled_vocab} random ones a step "
            "standing for the rest (0: the full vocabulary)",
        )
