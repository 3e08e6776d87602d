"""A language model given by a table of exact probabilities, behind the same protocol as a real one.

Order-1 Markov: the law of the next token depends on the last one, and the first token after the prompt has a law of its
own. Rows are float64, which is what makes certificates exact to 1e-12.
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
from ..errors import ModelError
from ..lm.vocab_adapter import fitted


@dataclass(frozen=True)
class Toy:
    """A small exact pair of models.

    Attributes:
        name: what tables call it.
        gamma: draft length.
        target, drafter: ``[V + 1, V]`` float64; row x is the law after token x, row V the law of the first token.
        words: what the target's tokens and the drafter's spell, where these are not the same; then the drafter may have
            another number of tokens, and its first one follows row x like the others.
    """

    name: str
    gamma: int
    target: Tensor
    drafter: Tensor
    words: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    @property
    def vocab_size(self) -> int:
        return self.target.shape[1]

    @property
    def prompt(self) -> list[int]:
        """What sequences start with. Tables do not look at it, but drafters that search the text find something."""
        return [token % self.vocab_size for token in (0, 0, 1, 1, 0)]


class TableLM:
    """B slots of a table model; see :class:`~crossdraft.framework.contracts.lm.LM`.

    Args:
        table: ``[V + 1, V]``, the law after each token, as in `Toy`; or ``[V]``, one law after whatever is fed.
        fork: the table of what `fork` returns, whichever layers are asked for; ``None`` = it has no layers.
        start: the position that row V is the law after, the prompt's last; ``None`` = row V is never used.
    """

    context_length: int | None = None
    hidden_layers: tuple[float, ...] = ()
    fed: Tensor | None = None  # another table is no part of this one

    def __init__(self, table: Tensor, batch_size: int, fork: Tensor | None = None, start: int | None = None):
        self.batch_size, self.vocab_size = batch_size, table.shape[-1]
        self.device = table.device
        self.lengths = [0] * batch_size
        self.passes = 0
        self._logits, self._fork, self._start = table.log(), fork, start
        self._grown: list[Tensor] = []  # positions [B] of the nodes grown since the last `keep`
        self._beside: list[TableLM] = []  # forks with embeddings, whose slots are these

    def follow(self, logits: Tensor) -> None:
        """Say what ``logits [V + 1, V]`` say from here on, also when they change."""
        self._logits = logits.detach()

    def start(self, row: int, prompt: Sequence[int]) -> None:
        self.lengths[row] = len(prompt) - 1
        self._followed()

    def forward(self, tokens: Tensor, parents: Tensor | None = None, resume_from: Any = None) -> tuple[Tensor, None]:
        self.passes += 1
        if self._logits.dim() == 1:
            return self._logits.expand(*tokens.shape, -1), None
        if len(self._logits) > self.vocab_size + 1:  # tokens beside the model's own stand behind row V
            tokens = tokens + (tokens >= self.vocab_size)
        if self._start is not None:
            tokens = torch.where(self._positions(tokens, parents) == self._start, self.vocab_size, tokens)
        return self._logits[tokens], None

    def _positions(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """``[B, W]``: where in its sequence each new node stands."""
        committed = torch.tensor(self.lengths, device=self.device) - 1
        for i in range(tokens.shape[1]):
            if parents is None:
                before = self._grown[-1] if self._grown else committed
            else:
                before = torch.stack([committed, *self._grown], 1).gather(1, parents[:, i : i + 1] + 1).squeeze(1)
            self._grown.append(before + 1)
        return torch.stack(self._grown[len(self._grown) - tokens.shape[1] :], 1)

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._grown = []
        self._followed()

    def free(self, row: int) -> None:
        self.lengths[row] = 0
        self._followed()

    def _followed(self) -> None:
        for fork in self._beside:
            fork.lengths, fork._grown = list(self.lengths), []

    def fork(
        self,
        layers: Sequence[int],
        *,
        no_attention: Collection[int] = (),
        no_mlp: Collection[int] = (),
        embeddings: Tensor | None = None,
    ) -> TableLM:
        """With ``embeddings [n, V]``, which are the logits after each of these tokens, the table is this one."""
        if embeddings is not None:
            beside = TableLM(self._logits.exp(), self.batch_size, start=self._start)
            beside.follow(torch.cat([self._logits, embeddings.to(self._logits)]))
            beside.lengths = list(self.lengths)
            self._beside.append(beside)
            return beside
        if self._fork is None:
            raise ModelError("a table of probabilities has no layers, so none of them can be run alone")
        return TableLM(self._fork, self.batch_size, start=self._start)


#: Look-ahead embeddings of a toy.
LOOK_AHEAD = 15


class ToyContext(DraftContext):
    """What a drafter may ask for where the target is a toy: whatever it loads is the toy's drafter model.

    The heads called ``toy`` are look-ahead embeddings, as `pass` reads them: rows of that model's table in turn.

    Args:
        target, drafter: tables, see `TableLM`.
        max_length: of the slots, in tokens.
        start: of both models, see `TableLM`; of the target alone where there are ``words``.
        words: see `Toy`.
    """

    def __init__(
        self,
        target: Tensor,
        drafter: Tensor,
        sampling: Sampling,
        batch_size: int,
        max_length: int = 256,
        start: int | None = None,
        words: tuple[tuple[str, ...], tuple[str, ...]] | None = None,
    ):
        self._drafter, self._words = drafter, words
        self._start = start if words is None else None
        super().__init__(
            sampling=sampling,
            batch_size=batch_size,
            max_length=max_length,
            vocab_size=target.shape[-1],
            device=target.device,
            target=TableLM(target, batch_size, fork=drafter, start=start),
            target_name="toy",
            tokenizer=None if words is None else tokenizer_of(words[0]),
        )

    def load_model(self, name: str) -> LoadedModel:
        if self._words is None:
            return super().load_model(name)
        return LoadedModel(None, tokenizer_of(self._words[1]), name, "a table", "", (), None)

    def load_lm(self, name: str, *, room: int = 0, ids: Tensor | None = None, unknown: int = 0) -> LM:
        if self._words is not None and ids is None:
            raise ModelError(f"'{name}' cannot draft for 'toy': they have other tokens")
        lm: Any = TableLM(self._drafter, self.batch_size, start=self._start)
        return fitted(lm, self.vocab_size, ids, unknown)

    def load_heads(self, name: str) -> Checkpoint:
        if name != "toy" or self._words is not None:
            return super().load_heads(name)
        rows = self._drafter.log().clamp(min=-1e4)  # what is never said: a number whose exponential is 0
        rows = rows[torch.arange(LOOK_AHEAD, device=rows.device) % len(rows)]
        return Checkpoint(name, Path(name), {}, {"embeddings": rows}, "a table", "")

    def load_learner(self, name: str) -> Learner:
        if self._words is not None:
            raise ModelError(f"'{name}' cannot draft for 'toy': they have other tokens")
        lm, start, last = TableLM(self._drafter, self.batch_size, start=self._start), self._start, self.vocab_size
        with torch.inference_mode(False):
            table = self._drafter.log().requires_grad_()
        lm.follow(table)

        def logits(tokens: Sequence[int], at: Sequence[int]) -> Tensor:
            return table[[last if i == start else tokens[i] for i in at]]

        return Learner(lm, [table], logits)


@cache
def tokenizer_of(words: tuple[str, ...]) -> Any:
    """A tokenizer of transformers whose token i spells ``words[i]``; it says a text in as few tokens as it can."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import Unigram
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(Unigram([(word, -1.0) for word in words]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
