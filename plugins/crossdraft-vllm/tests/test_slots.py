"""Requests that arrive, move, are preempted and end, in the slots of a drafter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from crossdraft_vllm.slots import DrafterSlots, Row

from crossdraft import CHAIN, Draft, DraftContext, Drafter, DraftTraits, Sampling, find_drafter
from crossdraft.framework.plugins import entries

SLOTS = 4


def make_context(slots: int = SLOTS) -> DraftContext:
    return DraftContext(Sampling(), slots, 200, 100, torch.device("cpu"))


class Recorder(Drafter):
    """Drafts the last token + 1, + 2, ..; records its calls."""

    name = "recorder"

    def __init__(self, config: Any, context: DraftContext):
        super().__init__(config, context)
        self.calls: list[tuple] = []

    @classmethod
    def traits(cls, config, sampling):
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=3)

    def start(self, row, prompt, hidden=None):
        self.calls.append(("start", row, list(prompt)))

    def propose(self, sequences, rng):
        rows = [
            [history[-1] + 1 + i for i in range(min(3, limit))] if history else []
            for history, limit in zip(sequences.history, sequences.limit, strict=True)
        ]
        return Draft.copied(rows, sequences.device)

    def observe(self, sequences, draft, verdict, accepted, scores):
        assert scores.p.shape[:2] == (draft.batch_size, draft.width + 1)
        for row, history in enumerate(sequences.history):
            if history:
                self.calls.append(("observe", row, accepted[row], draft.count[row].item(), history[-1]))

    def free(self, row, finish_reason=None):
        self.calls.append(("free", row, finish_reason))


def make_slots(slots: int = SLOTS) -> tuple[DrafterSlots, list[tuple]]:
    drafter_slots = DrafterSlots((Recorder, Recorder.Config()), make_context(slots))
    return drafter_slots, drafter_slots.drafter.calls  # type: ignore[attr-defined]


def row(name: str, tokens: list[int], sampled: int, prompt_len: int = 2, limit: int = 9, stop: tuple = ()) -> Row:
    return Row(name, [*tokens, 0, 0], len(tokens), prompt_len, tokens[len(tokens) - sampled :], limit, stop)


def test_life_of_a_request():
    slots, calls = make_slots()
    assert slots.propose([row("a", [5, 6, 7], 1)], {"a"}) == [[8, 9, 10]]
    slot = calls[0][1]
    assert calls == [("start", slot, [5, 6]), ("observe", slot, 0, 0, 7)]
    assert slots.propose([row("a", [5, 6, 7, 8, 9, 20], 3)], {"a"}) == [[21, 22, 23]]
    assert calls[-1] == ("observe", slot, 2, 3, 20)
    assert slots.propose([], set()) == []
    assert calls[-1] == ("free", slot, "abort")


@pytest.mark.parametrize(
    "tokens, limit, stop, draft, reason",
    [
        ([5, 6, 7, 8], 0, (), [], "abort"),  # one token is left
        ([5, 6, 7, 8], -1, (), [], "length"),
        ([5, 6, 7, 8], 2, (), [9, 10], "abort"),
        ([5, 6, 7, 8], 9, (8,), [], "stop"),
        ([5, 6, 7, 8], 9, (7,), [], "stop"),  # tokens after the end are not in the text
    ],
)
def test_end_of_a_response(tokens, limit, stop, draft, reason):
    slots, calls = make_slots()
    assert slots.propose([row("a", tokens, 2, limit=limit, stop=stop)], {"a"}) == [draft]
    assert calls[-1][-1] == (7 if stop == (7,) else 8)
    slots.propose([], set())
    assert calls[-1][-1] == reason


def test_prompt_in_chunks_is_not_started():
    slots, calls = make_slots()
    partial = Row("a", [5, 6, 7, 0], 3, 3, [], 9)
    assert slots.propose([partial, row("b", [1, 2, 3], 1)], {"a", "b"}) == [[], [4, 5, 6]]
    assert [call[0] for call in calls] == ["start", "observe"]


def test_rows_move():
    slots, calls = make_slots()
    slots.propose([row("a", [5, 6, 7], 1), row("b", [1, 2, 3], 1)], {"a", "b"})
    drafts = slots.propose([row("b", [1, 2, 3, 4, 9], 2), row("a", [5, 6, 7, 30], 1)], {"a", "b"})
    assert drafts == [[10, 11, 12], [31, 32, 33]]
    assert calls[-2:] == [("observe", 0, 0, 3, 30), ("observe", 1, 1, 3, 9)]
    assert [call[0] for call in calls].count("start") == 2


def test_absent_request_keeps_its_slot_while_there_are_enough():
    slots, calls = make_slots(2)
    slots.propose([row("a", [5, 6, 7], 1)], {"a"})
    slots.propose([row("b", [1, 2, 3], 1)], {"a", "b"})
    slots.propose([row("a", [5, 6, 7, 8], 1)], {"a", "b"})
    assert [call[0] for call in calls].count("start") == 2
    slots.propose([row("c", [1, 2, 3], 1), row("a", [5, 6, 7, 8, 9], 1)], {"a", "b", "c"})
    assert ("free", 1, None) in calls  # of b
    slots.propose([row("b", [1, 2, 3, 4], 1), row("a", [5, 6, 7, 8, 9, 10], 1)], {"a", "b"})
    assert calls[-4:-2] == [("free", 1, "abort"), ("start", 1, [1, 2])]  # of c; of b, from its prompt


def test_changed_text_is_started_again():
    slots, calls = make_slots()
    slots.propose([row("a", [5, 6, 7], 1)], {"a"})
    slots.propose([row("a", [5, 6, 50, 60, 70], 1)], {"a"})
    assert [call[0] for call in calls] == ["start", "observe", "free", "start", "observe"]
    assert calls[-1][2:] == (0, 0, 70)


LOOKUPS = [{"name": "prompt-lookup", "gamma": 3}, {"name": "prompt-lookup", "match": "first"}]


@pytest.mark.parametrize("drafter", [*LOOKUPS, {"name": "combine", "drafters": LOOKUPS}])
def test_random_schedule_drafts_as_a_fresh_drafter(drafter):
    if drafter["name"] not in entries("drafters"):
        pytest.skip("the plug-in crossdraft-combine is not installed")
    rng, cls = random.Random(0), find_drafter(drafter)
    slots = DrafterSlots(cls, make_context())
    texts: dict[str, list[int]] = {}
    for step in range(120):
        for name in list(texts):
            if rng.random() < 0.1:
                del texts[name]
        while len(texts) < 6 and rng.random() < 0.6:  # more requests than slots
            texts[f"{step}-{len(texts)}"] = [rng.randrange(4) for _ in range(5)]
        batch = []
        for name in rng.sample(list(texts), min(len(texts), SLOTS)):
            new = [rng.randrange(4) for _ in range(rng.randint(1, 3))]
            texts[name] += new
            tokens = [*texts[name], 99]  # an engine's buffer is longer than the text
            batch.append(Row(name, tokens, len(texts[name]), 5, new, rng.randint(0, 5)))
        drafts = slots.propose(batch, texts.keys())
        for item, draft in zip(batch, drafts, strict=True):
            assert draft == fresh_draft(cls, texts[item.request], item.limit)


def fresh_draft(drafter: Any, text: list[int], limit: int) -> list[int]:
    one = DrafterSlots(drafter, make_context(1))
    return one.propose([Row("x", text, len(text), len(text) - 1, text[-1:], limit)], {"x"})[0]
