"""P-EAGLE: an EAGLE-3 head drafts all of its tokens in one pass.

M. Hui, X. Huang, J. Campos Salas, Y. Sun, N. Pemberton, X. Song, A. Khetan, G. Karypis, "P-EAGLE: Parallel-Drafting
EAGLE with Scalable Training", 2026, arXiv:2602.01469.
The first token is drafted as in EAGLE-3, from the pair of root and feature. The next positions hold pairs of a mask
token's embedding and one learnt feature (``mask_hidden``, before ``fc`` and its norms); each attends to the text and
the pairs before it. Tokens are not conditioned on each other: their distributions are independent given the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from crossdraft import MOST_LEVELS, Sequences, on_device
from crossdraft.heads import LAYERS, Eagle3Head, check_head_config, merged_config, read_head

from .blocks import BlockConfig, BlockDrafter
from .config_keys import LAYOUTS

if TYPE_CHECKING:
    from crossdraft import Checkpoint

#: Config keys of the mask token's id: that of speculators, then those of serving engines.
_MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")


class PEagleHead(Eagle3Head):
    """The head of P-EAGLE as a plain module: `Eagle3Head` and the learnt feature of masked positions.

    Attributes:
        mask_token: id of the token at masked positions.
    """

    mask_token: int

    def __init__(self, config: Any, embedding: Tensor, feature_size: int, **more: Any):
        super().__init__(config, embedding, feature_size, **more)
        self.mask_hidden = nn.Parameter(torch.zeros(feature_size))

    def mask_feature(self) -> Tensor:
        """``[H]``: the learnt feature, fused like the target's."""
        return self.fuse(self.mask_hidden.view(len(self.fc_norm) or 1, -1))


class PEagle(BlockDrafter):
    """Drafts a chain in one pass of the head, its tokens drawn independently.

    Checkpoints: those of vllm-project/speculators and SpecForge: an EAGLE-3 head, mostly of several layers, with
    ``mask_hidden`` and the id of a mask token in its config. A sequence of one token has no pair yet and
    drafts nothing.
    """

    name = "p-eagle"
    layout = LAYOUTS["p-eagle"]

    class Config(BlockConfig):
        layers: tuple[int, ...] | None = Field(
            None,
            description="the target's hidden states that the head reads (0 = embeddings, i = output of layer i); "
            "default: 2, L // 2 and L - 3",
        )
        gamma: int = Field(
            default=7, ge=0, le=MOST_LEVELS, description="draft length; heads are usually trained up to 7"
        )

    config: Config  # type: ignore[assignment]
    head: PEagleHead

    @classmethod
    def layers(cls, config: Any) -> tuple[float, ...]:
        return LAYERS if config.layers is None else config.layers

    def load(self, checkpoint: Checkpoint) -> PEagleHead:
        checkpoint.check_kind(self.name)
        name = next((name for name in ("mask_hidden", "model.mask_hidden") if name in checkpoint.tensors), None)
        if name is None:
            raise checkpoint.refused("they lack mask_hidden, the feature of masked positions")
        flat = checkpoint.with_tensors({name: checkpoint.tensors[name].reshape(-1)})
        check_head_config(flat, self.name, self.layout)
        head = read_head(flat, self.context.target_model, self.config.layers, PEagleHead)
        assert isinstance(head, PEagleHead)
        head.mask_token = _mask_token(checkpoint, len(head.embed_tokens.weight))
        return head

    def block(self) -> None:
        return None

    def can_draft(self, sequences: Sequences) -> list[bool]:
        return [len(history) > 1 for history in sequences.history]

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self._pending[row] = []
        self.policy.start(row)
        if len(prompt) == 1:
            self.lm.start(row, [], features=self._no_features())
            return
        features = self._features(hidden)
        # The last pair, that of the root, is fed with the first draft.
        self.lm.start(row, list(prompt[1:]), features=features[:-1])
        self._pending[row] = [features[-1:]]

    def feed(self, sequences: Sequences, features: list[Tensor], steps: int) -> tuple[Tensor, Tensor | None]:
        counts, mask_feature = [len(row) for row in features], self.head.mask_feature()
        # The longest block, in short steps, too: one shape to capture.
        width, steps = max(counts), self._max_features - 1
        tokens = [
            [*history[length + 1 : length + 1 + n], *[self.head.mask_token] * (steps - 1), *[0] * (width - n)]
            for n, length, history in zip(counts, self.lm.lengths, sequences.history, strict=True)
        ]
        pairs = [torch.cat([row, mask_feature.expand(steps - 1, -1)]) for row in features]
        padded, last = on_device(tokens, sequences.device), on_device(counts, sequences.device).clamp(min=1) - 1
        index = last[:, None] + torch.arange(steps, device=sequences.device)
        logits, _ = self.lm.forward(padded, features=pad_sequence(pairs, batch_first=True), logits_to_keep=index)
        self.lm.commit(counts)
        return logits, None


def _mask_token(checkpoint: Checkpoint, rows: int) -> int:
    """Read the id of the mask token."""
    settings = merged_config(checkpoint)
    token = next((settings[key] for key in _MASK_KEYS if settings.get(key) is not None), None)
    if type(token) is not int or not 0 <= token < rows:
        fault = f"config.json lacks {_MASK_KEYS[0]}" if token is None else f"config.json has mask token {token!r:.80}"
        raise checkpoint.refused(f"{fault}; the id of the mask token is a whole number from 0 to {rows - 1}")
    return token
