"""Train the classifier of ``policy: disco`` for a target and a draft model.

J. Mamou et al., "Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language Models", 2024,
section 3. An example is a drafted token: what `disco.features` says of it, and whether the target accepted it. Drafts
start at every place of texts that the target wrote, token i is drawn from the drafter's law there and accepted with
probability min(1, p / q) (at temperature 0: if the two argmaxes agree), and a draft goes on up to its first rejected
token, or to gamma. The threshold is the one with the best F1 on held-out texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...framework.contracts.models import LoadedModel
from ...framework.contracts.sampling import Sampling
from ...framework.contracts.training import Batch, Trainee, TrainingConfig
from ...framework.contracts.training_options import option
from ...framework.errors import UsageError
from ...framework.models.load import load_model, same_tokenizer
from ...framework.models.shared_embedding import shares_embedding
from .disco import KIND, features


@dataclass(frozen=True, kw_only=True)
class DiscoTraining(TrainingConfig):
    """How to train a classifier of drafted tokens."""

    name = KIND

    model: str = option("", "the draft model that drafts: name, directory or Hub id (required)")
    gamma: int = option(10, "longest draft", at_least=1, at_most=1024)
    top: int = option(10, "largest probabilities of the drafter's law that are read", at_least=1, at_most=4096)
    width: int = option(32, "hidden units", at_least=1, at_most=4096)
    # Two small layers from nothing: at the rate of models they would know nothing after a few dozen steps.
    learning_rate: float = option(1e-2, "of AdamW at its peak", above=0, at_most=10)
    warm_up: int = option(5, "steps until the learning rate is at its peak", at_least=0, at_most=1_000_000_000)
    temperature: float = option(1.0, "of target and drafts", at_least=0, at_most=100)

    def trainee(self, target: LoadedModel) -> Trainee:
        if not self.model:
            raise UsageError("--model: must name the draft model whose drafts the classifier is to judge")
        if self.divergence != "forward-kl":
            raise UsageError(
                f"--divergence {self.divergence}: must be left out, because a classifier learns a yes or no"
            )
        return DiscoTrainee(target, self)


class DiscoTrainee(Trainee):
    """Two layers on `disco.features`."""

    measured = "accuracy"
    measured_by = "share of drafted tokens whose fate the classifier foretells, given the text before them"

    def __init__(self, target: LoadedModel, recipe: DiscoTraining):
        super().__init__(target, recipe)
        same = {"dtype": target.model.dtype, "device": target.model.device}
        share = target if shares_embedding(recipe.model, target) else None
        drafting = load_model(recipe.model, share_with=share, **same)
        if difference := same_tokenizer(target.tokenizer, drafting.tokenizer):
            raise UsageError(f"{recipe.model} cannot draft for {target.name}: {difference}")
        self.drafting: Any = drafting.model.requires_grad_(False)
        self.drafter = {"name": "draft-model", "model": recipe.model, "gamma": recipe.gamma}
        # At temperature 0 a drafter believes in the softmax of its logits.
        self._target, self._draft = (Sampling(temperature=t) for t in (recipe.temperature, recipe.temperature or 1.0))
        self._first = nn.Linear(recipe.top + 3, recipe.width)
        self._second = nn.Linear(recipe.width, 1)
        self.student = nn.Sequential(self._first, nn.ReLU(), self._second).to(self.head.device)

    def drafting_with(self, out: Path) -> dict[str, Any]:
        return {**self.drafter, "policy": {"name": KIND, "checkpoint": str(out)}}

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        x, accepted = self._examples(batch)
        said = self.student(x)[:, 0].float()
        right = ((said > 0) == accepted).float().mean()
        return functional.binary_cross_entropy_with_logits(said, accepted.float()), right

    def acceptance(self, batch: Batch) -> list[Tensor]:
        x, accepted = self._examples(batch)
        return [((self.student(x)[:, 0] > 0) == accepted).float()]

    def export(self, directory: Path, held_out: Iterable[Batch]) -> None:
        found = [self._examples(batch) for batch in held_out]
        said = torch.cat([self.student(x)[:, 0].sigmoid() for x, _ in found]).double().cpu().numpy()
        accepted = torch.cat([accepted for _, accepted in found]).cpu().numpy()
        facts = {
            "kind": KIND,
            "target": self.target_name,
            "model": self.recipe.model,
            "gamma": self.recipe.gamma,
            "top": self.recipe.top,
            "threshold": best_f1(said, accepted),
            "weight1": self._first.weight.tolist(),
            "bias1": self._first.bias.tolist(),
            "weight2": self._second.weight[0].tolist(),
            "bias2": float(self._second.bias[0]),
        }
        (directory / "settings.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")

    def describe(self) -> tuple[str, str, str]:
        return (
            f"When to stop drafting for {self.target_name}",
            f"A classifier of {self.recipe.width} hidden units that foretells whether `{self.target_name}` accepts a "
            f"token drafted by `{Path(self.recipe.model).name}` (DISCO); use it as checkpoint of the policy disco.",
            "binary cross-entropy of accepted and rejected tokens of drafts from every place of the texts, each up "
            "to its first rejected one",
        )

    def _examples(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What is read of drafted tokens, ``[n, top + 3]``, and which of them the target accepted, ``[n]`` bool.

        The drafter is scored once at every place. A draft starts at each of these, and goes on along them.
        """
        gamma, told = self.recipe.gamma, batch.predicts
        row, at = told.nonzero(as_tuple=True)
        with torch.no_grad():
            out = self.drafting.get_decoder()(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
            logits = self.drafting.get_output_embeddings()(out.last_hidden_state[row, at])
            size = min(logits.shape[-1], len(self.head))
            q = self._draft.probs(logits[:, :size])
            p = self._target.probs(batch.hidden[row, at][:, 0].to(self.head.dtype) @ self.head[:size].T)
        if self.recipe.temperature:
            token = torch.multinomial(q, 1)[:, 0]
            ratio = p.gather(1, token[:, None])[:, 0] / q.gather(1, token[:, None])[:, 0]
            fate = torch.rand_like(ratio) < ratio
        else:
            token = q.argmax(-1)
            fate = p.gather(1, token[:, None])[:, 0] > 0
        number = torch.full((told.shape[0], told.shape[1] + gamma), -1, device=told.device)  # of each place, -1 = none
        number[row, at] = torch.arange(len(row), device=told.device)
        place = torch.arange(gamma, device=told.device)
        draft = number[row[:, None], at[:, None] + place]
        accepted = fate[draft] & (draft >= 0)
        before = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], 1)
        drafted = (before.long().cumprod(1) > 0) & (draft >= 0)
        read = features(q, token, torch.zeros_like(token), self.recipe.top)[draft[drafted]]
        read[:, -1] = place.expand_as(draft)[drafted] / gamma
        return read, accepted[drafted]


def best_f1(said: np.ndarray, accepted: np.ndarray) -> float:
    """The threshold of ``said [n]`` at which "accepted" has the best F1 for ``accepted [n]`` bool."""
    thresholds = np.unique(said)
    above = said >= thresholds[:, None]
    hits = (above & accepted).sum(1)
    return float(thresholds[np.argmax(2 * hits / (above.sum(1) + accepted.sum()))])
