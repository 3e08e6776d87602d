"""A recipe of tiny models, and what its runs left on disk."""

import json
from pathlib import Path
from typing import Any

RECIPE = """\
# does it run?
question: does it run?
target: {target}
prompts: {prompts}
dtype: float32
device: cpu
max_new_tokens: 6
drafters:
  - prompt-lookup
  - {{name: draft-model, model: {same}, gamma: 3}}
verifiers: [greedy, token, block]
matrix:
  temperature: [0, 1.0]
  batch_size: [1, 3]
exclude:
  - {{verifier: [token, block], temperature: 0}}
"""
ONE_GROUP = ["matrix={}", "sampling.temperature=1", "exclude=[]", "verifiers=[token, block]"]


def cells(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("runs/*/cells/*"))


def output(directory: Path) -> dict[tuple[Any, int], list[int]]:
    lines = (directory / "responses.jsonl").read_text(encoding="utf-8").splitlines()
    return {(r["question_id"], r["turn"]): r["tokens"] for r in map(json.loads, lines)}
