"""Draft models in the target's token ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.nn import functional

from ..contracts.lm import LM, prefill
from ..errors import ModelError


class FittedLM:
    """A draft model whose logits are padded or cut to the target's vocabulary size.

    Embedding tables are padded, so models with the same tokenizer may differ in size. Ids that only the target has get
    logit -inf; ids that only the draft model has are not in the tokenizer and are cut.
    """

    def __init__(self, lm: LM, vocab_size: int):
        self._lm, self._own, self.vocab_size = lm, lm.vocab_size, vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def start(self, row: int, prompt: Sequence[int]) -> Tensor | None:
        return self._lm.start(row, self._own_ids(prompt))

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        prefill(self._lm, {row: self._own_ids(tokens) for row, tokens in prompts.items()})

    def _own_ids(self, prompt: Sequence[int]) -> list[int]:
        return [min(token, self._own - 1) for token in prompt]

    def forward(self, tokens: Tensor, parents: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, hidden = self._lm.forward(tokens.clamp(max=self._own - 1), parents)
        extra = self.vocab_size - self._own
        if extra > 0:
            return functional.pad(logits, (0, extra), value=-math.inf), hidden
        return logits[..., : self.vocab_size], hidden


class MappedLM(FittedLM):
    """A draft model with another vocabulary, whose inputs and logits are mapped to the target's ids.

    Args:
        ids: ``[V]`` int64, the draft model's id of each target id; -1 = none, its logit is -inf.
        unknown: the draft model's input id for target ids that it does not have.

    Raises:
        ModelError: the map contains an id that the draft model does not have.
    """

    def __init__(self, lm: LM, ids: Tensor, unknown: int):
        super().__init__(lm, len(ids))
        if int(ids.max()) >= lm.vocab_size or not 0 <= unknown < lm.vocab_size:
            raise ModelError(f"the id map has ids beyond the draft model's vocabulary of {lm.vocab_size}")
        self._host_ids = ids.where(ids >= 0, unknown).cpu()  # for prompts
        self._ids, self._input_ids = ids.to(lm.device), self._host_ids.to(lm.device)

    def _own_ids(self, prompt: Sequence[int]) -> list[int]:
        return self._host_ids[list(prompt)].tolist()

    def forward(self, tokens: Tensor, parents: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, hidden = self._lm.forward(self._input_ids[tokens], parents)
        return logits[..., self._input_ids].masked_fill(self._ids < 0, -math.inf), hidden


def adapt_vocab(lm: LM, vocab_size: int, ids: Tensor | None = None, unknown: int = 0) -> LM:
    """``lm`` in the target's ids: unchanged, padded, or mapped (see `DraftContext.load_lm`)."""
    # Both delegate other attributes to ``lm``, which a type checker cannot see.
    if ids is not None:
        return cast(LM, MappedLM(lm, ids, unknown))
    return lm if lm.vocab_size == vocab_size else cast(LM, FittedLM(lm, vocab_size))
