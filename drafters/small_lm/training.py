"""Distil a small LM drafter from the target.

The student starts as a few of the target's own layers with the target's embedding, final norm and head; the
embedding (tied to the head) stays the target's and is not stored. It learns to match the target's whole law on
text the target wrote: Y. Zhou et al., "DistillSpec: Improving Speculative Decoding via Knowledge Distillation",
2024. Untrained, such a student accepts next to nothing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ...framework.contracts.errors import UsageError
from ...framework.contracts.models import LoadedModel
from ...framework.contracts.training import Batch, Text, Trainee, TrainingConfig
from ...framework.contracts.training_options import integers, option
from ...framework.models.load import load_model
from ...framework.models.shared_embedding import save_sharing_embedding, shares_embedding
from ...framework.training.losses import SampledHead, distil, overlap


@dataclass(frozen=True, kw_only=True)
class SmallLMTraining(TrainingConfig):
    """How to distil a small LM. The head is most of the cost, which ``sampled_vocab`` lowers."""

    name = "small-lm"

    layers: tuple[int, ...] = option(
        (),
        "target layers the student starts from, in order, e.g. 0,1,29 (default: first two, last)",
        type=integers,
        at_least=0,
        at_most=4095,
    )
    sampled_vocab: int = option(
        2048,
        "random tokens a step that stand for all that do not occur in the texts (0: full vocabulary)",
        at_least=0,
        at_most=10_000_000,
    )

    def fitted(self, target: LoadedModel) -> Self:
        last = target.model.config.get_text_config().num_hidden_layers - 1
        return self if self.layers else replace(self, layers=tuple(sorted({0, min(1, last), last})))

    def trainee(self, target: LoadedModel) -> Trainee:
        return SmallLMTrainee(target, self)


class SmallLMTrainee(Trainee):
    """The student of :func:`student_of`."""

    def __init__(self, target: LoadedModel, recipe: SmallLMTraining):
        super().__init__(target, recipe)
        self.drafter = {"name": "small-lm"}
        self.student: Any = student_of(target.model, recipe.layers)

    def start_from(self, name: str) -> None:
        if not shares_embedding(name, self.target):
            raise UsageError(
                f"{name} has an embedding of its own; a student shares the target's, as what crossdraft train small-lm "
                "writes does"
            )
        start: Any = load_model(name, dtype=torch.float32, share_with=self.target).model
        own, found = self.student.state_dict(), start.state_dict()
        if {key: t.shape for key, t in own.items()} != {key: t.shape for key, t in found.items()}:
            layers = start.config.get_text_config().num_hidden_layers
            raise UsageError(
                f"{name} has {layers} layers or another shape than the {len(self.recipe.layers)} layers of the target "
                "that --layers names; name as many"
            )
        with torch.no_grad():
            for key, weight in self.trained.items():
                weight.copy_(found[key])

    def prepare(self, texts: Sequence[Text]) -> None:
        occurring = (token for text in texts for token in text.response)
        self._rows = SampledHead(self.head, occurring, self.recipe.sampled_vocab, self.recipe.seed)

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        states, target = self._states(batch)
        return distil(states, target, *self._rows.at(step), self.recipe.divergence)

    def acceptance(self, batch: Batch) -> list[Tensor]:
        states, target = self._states(batch)
        return list(overlap(states[None], target, self.head, self.head))

    def _states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """``[tokens, H]`` final hidden states of student and target that predict response tokens."""
        out = self.student.get_decoder()(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
        return out.last_hidden_state[batch.predicts], batch.hidden[batch.predicts][:, 0]

    def export(self, directory: Path, held_out: Iterable[Batch]) -> None:
        student = copy.deepcopy(self.student).to(torch.bfloat16)
        student.set_input_embeddings(copy.deepcopy(self.target.model.get_input_embeddings()).to(torch.bfloat16))
        student.tie_weights()
        save_sharing_embedding(student, directory, embedding_of=self.target.name)

    def describe(self) -> tuple[str, str, str]:
        r, size = self.recipe, sum(weight.numel() for weight in self.trained.values())
        start = r.start_from and f"another small LM (`{self.start_name}`)"
        start = start or f"the target's layers {', '.join(map(str, r.layers))}"
        return (
            f"A small LM drafter for {self.target_name}",
            f"A causal LM of {len(r.layers)} layers ({size / 1e6:.1f} M trained parameters) that drafts for "
            f"`{self.target_name}`. It starts from {start} and shares the target's embedding and "
            "head, which are not stored here.",
            f"{r.divergence} on response tokens (DistillSpec), over the tokens that occur in the texts and "
            f"{r.sampled_vocab} random ones a step standing for the rest (0: the full vocabulary)",
        )


def student_of(target: Any, layers: Sequence[int]) -> Any:
    """A model with ``layers`` of ``target``, sharing its embedding tensor.

    Raises:
        UsageError: a layer the target does not have, or an untied head (the student could not share it).
    """
    config = copy.deepcopy(target.config)
    count = config.num_hidden_layers
    if not layers or any(not 0 <= i < count for i in layers):
        raise UsageError(f"--layers must name layers 0 to {count - 1} of the target, got {list(layers)}")
    if target.get_input_embeddings().weight is not target.get_output_embeddings().weight:
        raise UsageError(
            "the target's head is not tied to its embedding; a student that shares both needs tied weights"
        )
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layers]
    student = type(target)(config).to(target.device, torch.float32)
    source = target.state_dict()
    state = {}
    for key in student.state_dict():
        old = re.sub(r"\.(\d+)\.", lambda m: f".{layers[int(m[1])]}.", key, count=1)
        state[key] = source[old]
    student.load_state_dict(state)
    student.set_input_embeddings(target.get_input_embeddings())
    student.tie_weights()
    student.get_input_embeddings().weight.requires_grad_(False)
    return student
