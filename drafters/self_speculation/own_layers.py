"""What a drafter that is part of its target asks of it."""

from __future__ import annotations

from ...framework.contracts.drafter import DraftContext
from ...framework.contracts.lm import LM
from ...framework.errors import ModelError


def target_of(context: DraftContext, drafter: str) -> LM:
    """The target's slots. Raises ModelError where there is no target, in a replay that can do without, say."""
    if context.target is None:
        raise ModelError(f"drafter '{drafter}' runs layers of the target, which is not there")
    return context.target


def depth_of(target_model: object) -> int | None:
    """The number of a target's layers; None where it is no transformers model (that of the certificate, say)."""
    config = getattr(target_model, "config", None)
    return None if config is None else config.get_text_config().num_hidden_layers
