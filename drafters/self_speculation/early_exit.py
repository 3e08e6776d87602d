"""The target's first layers draft, and the target goes on from where they end.

M. Elhoushi, A. Shrivastava, D. Liskovich, B. Hosmer, B. Wasti, L. Lai, A. Mahmoud, B. Acun, S. Agarwal, A. Roman, A.
Aly, B. Chen, C.-J. Wu, "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024, section
4.3. With E the exit layer, a drafted token follows from

    q = softmax(W norm(h_E)),   W, norm the target's own head and final norm, h_E what its first E layers say.

Keys and values of committed tokens are the target's own (the paper's KV cache), and what the first E layers computed
for drafted tokens, keys, values and h_E, is taken up by the verification (the paper's exit query cache): the target
runs its first E layers for the last drafted token alone, which the drafter never fed, and the others for all. So a
layer sees each token of a step once. `Draft.resume_from` names the fork, and the loop checks that it was fed what is
drafted.

Any target drafts, but one that was not trained with layer dropout and an early-exit loss (``facebook/layerskip-*``
were) says little before its last layers.
"""

from __future__ import annotations

from pydantic import Field

from ...framework.contracts.draft import Draft, Sequences
from ...framework.contracts.lm import LM
from ...framework.contracts.rng import StepRng
from ...framework.errors import ModelError
from ...framework.util.limits import MOST_LEVELS
from ..autoregressive.chain_drafter import ChainDrafter, PolicyConfig
from .own_layers import depth_of, target_of


class EarlyExit(ChainDrafter):
    """The first ``exit_layer`` layers with the target's own final norm and head, under a length policy."""

    name = "early-exit"

    class Config(PolicyConfig):
        exit_layer: int | None = Field(
            None,
            ge=1,
            le=MOST_LEVELS,
            description="so many of the target's first layers draft; default: a quarter of them (8 of 32 in the paper)",
        )

    def slots(self) -> LM:
        context = self.context
        depth = depth_of(context.target_model)
        exit_layer = self.config.exit_layer or max(1, (depth or 4) // 4)
        if depth is not None and exit_layer >= depth:
            raise ModelError(
                f"drafter '{self.name}': exit_layer {exit_layer} leaves none of the {depth} layers of "
                f"'{context.target_name}' to verify with; name one below {depth}"
            )
        return target_of(context, self.name).fork(range(exit_layer))

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        draft = super().propose(sequences, rng)
        draft.resume_from = self.model.lm
        return draft
