"""Numbers that are too small or too long: an error with the option or the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor.simulate.arrivals import read_trace

from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError


@pytest.mark.parametrize("value", ["1e-300", "1e-160", "0"])
def test_share_that_is_too_small(value: str, refused: Any) -> None:
    refused(["certify-samples", "x", "--deviation", value], f"--deviation {value}: should be greater than or equal to")
    assert cli.main(["certify-samples", "--questions", "10", "--score", "1e-9", "--deviation", "1e-9"]) == 0


def test_replay_without_prompts(refused: Any, tmp_path: Path) -> None:
    row = {"drafter": "a", "verifier": "b", "k": 1, "gamma": 2, "by_prompt": []}
    file = tmp_path / "replay.json"
    file.write_text(json.dumps({"prompt_ids": [], "rows": [row], "responses": 0}))
    for words in (["gate", str(file)], ["gate", str(file), str(file)]):
        refused(words, "replay.json is not the output of crossdraft replay --json", "prompt_ids is empty")


def test_number_with_many_digits_in_a_trace(tmp_path: Path) -> None:
    digits = "9" * 5000
    for name, text in (
        ("time.csv", f"TIMESTAMP,ContextTokens,GeneratedTokens\n{digits},5,5\n"),
        ("tokens.csv", f"TIMESTAMP,ContextTokens,GeneratedTokens\n1,{digits},5\n"),
        ("time.jsonl", f'{{"timestamp": {digits}, "input_length": 5, "output_length": 5}}\n'),
        ("tokens.jsonl", f'{{"timestamp": 1, "input_length": 5, "output_length": {digits}}}\n'),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=name):
            read_trace(str(tmp_path / name))
