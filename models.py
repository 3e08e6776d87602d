"""Checkpoints, tokenizers and chat templates, and the slots and decoders that run them."""

from ._published import published

__getattr__, __all__ = published(__name__)
