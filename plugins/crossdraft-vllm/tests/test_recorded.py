"""The drafter ``recorded-responses``."""

from __future__ import annotations

import json

import pytest
import torch
from crossdraft_vllm.recorded import RecordedResponses
from crossdraft_vllm.slots import DrafterSlots, Row

from crossdraft import DraftContext, Sampling, UsageError

RECORDED = [
    {"prompt": [1, 2], "tokens": [3, 4, 5, 6]},
    {"prompt": [1, 2], "tokens": [3, 9, 9]},
    {"prompt": [2, 2], "tokens": [7]},
]


def make_slots(path, lines=None, **options) -> DrafterSlots:
    path.write_text("\n".join(json.dumps(line) for line in (RECORDED if lines is None else lines)), encoding="utf-8")
    config = RecordedResponses.Config(responses=str(path), **options)
    context = DraftContext(Sampling(), 2, 50, 10, torch.device("cpu"))
    return DrafterSlots((RecordedResponses, config), context)


def test_recorded_response_is_drafted(tmp_path):
    slots = make_slots(tmp_path / "r.jsonl", gamma=3)

    def draft(name: str, tokens: list[int], sampled: int = 1, limit: int = 9) -> list[int]:
        return slots.propose([Row(name, tokens, len(tokens), 2, tokens[-sampled:], limit)], {name})[0]

    assert draft("a", [1, 2, 3]) == [4, 5, 6]
    assert draft("b", [1, 2, 3], limit=1) == [4]
    assert draft("b", [1, 2, 3, 9]) == [9]  # the other response
    assert draft("b", [1, 2, 3, 9, 9, 0], 2) == []
    assert draft("c", [1, 2, 3]) == [4, 5, 6]
    assert draft("c", [1, 2, 3, 4, 5, 6], 3) == []
    assert draft("d", [2, 2, 5]) == []
    assert draft("e", [0, 0, 5]) == []


@pytest.mark.parametrize(
    "line",
    [{"prompt": [1]}, {"prompt": "text", "tokens": [1]}, {"prompt": [1], "tokens": [True]}, [1], {"tokens": [-1]}],
)
def test_bad_line_is_named(tmp_path, line):
    with pytest.raises(UsageError, match=r"r.jsonl, line 2: expected"):
        make_slots(tmp_path / "r.jsonl", [RECORDED[0], line])


def test_missing_file(tmp_path):
    config = RecordedResponses.Config(responses=str(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="cannot be read"):
        RecordedResponses(config, DraftContext(Sampling(), 1, 9, 10, torch.device("cpu")))


def test_another_vocabulary(tmp_path):
    with pytest.raises(UsageError, match="token id 10, but the target has only 10"):
        make_slots(tmp_path / "r.jsonl", [{"prompt": [1], "tokens": [10]}])
