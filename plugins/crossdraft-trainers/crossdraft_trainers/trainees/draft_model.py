"""Distil a draft model drafter from the target.

The student is initialised with a few of the target's layers and shares its embedding, final norm and head; the
embedding (tied to the head) is frozen and not stored. It is trained on the target's full distribution over text
written by the target: Y. Zhou et al., "DistillSpec: Improving Speculative Decoding via Knowledge Distillation",
2024. Without training, almost none of such a student's tokens are accepted.

As in that paper, the divergence is an option (token by token, or sequence-level, which is ``nll`` on the target's
texts), and so is the author of the texts: the target, the current student (``on_policy: 1``), or a mixture. A student
that drafts beside others learns the tokens that they miss (``misses_of``): the boost-tuning of X. Miao et al.,
"SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and Verification",
ASPLOS 2024, section 3.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from crossdraft import Argument, LoadedModel, UsageError, load_model
from crossdraft.models import save_sharing_embedding, shares_embedding

from ..contract import Batch, Divergence, Text, Trainee, TrainingConfig, public
from ..losses import SampledHead, distil, overlap, sampled_vocab_option
from .on_policy_texts import own_answers


class DraftModelTraining(TrainingConfig):
    """Options of ``crossdraft train draft-model``. Most of the cost is the head; ``sampled_vocab`` reduces it."""

    name = "draft-model"

    divergence: Literal[Divergence, "nll"] = Field(
        "forward-kl",
        description="divergence of target and student distributions; nll: sequence-level, -log q of the texts",
    )
    on_policy: float = Field(
        0.0,
        description="share of the answers of a step that are sampled from the current student (1: on-policy)",
        ge=0,
        le=1,
    )
    misses_of: str = Field(
        "",
        description="other draft models, with commas: learn the tokens that none of them predicts (boost-tuning)",
    )
    layers: Annotated[tuple[Annotated[int, Field(ge=0, le=4095)], ...], Argument(commas=True)] = Field(
        (),
        description="target layers the student starts from, in order, e.g. 0,1,29 (default: first two, last)",
        max_length=256,
    )
    sampled_vocab: int = sampled_vocab_option()

    @model_validator(mode="after")
    def _check_on_policy(self) -> Self:
        if self.on_policy and self.divergence == "nll":
            raise UsageError(
                f"--on-policy {self.on_policy:g}: must be 0 with --divergence nll; a student does not learn from its "
                "own samples"
            )
        if self.on_policy and self.misses_of:
            raise UsageError(
                f"--on-policy {self.on_policy:g}: must be 0 with --misses-of; misses are found on the target's texts"
            )
        return self

    @property
    def others(self) -> list[str]:
        return [name.strip() for name in self.misses_of.split(",") if name.strip()]

    def with_target_defaults(self, target: LoadedModel) -> Self:
        last = target.model.config.get_text_config().num_hidden_layers - 1
        return self if self.layers else self.model_copy(update={"layers": tuple(sorted({0, min(1, last), last}))})

    @classmethod
    def export_servable(cls, model: str, target: LoadedModel, directory: Path) -> str:
        shared = target if shares_embedding(model, target) else None
        loaded = load_model(model, dtype=target.model.dtype, device="cpu", share_with=shared)
        loaded.model.save_pretrained(directory)
        loaded.tokenizer.save_pretrained(directory)
        return "a complete causal LM with its embedding and tokenizer: transformers, vLLM and SGLang load the directory"

    def trainee(self, target: LoadedModel) -> Trainee:
        return DraftModelTrainee(target, self)


class DraftModelTrainee(Trainee):
    """Distils the student of :func:`student_of`."""

    def __init__(self, target: LoadedModel, recipe: DraftModelTraining):
        super().__init__(target, recipe)
        self.drafter = {"name": "draft-model"}
        self.student: Any = student_of(target.model, recipe.layers)
        self._others = {name: self._load(name) for name in recipe.others}
        # Cache over epochs, by token ids and length of the answer.
        self._missed: dict[tuple[tuple[int, ...], int], Tensor] = {}
        if self._others:
            names = ", ".join(map(public, self._others))
            self.measured_by += f", restricted to tokens that none of {names} ranks first"

    def _load(self, name: str) -> LoadedModel:
        """Load another student of this target."""
        if not shares_embedding(name, self.target):
            raise UsageError(
                f"{name} has an embedding of its own; name a student that shares the target's, as "
                "crossdraft train draft-model writes"
            )
        return load_model(name, dtype=torch.float32, share_with=self.target)

    def made_with(self) -> dict[str, str]:
        return {f"misses of {name}": other.sha256 for name, other in self._others.items()}

    def start_from(self, name: str) -> None:
        start: Any = self._load(name).model
        own, initial = self.student.state_dict(), start.state_dict()
        if {key: t.shape for key, t in own.items()} != {key: t.shape for key, t in initial.items()}:
            layers = start.config.get_text_config().num_hidden_layers
            raise UsageError(
                f"{name} has {layers} layers or another shape than the {len(self.recipe.layers)} layers of the target "
                "that --layers names; name as many"
            )
        with torch.no_grad():
            for key, weight in self.trained.items():
                weight.copy_(initial[key])

    def prepare(self, texts: Sequence[Text]) -> None:
        occurring = (token for text in texts for token in text.response)
        self._rows = SampledHead(self.head, occurring, self.recipe.sampled_vocab, self.recipe.seed)

    def rewritten(self, texts: Sequence[Text], step: int) -> Sequence[Text]:
        """Replace each answer, with probability ``on_policy``, by a student's sample, at most as long."""
        share = self.recipe.on_policy
        if not share:
            return texts
        chosen = [i for i, draw in enumerate(torch.rand(len(texts)).tolist()) if draw < share]
        if not chosen:
            return texts
        originals, result = [texts[i] for i in chosen], list(texts)
        prompts, limits = [text.prompt for text in originals], [len(text.response) for text in originals]
        answers = own_answers(self.student, prompts, limits, self.target.eos_token_ids)
        for i, text, answer in zip(chosen, originals, answers, strict=True):
            result[i] = Text(text.prompt, answer, "student")
        return result

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        states, target = self._states(batch)
        tokens = None
        if self.recipe.divergence == "nll":
            tokens = self._rows.row_indices(batch.ids[:, 1:][self._learned_positions(batch)[:, :-1]])
        rows, bias = self._rows.at(step)
        return distil(states, target, rows, bias, self.recipe.divergence, beta=self.recipe.beta, tokens=tokens)

    def acceptance(self, batch: Batch) -> list[Tensor]:
        states, target = self._states(batch)
        return list(overlap(states[None], target, self.head, self.head))

    def _states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """``[tokens, H]`` final hidden states of student and target at the positions to learn."""
        positions = self._learned_positions(batch)
        out = self.student.get_decoder()(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
        return out.last_hidden_state[positions], batch.hidden[positions][:, 0]

    def _learned_positions(self, batch: Batch) -> Tensor:
        """``[n, L]`` bool: `Batch.predicts`, without tokens that another draft model ranks first."""
        if not self._others:
            return batch.predicts
        positions = batch.predicts.clone()
        sizes = torch.stack([batch.mask.sum(1), batch.predicts.sum(1)], 1).tolist()
        for row, (ids, (size, answer)) in enumerate(zip(batch.ids.tolist(), sizes, strict=True)):
            text = tuple(ids[:size]), answer
            if text not in self._missed:
                self._missed[text] = self._misses(batch.ids[row : row + 1, :size], batch.predicts[row, :size])
            positions[row, :size] &= self._missed[text]
        return positions

    @torch.no_grad()
    def _misses(self, ids: Tensor, predicts: Tensor) -> Tensor:
        """``[L]`` bool: positions of ``predicts [L]`` at which no other model ranks the next token of ``ids`` first."""
        missed = predicts.clone()
        positions = predicts.nonzero().squeeze(1)
        for other in self._others.values():
            states = other.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, positions]
            predicted = (states @ self.head.to(states.dtype).T).argmax(-1)
            missed[positions] &= predicted != ids[0, positions + 1]
        return missed

    def export(self, directory: Path, held_out: Iterable[Batch]) -> None:
        student = copy.deepcopy(self.student).to(torch.bfloat16)
        student.set_input_embeddings(copy.deepcopy(self.target.model.get_input_embeddings()).to(torch.bfloat16))
        student.tie_weights()
        save_sharing_embedding(student, directory, embedding_of=self.target.name)

    def describe(self) -> tuple[str, str, str]:
        r, size = self.recipe, sum(weight.numel() for weight in self.trained.values())
        start = r.start_from and f"another draft model (`{self.start_name}`)"
        start = start or f"the target's layers {', '.join(map(str, r.layers))}"
        return (
            f"A draft model for {self.target_name}",
            f"A causal LM of {len(r.layers)} layers ({size / 1e6:.1f} M trained parameters) that drafts for "
            f"`{self.target_name}`. It starts from {start} and shares the target's embedding and "
            "head, which are not stored here.",
            f"{_objective(r)} on response tokens (DistillSpec){_sources(r)}, over the tokens that occur in the texts "
            f"and {r.sampled_vocab} random ones per step for the rest (0: the full vocabulary)",
        )


def _objective(recipe: DraftModelTraining) -> str:
    if recipe.divergence == "nll":
        return "sequence-level -log q"
    return f"jsd with beta {recipe.beta:g}" if recipe.divergence == "jsd" else recipe.divergence


def _sources(recipe: DraftModelTraining) -> str:
    """Suffix that describes a selection of tokens or texts, empty for all of them."""
    if recipe.on_policy:
        return f", {recipe.on_policy:.0%} of the answers written by the student itself at each step"
    if recipe.others:
        return f", those that {', '.join(map(public, recipe.others))} {'misses' if len(recipe.others) == 1 else 'miss'}"
    return ""


def student_of(target: Any, layers: Sequence[int]) -> Any:
    """Build a model from ``layers`` of ``target`` that shares its embedding tensor.

    Raises:
        UsageError: the target lacks a layer, or its head is not tied to the embedding.
    """
    config = copy.deepcopy(target.config)
    count = config.num_hidden_layers
    if not layers or any(not 0 <= i < count for i in layers):
        raise UsageError(f"--layers {list(layers)}: must name layers of the target, 0 to {count - 1}")
    if target.get_input_embeddings().weight is not target.get_output_embeddings().weight:
        raise UsageError(
            "the target's head is not tied to its embedding, but a student shares both; use a target with tied weights"
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
