"""Helpers of drafters that run layers of their target."""

from __future__ import annotations

from crossdraft import LM, DraftContext, ModelError


def target_of(context: DraftContext, drafter: str) -> LM:
    """Return the target's slots. Raises ModelError if the context has no target, as in some replays."""
    if context.target is None:
        raise ModelError(f"drafter '{drafter}' runs layers of the target, which is not loaded; use another drafter")
    return context.target


def depth_of(target_model: object) -> int | None:
    """Number of the target's layers; None if it is not a transformers model, as in the certificate."""
    config = getattr(target_model, "config", None)
    return None if config is None else config.get_text_config().num_hidden_layers
