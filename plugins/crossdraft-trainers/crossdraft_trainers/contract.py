"""The contract of a kind of training: a config, which a plug-in registers, and its trainee.

A kind of training is one file: a :class:`TrainingConfig` with its options (command-line options that are also stored in
the checkpoint, which can be resumed only with equal ones), and a :class:`Trainee` with the student, its loss and its
file format. The trainer handles texts, the target's hidden states, steps, checkpoints and the model card.

An interrupted run resumes with identical results. A step may therefore depend only on the student (parameters and
persistent buffers are in the checkpoint), the batch, the step number, and random numbers of PyTorch, NumPy and Python,
which the trainer seeds for each step.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from crossdraft import LM, LoadedModel, UsageError
from crossdraft.commands import Options


@dataclass(frozen=True)
class Text:
    """One conversation: ``prompt`` and ``response`` token ids; only the response is trained on."""

    prompt: list[int]
    response: list[int]
    source: str

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response


#: Loss between the target's p and the student's q, in order of the names: KL(p, q), KL(q, p),
#: beta KL(p, m) + (1 - beta) KL(q, m) with m = beta p + (1 - beta) q, 1 - sum min(p, q), -log sum min(p, q), or a
#: mixture of KL(p, q) and 1 - sum min(p, q) that shifts to the latter as sum min(p, q) grows.
#: Y. Zhou, K. Lyu, A. S. Rawat, A. K. Menon, A. Rostamizadeh, S. Kumar, J.-F. Kagy, R. Agarwal, "DistillSpec:
#: Improving Speculative Decoding via Knowledge Distillation", 2024; A. Samarin, S. Krutikov, A. Shevtsov, S. Skvortsov,
#: F. Fisin, A. Golubev, "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding", 2026.
Divergence = Literal["forward-kl", "reverse-kl", "jsd", "tv", "lk", "lk-hybrid"]


class TrainingConfig(Options, ABC):
    """Settings of a training run. A subclass is one kind of training; it may add options and change defaults.

    The learning rate is warmed up linearly and then falls along a cosine to 5 % of its peak.
    """

    #: The registered name.
    name: ClassVar[str]

    divergence: Divergence = Field(
        "forward-kl", description="divergence of target and student distributions to minimise"
    )
    beta: float = Field(0.5, description="of --divergence jsd: the target's share of the mixture", gt=0, lt=1)
    epochs: int = Field(3, description="passes over the training texts", ge=1, le=1000)
    minutes: float = Field(
        0.0, description="training time, in minutes, after which to stop; 0: all epochs", ge=0, le=1_000_000
    )
    patience: int = Field(
        0,
        description="evaluations (ten in all) without a higher held-out block efficiency after which to stop; the "
        "weights of the highest are kept (0: train to the end, and keep the last)",
        ge=0,
        le=1000,
    )
    batch_tokens: int = Field(2048, description="padded tokens a step", ge=1, le=10_000_000)
    learning_rate: float = Field(6e-4, description="of AdamW at its peak", gt=0, le=10)
    warm_up: int = Field(30, description="steps until the learning rate is at its peak", ge=0, le=1_000_000_000)
    weight_decay: float = Field(0.01, description="of AdamW", ge=0, le=10)
    save_minutes: float = Field(10.0, description="minutes of training between checkpoints", ge=0, le=1_000_000)
    start_from: str = Field(
        "",
        description="a drafter of this kind (registered name, directory or Hub id) whose weights training starts from",
    )
    seed: int = Field(
        0, description="of the order of texts, of initial weights and of sampled tokens", ge=0, le=2**32 - 1
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beta != 0.5 and self.divergence != "jsd":
            raise UsageError(f"--beta {self.beta:g}: must be left out without --divergence jsd")
        return self

    @abstractmethod
    def trainee(self, target: LoadedModel) -> Trainee:
        """Return the trainee. Raises UsageError for options that do not fit the target."""

    @classmethod
    def export_servable(cls, model: str, target: LoadedModel, directory: Path) -> str:
        """Write the trained drafter ``model`` to ``directory`` in the layout that serving engines load.

        Weights are written in the target's dtype. Returns a sentence on how engines use it.

        Raises:
            UsageError: engines do not load this kind of drafter.
            ModelError: it cannot be read.
        """
        raise UsageError(f"{cls.name} has no layout that engines load; crossdraft itself uses {model} as it is")

    def with_target_defaults(self, target: LoadedModel) -> Self:
        """A copy with defaults that depend on the target filled in."""
        return self


@dataclass
class Batch:
    """Right-padded texts and the target's hidden states.

    Attributes:
        ids: ``[n, L]`` int64 tokens.
        mask: ``[n, L]`` 1 for tokens, 0 for padding.
        predicts: ``[n, L]`` bool, True if the next token belongs to a response.
        hidden: ``[n, L, layers, H]`` float32 hidden states of the trainee's ``hidden_layers``.
    """

    ids: Tensor
    mask: Tensor
    predicts: Tensor
    hidden: Tensor

    def drafts(self, position: int) -> Tensor:
        """``[n, max(L - 1 - position, 0)]`` bool: at t, token t + 2 + ``position`` is drafted with t + 1 as the root.

        Only response tokens are drafted; the first root is the prompt's last token. The target distribution of the
        drafted token is at t + 1 + ``position``.
        """
        count = max(self.ids.shape[1] - 1 - position, 0)
        return self.predicts[:, 1 : 1 + count] & self.predicts[:, 1 + position : 1 + position + count]


class Trainee(ABC):
    """A student, its loss, and its file format.

    Attributes:
        student: the module, possibly created in `prepare`. Parameters that require a gradient are trained; checkpoints
            hold them and the persistent buffers.
        hidden_layers: layers of the target whose hidden states it uses, as in `DraftTraits.hidden_layers` but resolved:
            0 = embeddings, i = output of layer i, -1 = after the final norm.
        drafter: config of a drafter that uses the result, without ``model``.
        measured, measured_by: name and definition of the result of `acceptance`, for display.
    """

    student: nn.Module
    hidden_layers: tuple[int, ...] = (-1,)
    measured: str = "acceptance"
    measured_by: str = "mean sum of min(p, q), temperature 1, given the text before it"
    drafter: dict[str, Any]

    def __init__(self, target: LoadedModel, recipe: Any):
        self.target, self.recipe = target, recipe

    def prepare(self, texts: Sequence[Text]) -> None:
        """Prepare what depends on the training texts; called once, before the first step."""

    def made_with(self) -> dict[str, str]:
        """Inputs besides options, texts and target, by name: digests of other models, for example."""
        return {}

    def rewritten(self, texts: Sequence[Text], step: int) -> Sequence[Text]:
        """Return the texts to train on in place of ``texts``, by default ``texts`` themselves.

        For on-policy training. Texts that are new objects are scored by the target. Each may be at most as long as the
        one that it replaces. May use random numbers, as `loss` does.
        """
        return texts

    def start_from(self, name: str) -> None:
        """Initialise from the weights of a drafter; called before `prepare`.

        Raises:
            UsageError: the drafter does not fit the recipe or cannot be trained further.
            ModelError: the drafter cannot be read.
        """
        raise UsageError(f"this kind of drafter cannot start from another one; leave out --start-from {name}")

    @property
    def head(self) -> Tensor:
        """``[V, H]`` output embedding of the target."""
        module: Any = self.target.model.get_output_embeddings()
        return module.weight

    @property
    def target_name(self) -> str:
        """Name of the target in a model card, without directories."""
        return public(self.target.name)

    @property
    def start_name(self) -> str:
        """Name of the drafter that training starts from, in the same form."""
        return public(self.recipe.start_from)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters that the optimiser changes, by name."""
        return {name: weight for name, weight in self.student.named_parameters() if weight.requires_grad}

    def drafting_with(self, out: Path) -> dict[str, Any]:
        """Config of a drafter that uses the result in ``out``."""
        return {**self.drafter, "model": str(out)}

    @abstractmethod
    def loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """The loss, and the mean sum_x min(p, q) of the first drafted token for the progress bar."""

    @abstractmethod
    def acceptance(self, batch: Batch) -> list[Tensor]:
        """Per draft position, ``[tokens]``: sum_x min(p, q) at temperature 1, given the preceding text.

        One entry if the position does not matter. Called without gradients.
        """

    @abstractmethod
    def export(self, directory: Path, held_out: Iterable[Batch]) -> None:
        """Write the result in the format that its drafter loads."""

    @abstractmethod
    def describe(self) -> tuple[str, str, str]:
        """Return title, paragraph and loss for the model card, without line breaks."""


class SearchConfig(Options, ABC):
    """Settings of a search for a drafter's options. A subclass is one kind of search.

    The search is Bayesian optimisation (TPE of optuna).
    """

    #: The registered name.
    name: ClassVar[str]
    start_from: ClassVar[str] = ""

    trials: int = Field(200, description="number of trials", ge=1, le=1_000_000)
    minutes: float = Field(0.0, description="minutes after which to stop; 0: all trials", ge=0, le=1_000_000)
    sample: int = Field(512, description="response tokens that each trial is evaluated on", ge=1, le=1_000_000)
    gamma: int = Field(8, description="maximum draft length", ge=1, le=1024)
    temperature: float = Field(1.0, description="of target and drafts", ge=0, le=100)
    seed: int = Field(0, description="random seed of texts and proposals", ge=0, le=2**32 - 1)

    @abstractmethod
    def search(self, target: LoadedModel) -> Search:
        """Return the search. Raises UsageError if the target does not fit."""


class Search(ABC):
    """The search space, and the fork of the target for a point of it.

    Attributes:
        drafter: config of a drafter that uses the result, without ``checkpoint``.
    """

    drafter: dict[str, Any]
    start_name = ""
    measured, measured_by = "acceptance", "mean sum of min(p, q), given the text before it"

    def __init__(self, target: LoadedModel, recipe: Any):
        self.target, self.recipe = target, recipe

    @property
    def target_name(self) -> str:
        """Name of the target, see `Trainee.target_name`."""
        return public(self.target.name)

    @abstractmethod
    def first(self) -> Sequence[Mapping[str, Any]]:
        """First trial: values of the parameters that `suggest` requests, by name."""

    @abstractmethod
    def suggest(self, trial: Any) -> dict[str, Any]:
        """JSON settings requested from an ``optuna.trial.Trial``."""

    @abstractmethod
    def fork(self, lm: LM, settings: Mapping[str, Any]) -> LM | None:
        """The fork of the target's slots for ``settings``; None if they are not usable."""

    @abstractmethod
    def describe(self) -> tuple[str, str, str]:
        """Return title, paragraph and objective for the card, as `Trainee.describe`."""

    def worth(self, acceptance: float, cost: float) -> tuple[float, int]:
        """The speed-up to be maximised, and the draft length at which it is reached.

        The maximum over gamma of (1 - a^(gamma+1)) / ((1 - a) (gamma c + 1)) with a the acceptance of a token given
        those before it and c the cost of a draft step relative to a pass of the target (Y. Leviathan, M. Kalman, Y.
        Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023, theorem 3.8).
        """
        lengths = range(1, self.recipe.gamma + 1)
        return max((sum(acceptance**i for i in range(n + 1)) / (n * cost + 1), n) for n in lengths)

    def drafting_with(self, out: Path) -> dict[str, Any]:
        """Config of a drafter that uses the result in ``out``."""
        return {**self.drafter, "checkpoint": str(out)}


def bfloat16_copy(module: nn.Module) -> nn.Module:
    """A copy with parameters in bfloat16."""
    result = copy.deepcopy(module)
    for weight in result.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    return result


def public(name: str) -> str:
    """Return comma-separated names with absolute paths cut to their last part, for model cards."""
    return ",".join(Path(part).name if Path(part).is_absolute() else part for part in name.split(","))
