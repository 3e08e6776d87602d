"""Shards: parts of a run that are measured apart, by several machines or by the workers of a launcher.

Shard k of n measures the groups k, k + n, k + 2n, ... of a recipe. It has a directory of its own, so that no two
processes write to the same one: ``<directory of the run>/shards/k-of-n`` holds what the directory of a run holds,
and ``shard.json``: which cells there are in all, and which groups this shard has finished.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UsageError, quoted

T = TypeVar("T")
#: In the directory of a shard.
FILE = "shard.json"
#: In the directory of a run, where its shards are.
FOLDER = "shards"


@dataclass(frozen=True)
class Shard:
    """Part ``number`` (from 1) of ``of``."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """``"2/4"``. Raises UsageError."""
        found = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", text, re.ASCII)
        if found is None or int(found[1]) > int(found[2]):
            raise UsageError(f"--shard {quoted(text)} is no part of a run; write 1/4, 2/4, 3/4 or 4/4 for four of them")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def directory(self, run: Path) -> Path:
        """Its directory within that of the run."""
        return run / FOLDER / f"{self.number}-of-{self.of}"

    def part(self, groups: Sequence[T]) -> Sequence[T]:
        """Its groups of all of them. Raises UsageError where there are fewer groups than shards."""
        if self.of > len(groups):
            raise UsageError(f"the recipe has {len(groups)} groups, which cannot be shared by {self.of} shards")
        return groups[self.number - 1 :: self.of]


def joined(environments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One ``environment.json`` of several: the first one, with the models and conditions of all, and the machines that
    are not the first one's under ``elsewhere``."""
    found: dict[str, Any] = {"models": {}, "conditions": [], "elsewhere": []}
    known = [environment for environment in environments if environment]
    for environment in known:
        found["models"] |= environment.get("models", {})
        machine = {key: environment.get(key) for key in ("cpu", "gpus", "memory_gib")}
        for one in (machine, *environment.get("elsewhere", [])):
            if one not in found["elsewhere"]:
                found["elsewhere"].append(one)
        found["conditions"] += [one for one in environment.get("conditions", []) if one not in found["conditions"]]
    return {**known[0], **found, "elsewhere": found["elsewhere"][1:]} if known else {}
