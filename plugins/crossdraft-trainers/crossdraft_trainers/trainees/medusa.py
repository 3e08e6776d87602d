"""Train Medusa heads for a frozen target.

T. Cai, Y. Li, Z. Geng, H. Peng, J. D. Lee, D. Chen, T. Dao, "Medusa: Simple LLM Inference Acceleration Framework with
Multiple Decoding Heads", ICML 2024, section 2.2.1 (Medusa-1, equation 2: heads weighted by 0.8^k). The heads share the
target's LM head, so only a block of H x H is trained per head.

The paper trains on cross-entropy with the text's token; here the loss is the divergence from the target's distribution
of that token. On text sampled from the target at temperature 1 both have the same mean, and this one has less variance.
The distribution depends on the tokens in between, which a head does not read: it learns the average over texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from crossdraft import LoadedModel, UsageError
from crossdraft.drafters.heads.medusa.weights import MedusaHeads, read_heads
from crossdraft.models import load_checkpoint

from ..contract import Batch, Text, Trainee, TrainingConfig, bfloat16_copy
from ..losses import SampledHead, distil_many, overlap, sampled_vocab_option
from ..medusa_files import save_heads

#: Number of ranks whose accuracy is measured, for trees.
RANKS = 10


class MedusaTraining(TrainingConfig):
    """Options of ``crossdraft train medusa``."""

    name = "medusa"

    learning_rate: float = Field(3e-3, description="of AdamW at its peak", gt=0, le=10)
    heads: int = Field(4, description="number of heads, each drafts one token", ge=1, le=64)
    head_layers: int = Field(1, description="residual blocks of each head", ge=1, le=16)
    decay: float = Field(0.8, description="weight of a head's loss relative to the previous head's", ge=0, le=1)
    sampled_vocab: int = sampled_vocab_option()

    @classmethod
    def export_servable(cls, model: str, target: LoadedModel, directory: Path) -> str:
        heads, ids = read_heads(load_checkpoint(model), target.model)
        _save_for_vllm(directory, heads, target.model.get_output_embeddings().weight, ids)
        return f"vLLM's layout, with the projection to the vocabulary; vLLM drafts {len(heads)} tokens with it"

    def trainee(self, target: LoadedModel) -> Trainee:
        return MedusaTrainee(target, self)


def _save_for_vllm(directory: Path, heads: MedusaHeads, lm_head: Tensor, ids: Tensor | None) -> None:
    """Write ``heads`` in vLLM's layout, as ``model.safetensors`` and ``config.json``.

    Args:
        lm_head: ``[V, H]``, the target's, which is written for heads without a projection of their own.
        ids: ``[rows]`` int64, the target's id of each row of the heads' logits; None if row = id.
    """
    from safetensors.torch import save_file

    state = {}
    for key, tensor in heads.state_dict().items():
        head, layer, *rest = key.split(".")
        state[f"blocks.{head}.layers.{layer}.{rest[-1]}" if len(rest) == 2 else f"lm_heads.{head}.weight"] = tensor
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.hidden_size,
        "vocab_size": len(lm_head),
        "num_heads": len(heads),
        "num_hidden_layers": heads.layers,
        "medusa_fc_bias": "blocks.0.layers.0.bias" in state,
        "original_lm_head": "lm_heads.0.weight" not in state,
    }
    state.setdefault("lm_heads.0.weight", lm_head)
    if ids is not None:
        config["truncated_vocab_size"], state["token_map"] = len(ids), ids
    state = {key: tensor.detach().cpu().clone() for key, tensor in state.items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class MedusaTrainee(Trainee):
    """Heads initialised to the identity: each computes the logits of the target's own head at first."""

    student: MedusaHeads

    def __init__(self, target: LoadedModel, recipe: MedusaTraining):
        super().__init__(target, recipe)
        self.drafter = {"name": "medusa"}
        lm_head: Any = target.model.get_output_embeddings()
        self.student = MedusaHeads(self.head.shape[1], recipe.heads, recipe.head_layers, lm_head=lm_head)
        self.student.to(self.head.device, torch.float32)

    def start_from(self, name: str) -> None:
        target = self.target.model
        heads, ids = read_heads(load_checkpoint(name), target)
        if ids is not None or f"0.{heads.layers}.weight" in heads.state_dict():
            raise UsageError(
                f"the heads in {name} have their own projections, not the target's head; start from other heads"
            )
        shape, other = (len(self.student), self.student.layers), (len(heads), heads.layers)
        if shape != other:
            raise UsageError(
                f"{name} has {other[0]} heads of {other[1]} blocks, not {shape[0]} of {shape[1]}; add --heads "
                f"{other[0]} --head-layers {other[1]}"
            )
        self.student = heads.to(torch.float32).requires_grad_(True)

    def prepare(self, texts: Sequence[Text]) -> None:
        occurring = (token for text in texts for token in text.response)
        self._rows = SampledHead(self.head, occurring, self.recipe.sampled_vocab, self.recipe.seed)

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        rows, bias = self._rows.at(step)
        states, keep, target, _ = self._aligned(batch)
        r = self.recipe
        loss, same = distil_many(states, keep, target, rows, bias, r.divergence, beta=r.beta, decay=r.decay)
        return loss, same[0]

    def acceptance(self, batch: Batch) -> list[Tensor]:
        states, keep, target, _ = self._aligned(batch)
        overlaps = overlap(states, target, self.head, self.head)
        return [same[kept] for same, kept in zip(overlaps, keep, strict=True)]

    def _aligned(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Align heads and target on the n response tokens.

        Returns:
            ``[heads, n, H]`` outputs of each head's blocks; ``[heads, n]`` bool, True if the draft can occur in
            decoding; ``[n, H]`` the target's hidden states; and the ``[n]`` tokens.
        """
        hidden, predicts = batch.hidden[:, :, 0], batch.predicts
        states, keep = [], []
        for i, head in enumerate(self.student):
            # Head i reads the hidden state 1 + i positions before the target's.
            width = hidden.shape[1]
            shift = min(1 + i, width)  # texts may be shorter than 1 + i
            states.append(functional.pad(head(hidden)[:, : width - shift], (0, 0, shift, 0))[predicts])
            keep.append(functional.pad(batch.drafts(i), (shift, 0))[predicts])
        return torch.stack(states), torch.stack(keep), hidden[predicts], batch.ids.roll(-1, 1)[predicts]

    def export(self, directory: Path, held_out: Iterable[Batch]) -> None:
        config = {"base_model_name_or_path": self.target.name, "medusa_accuracies": self.accuracies(held_out)}
        save_heads(directory, bfloat16_copy(self.student), config)  # type: ignore[arg-type]

    def accuracies(self, held_out: Iterable[Batch]) -> list[list[float]]:
        """``[heads][ranks]``: frequency with which head i's token of rank k is the text's (Medusa, section 2.3.3)."""
        ranks = min(RANKS, len(self.head))
        right = torch.zeros(len(self.student), ranks, dtype=torch.float64)
        count = torch.zeros(len(self.student), 1, dtype=torch.float64)
        for batch in held_out:
            states, keep, _, tokens = self._aligned(batch)
            for i, (state, kept) in enumerate(zip(states, keep, strict=True)):
                for part, token in zip(state[kept].split(128), tokens[kept].split(128), strict=True):
                    best = (part.to(self.head.dtype) @ self.head.T).topk(ranks).indices
                    right[i] += (best == token[:, None]).double().sum(0).cpu()
                count[i] += kept.sum().cpu()
        return [[round(a, 5) for a in head] for head in (right / count.clamp(min=1)).tolist()]

    def describe(self) -> tuple[str, str, str]:
        r, size = self.recipe, sum(weight.numel() for weight in self.trained.values())
        blocks = f"{r.head_layers} residual block{'s' * (r.head_layers > 1)}"
        return (
            f"Medusa heads for {self.target_name}",
            f"{r.heads} heads of {blocks} each ({size / 1e6:.1f} M parameters) that draft for `{self.target_name}`, "
            'whose head they share (layout "version 2"). `medusa_accuracies` in the config were measured on the '
            "held-out texts, so that the drafter's `nodes: N` finds a tree.",
            f"{r.divergence} to the target's distribution of each head's token (Medusa-1), head k weighted by "
            f"{r.decay:g}^k, over the tokens that occur in the texts and {r.sampled_vocab} random ones per step for "
            "the rest (0: the full vocabulary)",
        )
