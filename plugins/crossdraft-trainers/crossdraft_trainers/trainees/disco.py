"""Train the classifier of ``policy: disco`` for a target and a draft model.

J. Mamou et al., "Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language Models", 2024,
section 3. An example is a drafted token: its `disco.features`, and a label, accepted or not. Drafts start at every
position of texts written by the target. Token i is drawn from the drafter's q at that position and accepted with
probability min(1, p / q) (at temperature 0: if the two argmaxes agree); a draft ends at its first rejected token, or
after gamma tokens. The threshold is the one with the best F1 on held-out texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from crossdraft import LoadedModel, Sampling, UsageError, load_model
from crossdraft.drafters.autoregressive.disco import KIND, features
from crossdraft.models import same_tokenizer, shares_embedding

from ..contract import Batch, Trainee, TrainingConfig


class DiscoTraining(TrainingConfig):
    """Options of ``crossdraft train disco``."""

    name = KIND

    model: str = Field("", description="draft model: name, directory or Hub id (required)")
    gamma: int = Field(10, description="longest draft", ge=1, le=1024)
    top: int = Field(10, description="number of largest probabilities of q in the features", ge=1, le=4096)
    width: int = Field(32, description="hidden units", ge=1, le=4096)
    # Two small layers, randomly initialised: the default rate would leave them untrained after a few dozen steps.
    learning_rate: float = Field(1e-2, description="of AdamW at its peak", gt=0, le=10)
    warm_up: int = Field(5, description="steps until the learning rate is at its peak", ge=0, le=1_000_000_000)
    temperature: float = Field(1.0, description="of target and drafts", ge=0, le=100)

    def trainee(self, target: LoadedModel) -> Trainee:
        if not self.model:
            raise UsageError("--model: must name the draft model whose drafts the classifier judges")
        if self.divergence != "forward-kl":
            raise UsageError(f"--divergence {self.divergence}: must be left out, because a classifier has two classes")
        return DiscoTrainee(target, self)


class DiscoTrainee(Trainee):
    """A two-layer classifier on `disco.features`."""

    measured = "accuracy"
    measured_by = "share of drafted tokens whose acceptance the classifier predicts, given the text before them"

    def __init__(self, target: LoadedModel, recipe: DiscoTraining):
        super().__init__(target, recipe)
        same = {"dtype": target.model.dtype, "device": target.model.device}
        share = target if shares_embedding(recipe.model, target) else None
        drafting = load_model(recipe.model, share_with=share, **same)
        if difference := same_tokenizer(target.tokenizer, drafting.tokenizer):
            raise UsageError(f"{recipe.model} cannot draft for {target.name}: {difference}")
        self.drafting: Any = drafting.model.requires_grad_(False)
        self.drafter = {"name": "draft-model", "model": recipe.model, "gamma": recipe.gamma}
        # At temperature 0 the confidence is the softmax of the logits.
        self._target, self._draft = (Sampling(temperature=t) for t in (recipe.temperature, recipe.temperature or 1.0))
        self._first = nn.Linear(recipe.top + 3, recipe.width)
        self._second = nn.Linear(recipe.width, 1)
        self.student = nn.Sequential(self._first, nn.ReLU(), self._second).to(self.head.device)

    def drafting_with(self, out: Path) -> dict[str, Any]:
        return {**self.drafter, "policy": {"name": KIND, "checkpoint": str(out)}}

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        x, accepted = self._examples(batch)
        logits = self.student(x)[:, 0].float()
        accuracy = ((logits > 0) == accepted).float().mean()
        return functional.binary_cross_entropy_with_logits(logits, accepted.float()), accuracy

    def acceptance(self, batch: Batch) -> list[Tensor]:
        x, accepted = self._examples(batch)
        return [((self.student(x)[:, 0] > 0) == accepted).float()]

    def export(self, directory: Path, held_out: Iterable[Batch]) -> None:
        examples = [self._examples(batch) for batch in held_out]
        scores = torch.cat([self.student(x)[:, 0].sigmoid() for x, _ in examples]).double().cpu().numpy()
        accepted = torch.cat([accepted for _, accepted in examples]).cpu().numpy()
        settings = {
            "kind": KIND,
            "target": self.target_name,
            "model": self.recipe.model,
            "gamma": self.recipe.gamma,
            "top": self.recipe.top,
            "threshold": best_f1(scores, accepted),
            "weight1": self._first.weight.tolist(),
            "bias1": self._first.bias.tolist(),
            "weight2": self._second.weight[0].tolist(),
            "bias2": float(self._second.bias[0]),
        }
        (directory / "settings.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")

    def describe(self) -> tuple[str, str, str]:
        return (
            f"When to stop drafting for {self.target_name}",
            f"A classifier of {self.recipe.width} hidden units that predicts whether `{self.target_name}` accepts a "
            f"token drafted by `{Path(self.recipe.model).name}` (DISCO); use it as checkpoint of the policy disco.",
            "binary cross-entropy of accepted and rejected tokens of drafts from every position of the texts, each up "
            "to its first rejected token",
        )

    def _examples(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Features of drafted tokens, ``[n, top + 3]``, and their labels, ``[n]`` bool: accepted by the target.

        The drafter is scored once at every position of the texts; a draft starts at each of them and follows the text.
        """
        gamma, predicts = self.recipe.gamma, batch.predicts
        row, column = predicts.nonzero(as_tuple=True)
        with torch.no_grad():
            out = self.drafting.get_decoder()(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
            logits = self.drafting.get_output_embeddings()(out.last_hidden_state[row, column])
            size = min(logits.shape[-1], len(self.head))
            q = self._draft.probs(logits[:, :size])
            p = self._target.probs(batch.hidden[row, column][:, 0].to(self.head.dtype) @ self.head[:size].T)
        if self.recipe.temperature:
            token = torch.multinomial(q, 1)[:, 0]
            ratio = p.gather(1, token[:, None])[:, 0] / q.gather(1, token[:, None])[:, 0]
            is_match = torch.rand_like(ratio) < ratio
        else:
            token = q.argmax(-1)
            is_match = p.gather(1, token[:, None])[:, 0] > 0
        number = torch.full(
            (predicts.shape[0], predicts.shape[1] + gamma), -1, device=predicts.device
        )  # -1 = not scored
        number[row, column] = torch.arange(len(row), device=predicts.device)
        position = torch.arange(gamma, device=predicts.device)
        draft = number[row[:, None], column[:, None] + position]
        accepted = is_match[draft] & (draft >= 0)
        before = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], 1)
        drafted = (before.long().cumprod(1) > 0) & (draft >= 0)
        x = features(q, token, torch.zeros_like(token), self.recipe.top)[draft[drafted]]
        x[:, -1] = position.expand_as(draft)[drafted] / gamma
        return x, accepted[drafted]


def best_f1(scores: np.ndarray, accepted: np.ndarray) -> float:
    """The threshold on ``scores [n]`` with the best F1 for the labels ``accepted [n]`` bool."""
    thresholds = np.unique(scores)
    predicted = scores >= thresholds[:, None]
    hits = (predicted & accepted).sum(1)
    return float(thresholds[np.argmax(2 * hits / (predicted.sum(1) + accepted.sum()))])
