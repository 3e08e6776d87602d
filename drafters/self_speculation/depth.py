"""How many layers a target has."""

from __future__ import annotations


def depth_of(target_model: object) -> int | None:
    """The number of a target's layers; None where it is no transformers model (that of the certificate, say)."""
    config = getattr(target_model, "config", None)
    return None if config is None else config.get_text_config().num_hidden_layers
