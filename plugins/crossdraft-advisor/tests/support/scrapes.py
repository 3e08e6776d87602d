"""Scrapes of speculative-decoding counters, as an engine would print them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossdraft_advisor.engines.counter_definitions import DEFINITIONS


def scrape(path: Path, drafts: float, per_position: Any, tokens: float | None = None, engine: str = "vllm") -> str:
    """Write the counters; return the file's name."""
    stem = f"{DEFINITIONS[engine].prefix}spec_decode_num_"
    numbers = [round(n) for n in per_position]
    lines = [f"{stem}drafts_total {round(drafts)}"]
    lines += [] if tokens is None else [f"{stem}draft_tokens_total {round(tokens)}"]
    lines.append(f"{stem}accepted_tokens_total {sum(numbers)}")
    lines += [f'{stem}accepted_tokens_per_pos_total{{position="{i}"}} {n}' for i, n in enumerate(numbers)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def scrape_rates(path: Path, marginal: Sequence[float], drafts: int = 4000) -> str:
    """Write counters with these acceptance rates by position."""
    return scrape(path, drafts, [drafts * rate for rate in marginal], drafts * len(marginal))
