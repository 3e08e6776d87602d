"""What commands of plug-ins are written with: options, files read within limits and written whole, limits."""

from ._published import published

__getattr__, __all__ = published(__name__)
