"""The base classes of drafters that read the target's hidden states.

Those of committed tokens come from the target's pass that verified them: the root and the accepted path of each step. A
`FeatureReader` buffers them until its head's next pass, so the head's cache depends on the committed tokens only, not
on earlier drafts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict
from ...framework.contracts.drafter import DraftContext, Drafter, StrategyConfig
from ...framework.contracts.models import Checkpoint
from ...framework.errors import ContractError, ModelError
from ..autoregressive.draft_model import LengthPolicy


class TargetReader(Drafter):
    """Base of the drafters that read the target's hidden states."""

    config: Any

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        if context.target_model is None:
            raise ModelError(
                f"drafter '{self.name}' reads the features of its target, but this target is not a transformers "
                "model; use another drafter"
            )

    def _given(self, hidden: Tensor | None) -> Tensor:
        """The hidden states of a prompt, ``[len(prompt) - 1, L, H]``."""
        if hidden is None:
            raise ContractError(
                f"drafter '{self.name}' needs the target's hidden states of layers "
                f"{self.traits(self.config, self.context.sampling).hidden_layers}, but the target returned none; build "
                "it with the drafter's traits.hidden_layers"
            )
        return hidden


class LastStateReader(TargetReader):
    """Base of the drafters that read the last one only; a sequence of one token has none."""

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        shape = context.batch_size, context.target_model.get_output_embeddings().weight.shape[1]
        self._features = torch.zeros(shape, dtype=context.target_model.dtype, device=context.device)
        self._has_feature = [False] * context.batch_size

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self._has_feature[row] = len(prompt) > 1  # otherwise 0: the last sequence may have left NaN
        self._features[row] = self._given(hidden)[-1, 0] if self._has_feature[row] else 0

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self._has_feature[row] = False

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        assert scores.hidden is not None
        last = verdict.length  # index in the scores; 0 is the root
        if verdict.path is not None and draft.width:
            node = verdict.path.gather(1, (last - 1).clamp(min=0)[:, None]).squeeze(1)
            last = torch.where(last > 0, node + 1, 0)
        self._features.copy_(scores.hidden[torch.arange(len(last), device=last.device), last, 0])
        self._has_feature = [bool(history) for history in sequences.history]


class FeatureReader(TargetReader):
    """Base of the drafters with a head on features. A subclass loads the head and creates ``lm`` and ``policy``.

    Attributes:
        head: the module, on the target's device, with ``embed_tokens``, ``dtype`` and ``fuse``.
        lm: slots of the head.
    """

    lm: Any
    policy: LengthPolicy

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        checkpoint = context.load_heads(self.config.model)
        self.head = context.load_module(checkpoint, self._head, type(self), repr(self.config))
        self.sampling = context.sampling.at(self.config.temperature)
        self._draft_lengths = [0] * context.batch_size
        self._pending: list[list[Tensor]] = [[] for _ in range(context.batch_size)]  # features not yet fed

    def _head(self, checkpoint: Checkpoint) -> Any:
        """The head on the target's device."""
        head = self.load(checkpoint).to(self.context.device).eval()
        # Cast parameters only: rotary buffers in bfloat16 would give wrong positions. The target's parameters stay as
        # they are: its embedding and head may differ in precision.
        shared = {id(weight) for weight in self.context.target_model.parameters()}
        for weight in head.parameters():
            if id(weight) not in shared:
                weight.data = weight.data.to(head.dtype)
        return head

    @abstractmethod
    def load(self, checkpoint: Checkpoint) -> Any:
        """Make the head. Raises ModelError if the checkpoint does not fit."""

    @classmethod
    def layers(cls, config: Any) -> tuple[float, ...]:
        """Layers whose hidden states the head reads, see `DraftTraits.hidden_layers`."""
        return (-1,)

    def reset(self) -> None:
        self.policy.reset()

    @property
    def passes(self) -> int:
        return self.lm.passes

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self._pending[row] = []
        self.lm.free(row)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        assert scores.hidden is not None
        kept = max(accepted) + 1
        rows = torch.arange(len(accepted), device=scores.hidden.device)[:, None]
        path = torch.arange(kept, device=rows.device).expand(len(accepted), -1)  # node i of the draft is position i + 1
        if verdict.path is not None:
            path = torch.cat([torch.zeros_like(rows), verdict.path.clamp(min=0) + 1], 1)[:, :kept]
        features = self.head.fuse(scores.hidden[rows, path])
        for row, (history, tau) in enumerate(zip(sequences.history, accepted, strict=True)):
            if history:
                self._pending[row].append(features[row, : tau + 1])
        self.policy.observe(accepted, self._draft_lengths)

    def _features(self, hidden: Tensor | None) -> Tensor:
        """Features of a prompt ``[len(prompt) - 1, H]``, from the target's hidden states."""
        return self.head.fuse(self._given(hidden))

    def _pop_pending(self) -> list[Tensor]:
        """Return the pending features ``[n, H]`` of each row, and clear the buffer."""
        features = [torch.cat(rows) if rows else self._no_features() for rows in self._pending]
        self._pending = [[] for _ in features]
        return features

    def _no_features(self) -> Tensor:
        return torch.empty(0, self.head.embed_tokens.embedding_dim, dtype=self.head.dtype, device=self.context.device)
