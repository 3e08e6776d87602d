"""``early-exit``: the target's first layers draft, and verification resumes from their output.

M. Elhoushi, A. Shrivastava, D. Liskovich, B. Hosmer, B. Wasti, L. Lai, A. Mahmoud, B. Acun, S. Agarwal, A. Roman, A.
Aly, B. Chen, C.-J. Wu, "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024, section
4.3. With E the exit layer, tokens are drafted from

    q = softmax(W norm(h_E)),   W, norm the target's own head and final norm, h_E the output of layer E.

Keys and values of committed tokens are the target's own (the paper's KV cache). Verification reuses the keys, values
and h_E of drafted tokens (the paper's exit query cache): the target runs its first E layers only for the last drafted
token, which the drafter did not feed, and the other layers for all tokens. So each layer processes each token of a step
once.
`Draft.resume_from` is the fork; the decoder checks that it was fed the drafted tokens.

Any target can draft, but acceptance is low unless it was trained with layer dropout and an early-exit loss
(``facebook/layerskip-*``).
"""

from __future__ import annotations

from pydantic import Field

from crossdraft import LM, MOST_LEVELS, Draft, ModelError, Sequences, StepRng
from crossdraft.drafters.autoregressive.chain_drafter import ChainDrafter, PolicyConfig

from .own_layers import depth_of, target_of


class EarlyExit(ChainDrafter):
    """The first ``exit_layer`` layers with the target's own final norm and head, under a length policy."""

    name = "early-exit"

    class Config(PolicyConfig):
        exit_layer: int | None = Field(
            None,
            ge=1,
            le=MOST_LEVELS,
            description="number of the target's first layers that draft; default: a quarter (8 of 32 in the paper)",
        )

    def slots(self) -> LM:
        context = self.context
        depth = depth_of(context.target_model)
        exit_layer = self.config.exit_layer or max(1, (depth or 4) // 4)
        if depth is not None and exit_layer >= depth:
            raise ModelError(
                f"drafter '{self.name}': exit_layer is {exit_layer}, but '{context.target_name}' has {depth} layers; "
                f"write a number below {depth}"
            )
        return target_of(context, self.name).fork(range(exit_layer))

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        draft = super().propose(sequences, rng)
        draft.resume_from = self.model.lm
        return draft
