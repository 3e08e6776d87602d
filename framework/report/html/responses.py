"""Single responses for the page: which of their tokens were drafted and accepted, and which the target added."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..batch_sizes import drafts_chains
from .cell_table import where

if TYPE_CHECKING:
    from ...metrics.cell_metrics import StepRecord
    from ...runs.records import CellResult
    from ..load_run import FinishedRun

#: Characters of JSON that all responses of a page may take, about a tenth of what it may weigh.
ROOM = 300_000
#: Tokens and characters of one response that are shown.
MOST_TOKENS, MOST_TEXT = 320, 2000
#: What became of a token, by the letters of `fates`.
FATES = {
    "a": "accepted draft token",
    "b": "bonus token, after a draft that was accepted whole",
    "c": "correction, in place of a rejected draft token",
    "o": "bonus or correction: records of trees do not say which",
    "p": "the target's own, nothing was drafted",
}


def responses_of(runs: Sequence[tuple[str, FinishedRun]]) -> dict[str, Any]:
    """The first responses of every cell that drafts: ``{"cells": [...], "shown": n, "total": n, "fates": ...}``.

    All cells show the same prompts, as many as there is room for. A cell is ``{"title": ..., "responses": [...]}``;
    see `_response`.
    """
    cells = [
        (where(title, run, result, len(runs) > 1), result)
        for title, run in runs
        for result in run.summary.results
        if result.metrics is not None and not result.config.is_baseline
    ]
    total = max((len(result.responses) for _, result in cells), default=0)
    found: list[dict[str, Any]] = [{"title": title, "responses": []} for title, _ in cells]
    steps = [_steps(result.records) for _, result in cells]
    chains = [drafts_chains(result.config) for _, result in cells]
    room, shown = ROOM, 0
    for i in range(total):
        one = []
        for (_, result), mine, chain in zip(cells, steps, chains, strict=True):
            if i < len(result.responses) and i < len(mine):
                one.append(_response(result, i, mine[i], chain))
            else:
                one.append(None)
        room -= len(json.dumps(one))
        if room < 0 and shown:
            break
        for cell, response in zip(found, one, strict=True):
            if response is not None:
                cell["responses"].append(response)
        shown += 1
    return {"cells": found, "shown": shown, "total": total, "fates": FATES}


def _steps(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """The steps of each response, in the order of the responses."""
    return [list(rows) for _, rows in groupby(records, key=lambda r: (r.prompt, r.turn))]


def _response(result: CellResult, i: int, steps: Sequence[StepRecord], chain: bool) -> dict[str, Any]:
    """A response: its text as far as it is shown, its tokens, a letter of `FATES` for each, and how many drafted tokens
    were not kept, by the number of the token that they stood before."""
    said: Mapping[str, Any] = result.responses[i]
    tokens = list(said["tokens"])
    assert result.metrics is not None
    known = all(r.tau <= r.emitted <= r.tau + 1 for r in steps)
    whole = known and sum(r.emitted for r in steps) == len(tokens)
    letters, rejected = fates(steps, chain, result.metrics.depth) if whole else ("", {})
    text = str(said.get("text", ""))
    name = str(said["question_id"]) + (f", turn {said['turn'] + 1}" if said["turn"] else "")
    return {
        "name": name,
        "category": str(said.get("category", "")),
        "text": text[:MOST_TEXT],
        "tokens": tokens[:MOST_TOKENS],
        "fates": letters[:MOST_TOKENS],
        "rejected": {str(at): count for at, count in rejected.items() if at < MOST_TOKENS},
        "left": max(len(tokens) - MOST_TOKENS, 0),
        "cut": len(text) > MOST_TEXT,
        "steps": len(steps),
    }


def fates(steps: Sequence[StepRecord], chain: bool, depth: int) -> tuple[str, dict[int, int]]:
    """What became of each token, a letter of `FATES`, and how many drafted tokens were not kept before which.

    The first tau tokens of a step were drafted; the one after them is the target's. It is a bonus where the draft was
    accepted to its end: all nodes of a chain, or as deep as a draft can be.
    """
    letters, rejected, at = [], {}, 0
    for r in steps:
        letters.append("a" * r.tau)
        if r.emitted > r.tau:
            if r.nodes == 0:
                letters.append("p")
            elif r.tau == r.nodes or (r.tau == depth > 0):
                letters.append("b")
            else:
                letters.append("c" if chain else "o")
        if r.nodes > r.tau:
            rejected[at + r.tau] = r.nodes - r.tau
        at += r.emitted
    return "".join(letters), rejected
