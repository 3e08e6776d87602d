"""MLP speculators: recurrent stages on the target's last hidden state draft a chain.

D. Wertheimer, J. Rosenkranz, T. Parnell et al., "Accelerating Production LLMs with Combined Token/Embedding
Speculators", 2024, arXiv:2404.19124. With s_0 = h the target's last hidden state after its final norm (scaled: its RMS
norm over the root of 2), x_0 the root, and stage i = 1 .. n with its own or shared tables,

    s_i = GELU(LN_i(P_i s_{i-1} + a E_i[x_{i-1}])),   logits_i = W_i s_i,   LN_i(y) = w_i y / rms(y) + b_i,

a the weight of embeddings over that of states, 0.5^(0.5 / n) =: c and a = sqrt((1 - c^2) I / 2) / c, I the width of the
states. Each token is conditioned on the tokens before it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from crossdraft import (
    CHAIN,
    MOST_LEVELS,
    Draft,
    DraftContext,
    DraftTraits,
    Sampling,
    Scores,
    Sequences,
    StepRng,
    StrategyConfig,
    Verdict,
    on_device,
)
from crossdraft.drafters.autoregressive.draft_model import grow_chain
from crossdraft.drafters.autoregressive.policies import POLICIES, Policy, Static
from crossdraft.heads import LastStateReader, check_head_config, near, remark, with_rows

from .config_keys import LAYOUTS

if TYPE_CHECKING:
    from crossdraft import Checkpoint

_EPS = 1e-6
_STAGE = re.compile(r"(emb|proj|head|ln)\.(\d{1,4})\.(weight|bias)")


class ShiftedNorm(nn.Module):
    """RMS norm with a weight and a bias."""

    def __init__(self, size: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], eps=_EPS) * self.weight + self.bias


class Speculator(nn.Module):
    """The stages as a plain module.

    Args:
        stages: n; ``vocab_size``: V; ``size``: H, of the target; ``inner``: I.
        scaled: norm the first state.
        drafted: number of tokens that are drafted, the first ones; None = all.
    """

    def __init__(
        self,
        stages: int,
        vocab_size: int,
        size: int,
        inner: int,
        *,
        scaled: bool = False,
        drafted: int | None = None,
    ):
        super().__init__()
        self.scaled, self.drafted = scaled, vocab_size if drafted is None else drafted
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(stages))
        self.proj = nn.ModuleList(nn.Linear(inner if i else size, inner, bias=False) for i in range(stages))
        self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(stages))
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(stages))
        state_weight = 0.5 ** (0.5 / stages)
        self.weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    def first(self, hidden: Tensor) -> Tensor:
        """Compute the input state ``[B, H]`` of the first stage from the target's hidden state."""
        return functional.rms_norm(hidden, hidden.shape[-1:], eps=_EPS) / math.sqrt(2) if self.scaled else hidden

    def forward(self, stage: int, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the new state ``[B, I]`` and logits ``[B, V]`` after ``token [B]``."""
        mixed = self.proj[stage](state) + self.weight * self.emb[stage](token)
        state = functional.gelu(self.ln[stage](mixed))
        logits = self.head[stage](state)
        if self.drafted < logits.shape[-1]:
            logits[..., self.drafted :] = -torch.inf
        return state, logits


class MlpSpeculator(LastStateReader):
    """Drafts a chain, one token per stage.

    Checkpoints: ``ibm-ai-platform/*-accelerator`` and ``ibm-granite/*-accelerator``.
    """

    name = "mlp-speculator"
    layout = LAYOUTS["mlp-speculator"]

    class Config(StrategyConfig):
        model: str = Field(description="name, directory or Hub id of a speculator made for the target")
        gamma: int = Field(default=3, ge=0, le=MOST_LEVELS, description="draft length; one stage per token")
        policy: Policy = Field(default=Static(), description=f"length policy: {POLICIES}, e.g. {{name: confidence}}")
        temperature: float | None = Field(None, ge=0, description="drafting temperature; default: the target's")

        @model_validator(mode="after")
        def _fits(self) -> Any:
            self.policy.make(self.gamma, 1)
            return self

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        target, checkpoint = context.target_model, context.load_heads(self.config.model)

        def read(checkpoint: Checkpoint) -> Speculator:
            speculator = read_speculator(checkpoint, context.vocab_size, self._features.shape[1])
            return speculator.to(context.device, target.dtype).eval()

        self.speculator = context.load_module(checkpoint, read, MlpSpeculator)
        if self.config.gamma > len(self.speculator.emb):
            raise checkpoint.refused(
                f"they have {len(self.speculator.emb)} stages, one per token, but gamma is {self.config.gamma}; "
                "shorten it"
            )
        self.sampling = context.sampling.at(self.config.temperature)
        self.policy = self.config.policy.make(self.config.gamma, context.batch_size)
        self.policy.load(context)
        self._draft_lengths = [0] * context.batch_size

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        policy = config.policy.make(config.gamma, 1)
        return DraftTraits(
            kind=CHAIN,
            point_mass=sampling.at(config.temperature).temperature == 0,
            nodes=config.gamma,
            hidden_layers=(-1,),
            adapts=policy.adapts,
            waits=policy.waits,
        )

    @classmethod
    def remembers(cls, config: Any) -> bool:
        return config.policy.make(config.gamma, 1).remembers

    def reset(self) -> None:
        self.policy.reset()

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        super().start(row, prompt, hidden)
        self.policy.start(row)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        limit = [limit if ready else 0 for limit, ready in zip(sequences.limit, self._has_feature, strict=True)]
        self._draft_lengths = self.policy.draft_lengths(limit, sequences.occupied)
        if not max(self._draft_lengths):
            return Draft.empty(sequences.batch_size, sequences.device)
        state, stage = self.speculator.first(self._features), 0

        def next_logits(token: Tensor) -> Tensor:
            nonlocal state, stage
            state, logits = self.speculator(stage, state, token[:, 0])
            stage += 1
            return logits[:, None]

        roots = on_device([history[-1] if history else 0 for history in sequences.history], sequences.device)
        draft = grow_chain(
            next_logits(roots[:, None])[:, 0], next_logits, self._draft_lengths, self.policy, self.sampling, rng
        )
        if draft.finite is not None:  # logits of a row without a feature are meaningless
            draft.finite = draft.finite | ~on_device(self._has_feature, sequences.device).bool()
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        super().observe(sequences, draft, verdict, accepted, scores)
        self.policy.observe(accepted, self._draft_lengths)


def read_speculator(checkpoint: Checkpoint, vocab_size: int, size: int) -> Speculator:
    """Read the speculator of ``checkpoint``; ``vocab_size`` and ``size`` are the target's.

    Names: ``emb.{i}.weight``, ``proj.{i}.weight``, ``head.{i}.weight``, ``ln.{i}.weight`` and ``.bias``, with an
    optional prefix ``speculator.``. With ``tie_weights`` later stages may omit shared tensors: all except the first
    projection, whose width differs.

    Raises:
        ModelError: not a speculator, or it does not fit the target.
    """
    check_head_config(checkpoint, MlpSpeculator.name, MlpSpeculator.layout)
    tensors = {key.removeprefix("speculator."): tensor for key, tensor in checkpoint.tensors.items()}
    stages = checkpoint.config.get("n_predict")
    indices = [checkpoint.number(match[2], key) for key in tensors if (match := _STAGE.fullmatch(key))]
    if not indices:
        raise checkpoint.refused("they are not an MLP speculator: emb.0.weight is missing")
    if type(stages) is not int or not max(indices) < stages <= MOST_LEVELS:
        raise checkpoint.refused(
            f"config.json has {stages!r:.80} for n_predict, the number of stages, not {max(indices) + 1}"
        )
    if checkpoint.config.get("tie_weights"):
        for i in range(1, stages):
            for name in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias", "proj.{}.weight"):
                start = 1 if name.startswith("proj") else 0
                if i > start and name.format(start) in tensors:
                    tensors.setdefault(name.format(i), tensors[name.format(start)])
    inner = tensors["emb.0.weight"].shape[-1] if "emb.0.weight" in tensors else 1
    rows = [len(tensor) for key, tensor in tensors.items() if key.startswith(("emb.", "head.")) and tensor.dim()]
    if rows and max(rows) == min(rows) != vocab_size and near(rows[0], vocab_size):
        for key in [key for key in tensors if key.startswith(("emb.", "head."))]:
            tensors[key] = with_rows(tensors[key], vocab_size)
        remark(checkpoint, f"their tables have {rows[0]} rows, the target's vocabulary {vocab_size}")
    drafted, scaled = min([vocab_size, *rows]), bool(checkpoint.config.get("scale_input"))
    speculator = Speculator(stages, vocab_size, size, inner, scaled=scaled, drafted=drafted)
    checkpoint.fill(speculator, tensors)
    return speculator
