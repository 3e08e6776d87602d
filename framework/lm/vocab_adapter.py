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
    """A draft model whose logits are brought to the width of the target's.

    Tables are padded to step sizes, so that models with one tokenizer may differ in width. Ids that only the
    target has get logit -inf; ids that only the draft model has are cut: the tokenizer knows none of them.
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
    """A draft model with another vocabulary that speaks the target's ids, where it has tokens for them.

    Args:
        ids: ``[V]`` int64, the model's id of each of the target's, -1 = none: its logit is -inf.
        unknown: the model's id that is fed where it has none.

    Raises:
        ModelError: an id that the model does not have.
    """

    def __init__(self, lm: LM, ids: Tensor, unknown: int):
        super().__init__(lm, len(ids))
        if int(ids.max()) >= lm.vocab_size or not 0 <= unknown < lm.vocab_size:
            raise ModelError(f"a map of ids leads outside of the model's {lm.vocab_size} ids")
        self._read = ids.where(ids >= 0, unknown).cpu()  # prompts come from the host
        self._ids, self._fed = ids.to(lm.device), self._read.to(lm.device)

    def _own_ids(self, prompt: Sequence[int]) -> list[int]:
        return self._read[list(prompt)].tolist()

    def forward(self, tokens: Tensor, parents: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, hidden = self._lm.forward(self._fed[tokens], parents)
        return logits[..., self._fed].masked_fill(self._ids < 0, -math.inf), hidden


def fitted(lm: LM, vocab_size: int, ids: Tensor | None = None, unknown: int = 0) -> LM:
    """``lm`` in the target's ids: as it is, at another width, or by a map of ids (see `DraftContext.load_lm`)."""
    # Both pass on what they do not define, which a type checker cannot see.
    if ids is not None:
        return cast(LM, MappedLM(lm, ids, unknown))
    return lm if lm.vocab_size == vocab_size else cast(LM, FittedLM(lm, vocab_size))
