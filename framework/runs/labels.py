"""What tables, charts and messages call groups of cells and verifiers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..recipe.recipe import CellConfig
from .marks import mark_of

if TYPE_CHECKING:
    from .records import CellResult

_ALWAYS = ("temperature", "batch_size")
_OTHERS = ("target", "dtype", "seed", "max_new_tokens", "top_k", "top_p", "min_p", "compile_verifier", "prefill_tokens")


def group_title(cell: CellConfig, cells: Iterable[CellConfig], but: str = "") -> str:
    """What the cells of a group share: temperature, batch size and whatever else the run varies, but for ``but``."""
    varied = [key for key in _OTHERS if len({_shared(c, key) for c in cells}) > 1]
    shown = []
    for key in (*_ALWAYS, *varied):
        if key == but:
            continue
        value = _shared(cell, key)
        shown.append(f"{key.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}")
    return ", ".join(shown)


def _shared(cell: CellConfig, key: str) -> Any:
    return getattr(cell.sampling if hasattr(cell.sampling, key) else cell, key)


def verifier_title(cell: CellConfig | CellResult) -> str:
    """Name of a cell's verifier in tables, with its mark unless it is certified lossless."""
    config = cell if isinstance(cell, CellConfig) else cell.config
    return config.verifier.title + mark_of(cell).suffix


def is_lossless(config: CellConfig) -> bool:
    """What the verifier of a cell promises."""
    rule = plugins.get("verifiers", config.verifier.name)
    return rule.traits(rule.Config(**config.verifier.config)).lossless
