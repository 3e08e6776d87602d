"""Language model defined by a table of exact probabilities, with the same protocol as a real one.

Order-1 Markov: the next-token distribution depends on the last token only; the first token after the prompt has its own
distribution. Rows are float64, so certificates are exact to 1e-12.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..contracts.drafter import DraftContext, Learner
from ..contracts.lm import LM
from ..contracts.models import Checkpoint, LoadedModel
from ..contracts.sampling import Sampling
from ..engine.constrained_lm import masked
from ..errors import ModelError
from ..lm.vocab_adapter import adapt_vocab
from ..util.tensors import on_device


@dataclass(frozen=True)
class Toy:
    """A small exact pair of models.

    Attributes:
        name: in tables.
        gamma: draft length.
        target, drafter: ``[V + 1, V]`` float64; row x holds the probabilities after token x, row V those of the first
            token.
        token_texts: texts of the target's and the drafter's tokens if the vocabularies differ; then the drafter's V may
            differ, and its first token follows row x like the others.
    """

    name: str
    gamma: int
    target: Tensor
    drafter: Tensor
    token_texts: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    @property
    def vocab_size(self) -> int:
        return self.target.shape[1]

    @property
    def prompt(self) -> list[int]:
        """Prompt tokens, ignored by tables but useful for retrieval drafters."""
        return [token % self.vocab_size for token in (0, 0, 1, 1, 0)]


class TableLM:
    """B slots of a table model; see :class:`~crossdraft.framework.contracts.lm.LM`.

    Args:
        table: ``[V + 1, V]``, probabilities after each token, as in `Toy`; or ``[V]``, for any input.
        fork: table of the model returned by `fork` for any layers; ``None`` = it has no layers.
        start: position that row V follows, the prompt's last; ``None`` = row V is never used.
    """

    context_length: int | None = None
    hidden_layers: tuple[float, ...] = ()
    fed: Tensor | None = None  # tables cannot be resumed from another model

    def __init__(self, table: Tensor, batch_size: int, fork: Tensor | None = None, start: int | None = None):
        self.batch_size, self.vocab_size = batch_size, table.shape[-1]
        self.device = table.device
        self.lengths = [0] * batch_size
        self.passes = 0
        self._logits, self._fork, self._start = table.log(), fork, start
        self._positions_since_commit: list[Tensor] = []  # [B] each
        self._forks: list[TableLM] = []  # forks with embeddings share these slots

    def set_logits(self, logits: Tensor) -> None:
        """Use ``logits [V + 1, V]`` from now on, including later in-place changes."""
        self._logits = logits.detach()

    def start(self, row: int, prompt: Sequence[int]) -> None:
        self.lengths[row] = len(prompt) - 1
        self._sync_forks()

    def forward(self, tokens: Tensor, parents: Tensor | None = None, resume_from: Any = None) -> tuple[Tensor, None]:
        self.passes += 1
        if self._logits.dim() == 1:
            return self._logits.expand(*tokens.shape, -1), None
        if len(self._logits) > self.vocab_size + 1:  # additional tokens follow row V
            tokens = tokens + (tokens >= self.vocab_size)
        if self._start is not None:
            tokens = torch.where(self._positions(tokens, parents) == self._start, self.vocab_size, tokens)
        return self._logits[tokens], None

    def _positions(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Sequence positions of the new nodes, ``[B, W]``."""
        committed = torch.tensor(self.lengths, device=self.device) - 1
        for i in range(tokens.shape[1]):
            if parents is None:
                previous = self._positions_since_commit[-1] if self._positions_since_commit else committed
            else:
                previous = (
                    torch.stack([committed, *self._positions_since_commit], 1)
                    .gather(1, parents[:, i : i + 1] + 1)
                    .squeeze(1)
                )
            self._positions_since_commit.append(previous + 1)
        return torch.stack(self._positions_since_commit[len(self._positions_since_commit) - tokens.shape[1] :], 1)

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._positions_since_commit = []
        self._sync_forks()

    def free(self, row: int) -> None:
        self.lengths[row] = 0
        self._sync_forks()

    def _sync_forks(self) -> None:
        for fork in self._forks:
            fork.lengths, fork._positions_since_commit = list(self.lengths), []

    def fork(
        self,
        layers: Sequence[int],
        *,
        no_attention: Collection[int] = (),
        no_mlp: Collection[int] = (),
        embeddings: Tensor | None = None,
    ) -> TableLM:
        """Return the fork table, or with ``embeddings [n, V]`` (logits after n additional tokens) this table."""
        if embeddings is not None:
            fork = TableLM(self._logits.exp(), self.batch_size, start=self._start)
            fork.set_logits(torch.cat([self._logits, embeddings.to(self._logits)]))
            fork.lengths = list(self.lengths)
            self._forks.append(fork)
            return fork
        if self._fork is None:
            raise ModelError("a table of probabilities has no layers, so a subset of layers cannot run")
        return TableLM(self._fork, self.batch_size, start=self._start)


@cache
def random_tables(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tables of a target and of a similar draft model."""
    generator = torch.Generator().manual_seed(5)
    target = (1.5 * torch.randn(vocab_size + 1, vocab_size, generator=generator, dtype=torch.float64)).softmax(-1)
    noise = torch.randn(vocab_size + 1, vocab_size, generator=generator, dtype=torch.float64)
    return target, (target.log() + 0.7 * noise).softmax(-1)


#: Number of look-ahead embeddings of a toy.
LOOK_AHEAD = 15


class ToyContext(DraftContext):
    """Drafter context of a toy: every model that a drafter loads is the toy's draft model.

    The heads ``toy`` are look-ahead embeddings for the drafter `pass`: rows of the draft model's table in turn.

    Args:
        target, drafter: tables, see `TableLM`.
        max_length: of the slots, in tokens.
        start: of both models, see `TableLM`; with ``token_texts``, of the target only.
        token_texts: see `Toy`.
    """

    def __init__(
        self,
        target: Tensor,
        drafter: Tensor,
        sampling: Sampling,
        batch_size: int,
        max_length: int = 256,
        start: int | None = None,
        token_texts: tuple[tuple[str, ...], tuple[str, ...]] | None = None,
    ):
        self._drafter, self._words = drafter, token_texts
        self._start = start if token_texts is None else None
        super().__init__(
            sampling=sampling,
            batch_size=batch_size,
            max_length=max_length,
            vocab_size=target.shape[-1],
            device=target.device,
            target=TableLM(target, batch_size, fork=drafter, start=start),
            target_name="toy",
            tokenizer=None if token_texts is None else tokenizer_of(token_texts[0]),
        )

    def load_model(self, name: str) -> LoadedModel:
        if self._words is None:
            return super().load_model(name)
        return LoadedModel(None, tokenizer_of(self._words[1]), name, "a table", "", (), None)

    def load_lm(self, name: str, *, extra_tokens: int = 0, ids: Tensor | None = None, unknown: int = 0) -> LM:
        if self._words is not None and ids is None:
            raise ModelError(f"'{name}' cannot draft for 'toy': their vocabularies differ")
        lm: Any = TableLM(self._drafter, self.batch_size, start=self._start)
        return masked(adapt_vocab(lm, self.vocab_size, ids, unknown), self.constraints, self.mask_drafts)

    def load_heads(self, name: str) -> Checkpoint:
        if name != "toy" or self._words is not None:
            return super().load_heads(name)
        rows = self._drafter.log().clamp(min=-1e4)  # finite logits of impossible tokens
        rows = rows[torch.arange(LOOK_AHEAD, device=rows.device) % len(rows)]
        return Checkpoint(name, Path(name), {}, {"embeddings": rows}, "a table", "")

    def load_learner(self, name: str) -> Learner:
        if self._words is not None:
            raise ModelError(f"'{name}' cannot draft for 'toy': their vocabularies differ")
        lm, start, last = TableLM(self._drafter, self.batch_size, start=self._start), self._start, self.vocab_size
        with torch.inference_mode(False):
            table = self._drafter.log().requires_grad_()
        lm.set_logits(table)

        def logits(tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
            return table[on_device([last if i == start else tokens[i] for i in positions], table.device)]

        return Learner(lm, [table], logits)


@cache
def tokenizer_of(token_texts: tuple[str, ...]) -> Any:
    """A transformers tokenizer whose token i is ``words[i]``; texts are encoded in as few tokens as possible."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import Unigram
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(Unigram([(word, -1.0) for word in token_texts]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
