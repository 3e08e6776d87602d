"""Metrics and configs of cells as flat mappings for trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossdraft.framework.metrics.cell_metrics import TIMES


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Flatten the metrics of a cell: intervals as ``..._low`` and ``..._high``, acceptance by depth, shares by phase.

    Metrics by category are excluded, and so are times of untimed runs.
    """
    flat: dict[str, float] = {}
    timed = bool(metrics["decode_seconds"])
    for key, value in metrics.items():
        if value is None or key == "by_category" or (key in TIMES and not timed):
            continue
        if key == "acceptance":
            flat |= {f"acceptance_{i}": p for i, p in enumerate(value, 1)}
        elif key == "shares":
            flat |= {f"{phase}_share": share for phase, share in value.items()}
        elif isinstance(value, Mapping):
            ends = {"": value["value"], "_low": value["low"], "_high": value["high"]}
            flat |= {key + end: number for end, number in ends.items() if number is not None}
        else:
            flat[key] = value
    return flat


def options(config: Mapping[str, Any]) -> dict[str, str]:
    """Flatten the config of a cell, with nested options as ``drafter.gamma``."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        items = value.items() if isinstance(value, Mapping) else [("", value)]
        flat |= {f"{key}.{name}".rstrip("."): str(item) for name, item in items if item is not None}
    return flat


def title(config: Mapping[str, Any]) -> str:
    """Title of a cell."""
    drafter, verifier = (config[side].get("label") or config[side]["name"] for side in ("drafter", "verifier"))
    return f"{drafter} × {verifier}, temperature {config['sampling']['temperature']:g}, B = {config['batch_size']}"
