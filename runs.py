"""Finished runs: their cells, titles, marks and costs, and the intervals of what was measured."""

from ._published import published

__getattr__, __all__ = published(__name__)
