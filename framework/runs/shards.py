"""Shards: parts of a run measured separately, on several machines or by the workers of a launcher.

Shard k of n measures the groups k, k + n, k + 2n, ... of a recipe. Each shard has its own directory, so that no two
processes write to the same one: ``<directory of the run>/shards/k-of-n`` has the files of a run and ``shard.json``,
which lists all cells of the run and the finished groups of the shard.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UsageError, quoted

T = TypeVar("T")
#: File in the directory of a shard.
FILE = "shard.json"
#: Folder of the shards in the directory of a run.
FOLDER = "shards"


@dataclass(frozen=True)
class Shard:
    """Part ``number`` (from 1) of ``count``."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse ``"2/4"``. Raises UsageError."""
        match = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", text, re.ASCII)
        if match is None or int(match[1]) > int(match[2]):
            raise UsageError(
                f"--shard {quoted(text)} is not a valid shard; use K/N with K from 1 to N, for instance 1/4"
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def directory(self, run: Path) -> Path:
        return run / FOLDER / f"{self.number}-of-{self.count}"

    def part(self, groups: Sequence[T]) -> Sequence[T]:
        """Return the groups of the shard. Raises UsageError if there are fewer groups than shards."""
        if self.count > len(groups):
            raise UsageError(
                f"the recipe has {len(groups)} groups, fewer than the {self.count} shards; use fewer shards"
            )
        return groups[self.number - 1 :: self.count]


def merge_environments(environments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge several ``environment.json``.

    The result is the first one, with the models and conditions of all, and other machines under ``elsewhere``.
    """
    merged: dict[str, Any] = {"models": {}, "conditions": [], "elsewhere": []}
    nonempty = [environment for environment in environments if environment]
    for environment in nonempty:
        merged["models"] |= environment.get("models", {})
        machine = {key: environment.get(key) for key in ("cpu", "gpus", "memory_gib")}
        for entry in (machine, *environment.get("elsewhere", [])):
            if entry not in merged["elsewhere"]:
                merged["elsewhere"].append(entry)
        merged["conditions"] += [
            entry for entry in environment.get("conditions", []) if entry not in merged["conditions"]
        ]
    return {**nonempty[0], **merged, "elsewhere": merged["elsewhere"][1:]} if nonempty else {}
