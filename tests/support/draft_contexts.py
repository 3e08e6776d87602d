"""A drafter context for tests with given models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossdraft import LM, Checkpoint, Sampling
from crossdraft.framework.api.build import ModuleContext
from crossdraft.framework.models.checkpoint import load_checkpoint


class GivenContext(ModuleContext):
    """That of a target's slots, without tokenizers or names.

    Args:
        load_lm: makes the slots of a draft model, or raises.
        load_heads: reads heads, from a directory by default.
        target_model: the target's module, for heads.
    """

    def __init__(
        self,
        target: Any,
        sampling: Sampling,
        max_length: int,
        *,
        load_lm: Callable[[str], LM] | None = None,
        load_heads: Callable[[str], Checkpoint] = load_checkpoint,
        target_model: Any = None,
        final_q: bool = False,
    ):
        super().__init__(
            sampling=sampling,
            batch_size=target.batch_size,
            max_length=max_length,
            vocab_size=target.vocab_size,
            device=target.device,
            target=target,
            target_model=target_model,
            final_q=final_q,
        )
        self._load_lm, self._load_heads = load_lm, load_heads

    def load_lm(self, name: str, *, extra_tokens: int = 0, **_: Any) -> LM:
        assert self._load_lm is not None, f"the drafter asked for {name}, which it should not"
        return self._load_lm(name)

    def load_heads(self, name: str) -> Checkpoint:
        return self._load_heads(name)
