"""Question files from two public training sets, as they were used for the drafters of this pack.

    python public_questions.py seed_tasks.jsonl train.jsonl

seed_tasks.jsonl: Self-Instruct's 175 seed tasks (Y. Wang et al. 2023; tatsu-lab/stanford_alpaca, Apache-2.0).
train.jsonl: GSM8K's training questions (K. Cobbe et al. 2021; openai/grade-school-math, MIT), disjoint from the test
questions in Spec-Bench. Writes self_instruct_seed_tasks.jsonl, gsm8k_train.jsonl (350 of them in a seeded order) and
gsm8k_train2.jsonl (the next 450), for `--questions` of `crossdraft train`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GSM8K = {"gsm8k_train.jsonl": slice(0, 350), "gsm8k_train2.jsonl": slice(350, 800)}


def read(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def write(file: str, rows: Sequence[dict[str, Any]]) -> None:
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} questions in {file}")


def main(seed_tasks: str, gsm8k: str) -> None:
    results = []
    for row in read(seed_tasks):
        inputs = row["instances"][0]["input"]
        results.append({"question": row["instruction"] + (f"\n\n{inputs}" if inputs else "")})
    write("self_instruct_seed_tasks.jsonl", results)
    rows = read(gsm8k)
    random.Random(0).shuffle(rows)
    for name, part in GSM8K.items():
        write(name, rows[part])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
