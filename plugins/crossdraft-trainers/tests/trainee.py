"""A third-party kind of training, which imports the public interface only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from crossdraft_trainers.contract import Batch, Text, Trainee, TrainingConfig
from crossdraft_trainers.losses import distil, overlap
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from crossdraft import LoadedModel, Register, hookimpl


class OneHeadTraining(TrainingConfig):
    name = "one-head"

    dropout: float = Field(0.1, description="share of what the head reads that is left out in a step", ge=0, lt=1)

    def trainee(self, target: LoadedModel) -> OneHead:
        return OneHead(target, self)


class OneHead(Trainee):
    """A single Medusa head of one block, trained with dropout, and written so that `medusa` drafts with it."""

    def __init__(self, target: LoadedModel, recipe: OneHeadTraining):
        super().__init__(target, recipe)
        self.drafter: dict[str, Any] = {"name": "medusa"}
        size = self.head.shape[1]
        self.student = nn.Linear(size, size, device=self.head.device)
        self.bias = torch.zeros(len(self.head), device=self.head.device)

    def prepare(self, texts: list[Text]) -> None:
        self.longest = max(len(text.response) for text in texts)

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        r = self.recipe
        return distil(*self.states(batch, r.dropout), self.head, self.bias, r.divergence, beta=r.beta)

    def acceptance(self, batch: Batch) -> list[Tensor]:
        output, target = self.states(batch, 0)
        return list(overlap(output[None], target, self.head, self.head))

    def states(self, batch: Batch, dropout: float) -> tuple[Tensor, Tensor]:
        """Head and target states of the drafted tokens, ``[drafts, H]``."""
        hidden, drafts = batch.hidden[:, :, 0], batch.drafts(0)
        output = hidden + functional.silu(self.student(functional.dropout(hidden, dropout)))
        return output[:, :-1][drafts], hidden[:, 1:][drafts]

    def export(self, directory: Path, held_out: Iterable[Batch]) -> None:
        tensors = {f"0.0.linear.{name}": tensor for name, tensor in self.student.state_dict().items()}
        save_file(tensors, directory / "medusa_lm_head.safetensors")
        (directory / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1}))

    def describe(self) -> tuple[str, str, str]:
        title = f"One Medusa head for {self.target_name}"
        return title, f"It reads responses of up to {self.longest} tokens.", f"{self.recipe.divergence} with dropout"


@hookimpl
def crossdraft_register_trainers(register: Register) -> None:
    register("one-head", OneHeadTraining, summary="a single Medusa head")
