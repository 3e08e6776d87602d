"""What drafters on the target's hidden states (EAGLE, Medusa, MTP, blocks) are built of."""

from ._published import published

__getattr__, __all__ = published(__name__)
