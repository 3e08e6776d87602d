"""``layer-skip``: the target drafts without some of its attention and feed-forward sublayers.

J. Zhang, J. Wang, H. Li, L. Shou, K. Chen, G. Chen, S. Mehrotra, "Draft & Verify: Lossless Large Language Model
Acceleration via Self-Speculative Decoding", ACL 2024, sections 3.2 and 3.3. With z in {0, 1}^{2L} the set of skipped
sublayers, which add nothing to the residual stream, tokens are drafted from

    q = softmax(M(x; z)),

M the target. ``crossdraft train layer-skip`` finds z by Bayesian optimisation and writes it to a small JSON file. The
length policy ends a draft (the paper's algorithm 2 adapts a confidence threshold to the acceptance rate; ``confidence``
and ``learnt-threshold`` are similar).

Attention that is kept reads the target's keys and values of committed tokens. Verification reuses the computation of
the layers before the first skipped sublayer (`Draft.resume_from`); later layers run again, as in the paper.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from crossdraft import LM, MOST_LEVELS, Draft, ModelError, Sequences, StepRng, UsageError
from crossdraft.drafters.autoregressive.chain_drafter import ChainDrafter, PolicyConfig

from .own_layers import depth_of, target_of

Layer = Annotated[int, Field(ge=0, lt=MOST_LEVELS)]
#: The value of ``kind`` in checkpoints of `crossdraft train layer-skip`.
KIND = "layer-skip"


class LayerSkip(ChainDrafter):
    """The target without some attention and feed-forward sublayers, under a length policy."""

    name = "layer-skip"

    class Config(PolicyConfig):
        skip_attention: tuple[Layer, ...] = Field((), description="layers whose attention is skipped, counted from 0")
        skip_mlp: tuple[Layer, ...] = Field(
            (), description="layers whose feed-forward network is skipped, counted from 0"
        )
        checkpoint: str | None = Field(
            None, description="instead of both: a directory written by crossdraft train layer-skip"
        )

        @model_validator(mode="after")
        def _one_way(self) -> Any:
            if bool(self.skip_attention or self.skip_mlp) == (self.checkpoint is not None):
                raise ValueError("give either skip_attention and skip_mlp, one of which may be empty, or a checkpoint")
            return self

    def slots(self) -> LM:
        context, depth = self.context, depth_of(self.context.target_model)
        attention, mlp = self.config.skip_attention, self.config.skip_mlp
        if self.config.checkpoint is not None:
            attention, mlp = sublayers(self.config.checkpoint, context.load_settings(self.config.checkpoint), depth)
        if depth is not None and (invalid := [layer for layer in (*attention, *mlp) if layer >= depth]):
            raise ModelError(
                f"drafter '{self.name}' skips part of layer {invalid[0]}, but '{context.target_name}' has layers 0 to "
                f"{depth - 1}; name some of these"
            )
        skipped = sorted(set(attention) & set(mlp))
        layers = [layer for layer in range(depth or MOST_LEVELS) if layer not in skipped]
        if not layers:
            raise ModelError(f"drafter '{self.name}' skips every layer of '{context.target_name}'; keep some")
        return target_of(context, self.name).fork(
            layers, no_attention=set(attention) - set(skipped), no_mlp=set(mlp) - set(skipped)
        )

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        draft = super().propose(sequences, rng)
        draft.resume_from = self.model.lm
        return draft


def sublayers(name: str, settings: dict[str, Any], depth: int | None) -> tuple[list[int], list[int]]:
    """Read the layers whose attention and whose feed-forward network the checkpoint ``name`` skips.

    Raises:
        UsageError: the settings are of another kind or damaged, or for a target of another depth.
    """
    if settings.get("kind") != KIND:
        raise UsageError(f"{name} is not a checkpoint of {KIND}; crossdraft train {KIND} writes one")
    layers = settings.get("layers")
    lists = [settings.get(key) for key in ("skip_attention", "skip_mlp")]
    numbers = [n for part in lists if isinstance(part, list) for n in part]
    if not all(isinstance(part, list) for part in lists) or any(type(n) is not int or n < 0 for n in numbers):
        raise UsageError(f"{name} is damaged: skip_attention and skip_mlp must be lists of layers")
    if depth is not None and layers != depth:
        raise UsageError(
            f"{name} is for a target of {layers} layers, not {depth}; run crossdraft train {KIND} for this target"
        )
    return lists[0] or [], lists[1] or []
