"""Which widths and reaches passes are recorded for: few, so that they come again, and all that may come.

A pass over more slots or more tokens than it needs does useless work, at most a quarter where this is by steps; one
that is recorded for each length is recorded again and again.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional


def stepped(n: int, least: int) -> int:
    """The smallest of 1, 2, .. 8, 10, 12, 14, 16, 20, 24, .. times ``least`` that is not below ``n``."""
    step = least << max((-(-n // least)).bit_length() - 3, 0)
    return -(-n // step) * step


def reaches(least: int, most: int) -> list[int]:
    """All that `stepped` says of 1 to ``most``, longest first; the longest is ``most`` itself."""
    reach, found = stepped(1, least), []
    while reach < most:
        found.append(reach)
        reach = stepped(reach + 1, least)
    return [most, *reversed(found)]


def widths(width: int, widest: int) -> list[int]:
    """``width``, ``widest`` and the powers of two below the larger of them, widest first."""
    widest = max(width, widest)
    return sorted({width, widest, *(1 << i for i in range((widest - 1).bit_length()))}, reverse=True)


def wider(width: int, more: int) -> list[int]:
    """``width``, ``width + more`` and those that lie a power of two above ``width`` in between, widest first."""
    return sorted({width, width + more, *(width + n for n in widths(1, more)[1:] if more)}, reverse=True)


def at_width(tensors: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """``tensors [B, W, ..]``, by name, cut or padded to ``width``: with 0, parents with -1, the root."""
    found = {}
    for name, tensor in tensors.items():
        more, nothing = width - tensor.shape[1], -1 if name in ("parents", "path") else 0
        behind = (*(0, 0) * (tensor.dim() - 2), 0, more)
        found[name] = functional.pad(tensor, behind, value=nothing) if more > 0 else tensor[:, :width]
    return found
