"""Titles of groups and verifiers, numbers and durations in tables, charts and messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..recipe.recipe import OWN_ENGINE
from .marks import mark_of

if TYPE_CHECKING:
    from ..recipe.recipe import CellConfig
    from .records import CellResult

_ALWAYS = ("temperature", "batch_size")
_OTHERS = ("target", "engine", "dtype", "seed", "max_new_tokens", "top_k", "top_p", "min_p", "compile_verifier")
_OTHERS += ("prefill_tokens", "constraint")


def group_title(cell: CellConfig, cells: Iterable[CellConfig], but: str = "") -> str:
    """Title of a cell's group: temperature, batch size and other settings that the run varies, except for ``but``."""
    values = {key: list(dict.fromkeys(setting_of(c, key) for c in cells)) for key in _OTHERS}
    varied = [key for key in _OTHERS if len(values[key]) > 1 or (key == "engine" and cell.engine)]
    parts = []
    for key in (*_ALWAYS, *varied):
        if key == but:
            continue
        value = setting_of(cell, key)
        text = _text(value)
        alike = [other for other in values.get(key, ()) if _text(other) == text]
        number = f" ({alike.index(value) + 1})" if len(alike) > 1 else ""  # values that differ in what is left out
        parts.append(f"{key.replace('_', ' ')} {text}{number}")
    return ", ".join(parts)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def setting_of(cell: CellConfig, key: str) -> Any:
    """Value of a run or sampling key of a cell; of its engine the title."""
    if key == "engine":
        return cell.engine.title if cell.engine else OWN_ENGINE
    return getattr(cell.sampling if hasattr(cell.sampling, key) else cell, key)


def verifier_title(cell: CellResult) -> str:
    """Title of a cell's verifier in tables, with its mark unless it is certified."""
    return cell.config.verifier.title + ("" if cell.config.is_baseline else mark_of(cell).suffix)


def pair_title(cell: CellResult) -> str:
    """Title of a cell's drafter and verifier, with the verifier's mark unless it is certified."""
    return f"{cell.config.drafter.title} × {verifier_title(cell)}"


def counted(n: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format seconds with two significant units or digits."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.0f} days"
