"""Single responses for the page: the text of their tokens, and which of them were drafted and accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossdraft import cache_dir
from crossdraft.framework.util.limits import SETTINGS_BYTES
from crossdraft.models import decode_tokens

from .cell_table import cell_title

if TYPE_CHECKING:
    from crossdraft.runs import CellResult, FinishedRun, StepRecord

#: Characters of JSON that all responses of a page may take.
MOST_JSON = 300_000
#: Tokens and characters of one response that are shown.
MOST_TOKENS, MOST_TEXT = 320, 2000
#: Origin of a token, by the letters of `origins`.
ORIGINS = {
    "a": "accepted draft token",
    "b": "bonus token, after a draft that was accepted whole",
    "c": "correction, in place of a rejected draft token",
    "o": "bonus or correction: records of trees do not hold which",
    "p": "target's token, nothing was drafted",
}


def responses_of(runs: Sequence[tuple[str, FinishedRun]]) -> dict[str, Any]:
    """The first responses of every cell that drafts: ``{"cells": [...], "shown": n, "total": n, "texts": bool}``.

    All cells show the same prompts, as many as `MOST_JSON` holds. A cell is ``{"title": ..., "responses": [...]}``;
    see `_response`. ``texts``: the text of the tokens is known, not only their ids.
    """
    cells = [
        (cell_title(title, run, result, len(runs) > 1), result)
        for title, run in runs
        for result in run.summary.results
        if result.drafting
    ]
    total = max((len(result.responses) for _, result in cells), default=0)
    columns: list[dict[str, Any]] = [{"title": title, "responses": []} for title, _ in cells]
    steps = [_steps(result.records) for _, result in cells]
    chains = [result.config.drafter_traits.is_chain for _, result in cells]
    tokenizers = {target: _tokenizer(target) for target in {result.config.target for _, result in cells}}
    left, shown = MOST_JSON, 0
    for i in range(total):
        row = [
            _response(result.responses[i], result, own, chain, tokenizers[result.config.target])
            if i < len(result.responses)
            else None
            for (_, result), own, chain in zip(cells, steps, chains, strict=True)
        ]
        left -= len(json.dumps(row))
        if left < 0 and shown:
            break
        for cell, response in zip(columns, row, strict=True):
            if response is not None:
                cell["responses"].append(response)
        shown += 1
    texts = any(response["texts"] for cell in columns for response in cell["responses"])
    used = set().union(*(response["origins"] for cell in columns for response in cell["responses"]))
    legend = {letter: meaning for letter, meaning in ORIGINS.items() if letter in used}
    return {"cells": columns, "shown": shown, "total": total, "origins": legend, "texts": texts}


def _steps(records: Sequence[StepRecord]) -> dict[tuple[str, int], list[StepRecord]]:
    """The steps of each response by question and turn; responses of one token of an engine have none."""
    return {key: list(rows) for key, rows in groupby(records, key=lambda r: (r.question_id, r.turn))}


def _response(
    record: Mapping[str, Any],
    result: CellResult,
    by_turn: Mapping[tuple[str, int], Sequence[StepRecord]],
    chain: bool,
    tokenizer: Any,
) -> dict[str, Any]:
    """Texts of a response's tokens (ids if these are unknown), their origins, and the rejected draft tokens.

    The latter are counted by the index of the token behind them.
    """
    steps = by_turn.get((str(record["question_id"]), record["turn"]), ())
    tokens, text = list(record["tokens"]), str(record.get("text", ""))
    assert result.metrics is not None
    known = all(r.tau <= r.emitted <= r.tau + 1 for r in steps)
    whole = known and sum(r.emitted for r in steps) == len(tokens)
    letters, rejected = origins(steps, chain, result.metrics.depth) if whole else ("", {})
    texts = token_texts(tokenizer, tokens, text)
    return {
        "name": str(record["question_id"]) + (f", turn {record['turn'] + 1}" if record["turn"] else ""),
        "category": str(record.get("category", "")),
        "tokens": (tokens if texts is None else texts)[:MOST_TOKENS],
        "texts": texts is not None,
        "text": "" if texts is not None else text[:MOST_TEXT] + (" …" if len(text) > MOST_TEXT else ""),
        "origins": letters[:MOST_TOKENS],
        "rejected": {str(at): count for at, count in rejected.items() if at < MOST_TOKENS},
        "left": max(len(tokens) - MOST_TOKENS, 0),
        "steps": len(steps),
    }


def origins(steps: Sequence[StepRecord], chain: bool, depth: int) -> tuple[str, dict[int, int]]:
    """The origin of each token, a letter of `ORIGINS`, and the number of rejected draft tokens before a token.

    The first tau tokens of a step were drafted; the one after them is the target's. It is a bonus if the draft was
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


def token_texts(tokenizer: Any, tokens: Sequence[int], text: str) -> list[str] | None:
    """`decode_tokens`; None if ``tokenizer`` is None or does not decode ``tokens`` to ``text``."""
    if tokenizer is None:
        return None
    try:
        if tokenizer.decode(tokens, skip_special_tokens=True) != text:
            return None
        return decode_tokens(tokenizer, tokens)
    except Exception:  # tokenizers raises plain exceptions for ids and bytes that it does not decode
        return None


def _tokenizer(target: str) -> Any:
    """The tokenizer of a model in a directory or in a cache on this machine, without a download; None if absent."""
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    name, _, revision = target.partition("@")
    files: list[Any] = [folder / "tokenizer.json" for folder in (Path(name), cache_dir() / "models" / name)]
    with suppress(ValueError):  # not a Hub id
        files.append(try_to_load_from_cache(name, "tokenizer.json", revision=revision or None))
    for file in (Path(file) for file in files if isinstance(file, str | Path)):
        with suppress(Exception):  # not readable, or not a tokenizer: the page shows ids
            if file.is_file() and not SETTINGS_BYTES.violation(file.stat().st_size):
                return Tokenizer.from_file(str(file))
    return None
