"""DSpark: DFlash's block with tokens drawn sequentially, each conditioned on the previous one.

DeepSeek-AI, "DSpark", 2026, arXiv:2607.05147. With h_k the last layer's state of the block's position k, l_k its logits
and x_{k-1} the token drafted before it (the root, for the first),

    vanilla:  logits_k = l_k + W2 W1[x_{k-1}],
    gated:    logits_k = l_k + W2 (s(W_g [h_k; W1[x_{k-1}]]) * W1[x_{k-1}]),
    rnn:      [g; c; o] = W_j [z_{k-1}; W1[x_{k-1}]; h_k],  z_k = s(g) * z_{k-1} + (1 - s(g)) * tanh(c),
              logits_k = l_k + W2 tanh(o),   z before the block 0,

W1 and W2 of low rank, s the logistic function. A token is drawn from the distribution of its corrected logits, which is
the q of the draft. A confidence head, s(w [h_k; W1[x_{k-1}]]), predicts the probability that token k is accepted; it
depends on the tokens before k only, so a draft may end when it falls below a threshold (`confidence`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from crossdraft import Checkpoint, DraftContext, StrategyConfig
from crossdraft.drafters.autoregressive.draft_model import LengthPolicy
from crossdraft.drafters.autoregressive.policies import Static
from crossdraft.heads import check_head_config, merged_config, near, renamed, with_rows

from .blocks import BlockConfig
from .config_keys import LAYOUTS
from .dflash import DFlash, DFlashHead, backbone

#: Key of each kind of Markov head, besides ``markov_w1`` and ``markov_w2``.
_KINDS = {"gated": "markov_head.gate_proj.weight", "rnn": "markov_head.joint_proj.weight"}


class MarkovHead(nn.Module):
    """A correction of the logits by the previous token.

    Args:
        kind: ``vanilla``, ``gated`` or ``rnn``.
        vocab_size: V; ``rows``: Vd; ``rank``: r; ``size``: H.
    """

    def __init__(self, kind: str, vocab_size: int, rows: int, rank: int, size: int):
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, rows, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, token: Tensor, state: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the correction ``[B, Vd]`` after ``token [B]``, given the block's ``state [B, H]``.

        ``memory [B, r]`` is the rnn's state, ``None`` for the first token; the new one is returned, too.
        """
        embedded = self.markov_w1(token)
        if self.kind == "vanilla":
            return self.markov_w2(embedded), None
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([state, embedded], -1)))
            return self.markov_w2(gate * embedded), None
        memory = torch.zeros_like(embedded) if memory is None else memory
        gate, candidate, out = self.joint_proj(torch.cat([memory, embedded, state], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return self.markov_w2(torch.tanh(out)), gate * memory + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """Probability that the next token of a block is accepted, from ``[h_k; W1[x_{k-1}]]`` or ``h_k``."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        return torch.sigmoid(self.proj(features).float()).squeeze(-1)


class DSparkHead(DFlashHead):
    """The drafter of DSpark as a plain module; the other arguments are those of `DFlashHead`.

    Args:
        kind, rank: of the Markov head; rank 0 = no Markov head.
        confidence: input width of the confidence head; 0 = no confidence head.
    """

    def __init__(self, config: Any, embedding: Tensor, *more: Any, kind: str, rank: int, confidence: int, **named: Any):
        super().__init__(config, embedding, *more, **named)
        rows = len(self.lm_head.weight)
        self.markov_head = MarkovHead(kind, len(embedding), rows, rank, config.hidden_size) if rank else None
        self.confidence_head = ConfidenceHead(confidence) if confidence else None

    def expected(self, token: Tensor, state: Tensor) -> Tensor:
        """``[B]``: probability that the token after ``token [B]`` is accepted, given the block's ``state [B, H]``."""
        assert self.confidence_head is not None
        if self.confidence_head.proj.in_features == state.shape[-1]:
            return self.confidence_head(state)
        assert self.markov_head is not None
        return self.confidence_head(torch.cat([state, self.markov_head.markov_w1(token)], -1))


class ExpectedAcceptance(LengthPolicy):
    """Stops when the confidence head predicts a probability of acceptance below a threshold.

    Attributes:
        expected: ``[B]``, the prediction for the next token, set before it is drawn.
    """

    fixed, stops_early, keeps_last, position_free = False, True, False, False

    def __init__(self, gamma: int, batch_size: int, threshold: float):
        super().__init__(gamma, batch_size)
        self.threshold = threshold
        self.expected: Tensor | None = None

    def should_continue(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        assert self.expected is not None
        return self.expected >= self.threshold


class DSpark(DFlash):
    """Drafts a chain: the tokens of one block, each drawn given the previous one.

    Checkpoints: DeepSpec's, SpecForge's and those of vllm-project/speculators.
    """

    name = "dspark"
    layout = LAYOUTS["dspark"]

    class Config(BlockConfig):
        confidence: float | None = Field(
            None,
            gt=0,
            le=1,
            description="end a draft before the first token with a predicted acceptance below this; default: never",
        )

        @model_validator(mode="after")
        def _one_stop(self) -> Self:
            if self.confidence is not None and not isinstance(self.policy, Static):
                raise ValueError("policy and confidence both end a draft; give one of them")
            return self

        def make_policy(self, batch_size: int, gamma: int | None = None) -> LengthPolicy:
            if self.confidence is None:
                return super().make_policy(batch_size, gamma)
            return ExpectedAcceptance(self.max_gamma if gamma is None else gamma, batch_size, self.confidence)

    config: Config  # type: ignore[assignment]
    head: DSparkHead

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.lm.hidden_layers = (-1,)  # input of the Markov head

    def load(self, checkpoint: Checkpoint) -> DSparkHead:
        check_head_config(checkpoint, self.name, self.layout)
        target, tensors = self.context.target_model, renamed(checkpoint)
        options = backbone(checkpoint, tensors, target, self.config.layers)
        rank, width = (_width(tensors, key) for key in ("markov_head.markov_w1", "confidence_head.proj"))
        kind = next((kind for kind, key in _KINDS.items() if key in tensors), "vanilla")
        configured = merged_config(checkpoint).get("markov_head_type", kind)
        if rank and configured != kind:
            raise checkpoint.refused(
                f"markov_head_type is {configured!r:.80} in config.json, but the tensors are those of {kind}"
            )
        if kind == "rnn" and not options["from_anchor"]:
            raise checkpoint.refused("a markov_head of type rnn is supported only with sample_from_anchor")
        if self.config.confidence is not None and not width:
            raise checkpoint.refused("they lack a confidence_head; leave out confidence")
        for name, rows in (("w1", len(options["embedding"])), ("w2", len(options["head"]))):
            table = tensors.get(key := f"markov_head.markov_{name}.weight")
            if table is not None and table.dim() and near(len(table), rows):
                tensors[key] = with_rows(table, rows)
        size = options["config"].hidden_size
        if width not in (0, size, size + rank):
            raise checkpoint.refused(f"confidence_head has input width {width}, which must be {size} or {size + rank}")
        head = DSparkHead(**options, kind=kind, rank=rank, confidence=width)
        checkpoint.fill(head, tensors, shared=("embed_tokens.weight", "lm_head.weight"))
        return head

    def next_logits(self, logits: Tensor, states: Tensor | None) -> Callable[[Tensor], Tensor]:
        assert states is not None
        rows = iter(zip(logits.unbind(1), states.unbind(1), strict=True))
        memory: Tensor | None = None

        def corrected(token: Tensor) -> Tensor:
            nonlocal memory
            row, state = next(rows)
            if isinstance(self.policy, ExpectedAcceptance):
                self.policy.expected = self.head.expected(token[:, 0], state)
            if self.head.markov_head is not None:
                correction, memory = self.head.markov_head(token[:, 0], state, memory)
                row = row + correction
            return row[:, None]

        return corrected


def _width(tensors: dict[str, Tensor], name: str) -> int:
    """Last dimension of a weight, 0 if it is missing."""
    weight = tensors.get(f"{name}.weight")
    return weight.shape[-1] if weight is not None and weight.dim() else 0
