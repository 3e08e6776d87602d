"""The target drafts for itself with some of its attention and feed-forward sublayers left out.

J. Zhang, J. Wang, H. Li, L. Shou, K. Chen, G. Chen, S. Mehrotra, "Draft & Verify: Lossless Large Language Model
Acceleration via Self-Speculative Decoding", ACL 2024, sections 3.2 and 3.3. With z in {0, 1}^{2L} the set of
sublayers left out, each of which then adds nothing to the residual stream, a drafted token follows from

    q = softmax(M(x; z)),

M the target. Which z drafts best for a target is found by Bayesian optimisation: ``crossdraft train layer-skip``
writes it to a small JSON file. When to end a draft, the length policy says (the paper's own, algorithm 2, stops below
a confidence that follows the acceptance rate: ``confidence`` and ``learnt-threshold`` are its relatives).

Attention that is kept reads the target's own keys and values of committed tokens. What layers before the first one
left out compute for drafted tokens is the target's own work, and reused by the verification (`Draft.resume_from`);
all that follows is computed again, as in the paper.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from ...framework.contracts.draft import Draft, Sequences
from ...framework.contracts.lm import LM
from ...framework.contracts.rng import StepRng
from ...framework.errors import ModelError, UsageError
from ...framework.util.limits import MOST_LEVELS
from ..autoregressive.chain_drafter import ChainDrafter, PolicyConfig
from .own_layers import depth_of, target_of

Layer = Annotated[int, Field(ge=0, lt=MOST_LEVELS)]
#: What `crossdraft train layer-skip` writes under ``kind``.
KIND = "layer-skip"


class LayerSkip(ChainDrafter):
    """All layers of the target without some attention and feed-forward sublayers, under a length policy."""

    name = "layer-skip"

    class Config(PolicyConfig):
        skip_attention: tuple[Layer, ...] = Field((), description="layers whose attention is left out, from 0")
        skip_mlp: tuple[Layer, ...] = Field((), description="layers whose feed-forward network is left out, from 0")
        checkpoint: str | None = Field(
            None, description="instead of both: a directory that crossdraft train layer-skip has written"
        )

        @model_validator(mode="after")
        def _one_way(self) -> Any:
            if bool(self.skip_attention or self.skip_mlp) == (self.checkpoint is not None):
                raise ValueError("name either skip_attention and skip_mlp, of which one may be empty, or a checkpoint")
            return self

    def slots(self) -> LM:
        context, depth = self.context, depth_of(self.context.target_model)
        attention, mlp = self.config.skip_attention, self.config.skip_mlp
        if self.config.checkpoint is not None:
            attention, mlp = sublayers(self.config.checkpoint, context.load_settings(self.config.checkpoint), depth)
        if depth is not None and (beyond := [layer for layer in (*attention, *mlp) if layer >= depth]):
            raise ModelError(
                f"drafter '{self.name}' is to leave out part of layer {beyond[0]}, but '{context.target_name}' has "
                f"layers 0 to {depth - 1}"
            )
        whole = sorted(set(attention) & set(mlp))
        layers = [layer for layer in range(depth or MOST_LEVELS) if layer not in whole]
        if not layers:
            raise ModelError(f"drafter '{self.name}' leaves out every layer of '{context.target_name}'; keep some")
        return target_of(context, self.name).fork(
            layers, no_attention=set(attention) - set(whole), no_mlp=set(mlp) - set(whole)
        )

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        draft = super().propose(sequences, rng)
        draft.resume_from = self.model.lm
        return draft


def sublayers(name: str, settings: dict[str, Any], depth: int | None) -> tuple[list[int], list[int]]:
    """The layers whose attention, and whose feed-forward network, a checkpoint ``name`` leaves out.

    Raises:
        UsageError: settings of something else, or for a target of another depth.
    """
    if settings.get("kind") != KIND:
        raise UsageError(f"{name} holds no settings of {KIND}; crossdraft train {KIND} writes them")
    layers = settings.get("layers")
    found = [settings.get(key) for key in ("skip_attention", "skip_mlp")]
    numbers = [n for part in found if isinstance(part, list) for n in part]
    if not all(isinstance(part, list) for part in found) or any(type(n) is not int or n < 0 for n in numbers):
        raise UsageError(f"{name} is damaged: skip_attention and skip_mlp are lists of layers")
    if depth is not None and layers != depth:
        raise UsageError(f"{name} was found for a target of {layers} layers, not {depth}; search for this one")
    return found[0] or [], found[1] or []
