"""The prompt set ``example-name``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from crossdraft import Register, hookimpl


def questions() -> Iterator[dict[str, Any]]:
    """One row per conversation: ``turns`` are the user's messages; results are grouped by ``category``."""
    for number, city in enumerate(["Lisbon", "Nairobi", "Quito"], 1):
        yield {
            "question_id": number,
            "category": "travel",
            "turns": [f"What should I see in {city} in one day?", "Which of these is free?"],
        }
    for number, base in enumerate([12, 15, 21], 4):
        yield {"question_id": number, "category": "numbers", "turns": [f"What is {base} times {base}? Show each step."]}


@hookimpl
def crossdraft_register_prompts(register: Register) -> None:
    # Or the path of a JSONL file with such rows: pathlib.Path(__file__).with_name("rows.jsonl").
    register("example-name", questions, summary="six conversations about cities and numbers")
