"""What a tracker is given, as trackers like it: flat numbers and short texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...metrics.cell_metrics import TIMES


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a cell by name: ends of intervals as ``..._low`` and ``..._high``, acceptance by depth, shares by
    phase; those of categories are left out, and so are times where no clock ran."""
    found: dict[str, float] = {}
    timed = bool(metrics["decode_seconds"])
    for key, value in metrics.items():
        if value is None or key == "by_category" or (key in TIMES and not timed):
            continue
        if key == "acceptance":
            found |= {f"acceptance_{i}": p for i, p in enumerate(value, 1)}
        elif key == "shares":
            found |= {f"{phase}_share": share for phase, share in value.items()}
        elif isinstance(value, Mapping):
            ends = {"": value["value"], "_low": value["low"], "_high": value["high"]}
            found |= {key + end: number for end, number in ends.items() if number is not None}
        else:
            found[key] = value
    return found


def options(config: Mapping[str, Any]) -> dict[str, str]:
    """The config of a cell by name: options of its drafter, verifier, prompts and sampling as ``drafter.gamma``."""
    found: dict[str, str] = {}
    for key, value in config.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        found |= {f"{key}.{name}".rstrip("."): str(one) for name, one in inner if one is not None}
    return found


def title(config: Mapping[str, Any]) -> str:
    """What a cell is called."""
    drafter, verifier = (config[side].get("label") or config[side]["name"] for side in ("drafter", "verifier"))
    return f"{drafter} × {verifier}, temperature {config['sampling']['temperature']:g}, B = {config['batch_size']}"
