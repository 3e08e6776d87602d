"""Prompts by name: a registered set, a file (JSONL, a JSON list, Parquet), a data set of the Hub or in a directory.

A row is recognised by its keys:

- ``turns`` (Spec-Bench, SPEED-Bench: ``question_id``, ``category``, ``turns``, ``reference``),
- ``question`` (GSM8K: ``question``, ``answer``),
- ``prompt`` (HumanEval: ``task_id``, ``prompt``, ``canonical_solution``),
- ``conversations`` (ShareGPT) or ``messages`` (chat APIs): see `conversations`.

A plug-in registers a prompt source with ``crossdraft_register_prompts``: the `Path` of a JSONL file, or a
function without arguments that gives one, or that gives the rows themselves (dicts as above).

This module is imported by ``crossdraft list``: it stays light, and knows nothing of models but a tokenizer's
methods.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from .. import plugins
from ..contracts.hookspecs import Register, hookimpl
from ..errors import UnknownNameError, UsageError, first_line, printable, quoted
from ..util.input_files import (
    BROKEN,
    UNPRINTABLE,
    flaw,
    kind_of,
    open_file,
    parse_json,
    path_of,
    read_lines,
    read_text,
    refuse_special_files,
)
from ..util.limits import LINE_BYTES, MOST_NAME, MOST_PROMPTS, PROMPT_FILE_BYTES, TABLE_BYTES
from .conversations import FORMS, turns_of

logger = logging.getLogger(__name__)

#: Most turns of one conversation: prompt i, turn k draws from the random stream ``MOST_TURNS * i + k``.
MOST_TURNS = 16
#: What makes a row a prompt; the first one it has counts.
_TEXT_KEYS = ("turns", "question", "prompt", *FORMS)
#: Of rows that name none, by that key.
_CATEGORIES = {"question": "question", "prompt": "completion", **dict.fromkeys(FORMS, "conversation")}
#: What SPEED-Bench says instead of a text that its authors may not hand on.
_WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@hookimpl
def crossdraft_register_prompts(register: Register) -> None:
    register(
        "builtin",
        f"{__name__}:builtin",
        summary="48 prompts of six categories: chat, translation, summaries, questions, mathematics, RAG",
    )


def builtin() -> Path:
    """The file of the built-in prompts, interleaved by category: the first N are a stratified sample."""
    return Path(__file__).parents[2] / "recipes" / "builtin.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered.

    Attributes:
        question_id: what records and errors call it.
        category: what results are grouped by.
        turns: what the user says; turn k is asked after the answer to turn k - 1.
        reference: known answers, one a turn, where the source has them.
        index: its position in its source, whatever was selected from it; numbers its random streams.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] | None = None
    index: int = 0

    def stream(self, turn: int) -> int:
        """The random stream of a turn: the same at every batch size and under every limit."""
        return MOST_TURNS * self.index + turn


def load_prompts(
    source: str,
    *,
    categories: Sequence[str] = (),
    limit: int | None = None,
    split: str | None = None,
    column: str | None = None,
) -> list[Prompt]:
    """The prompts of `source`, in its order.

    Args:
        source: a registered name, a JSONL file, a directory that the library ``datasets`` can read, or
            ``hf:org/name[:config]?split=test&column=question`` for a data set of the Hub.
        categories: keep only these.
        limit: keep the first so many.
        split: of a data set that has several.
        column: of a data set, the text to ask; otherwise rows are recognised by their keys.

    Raises:
        UsageError: no such source, or a row that is no prompt; says which and where.
        ContractError: a registered source that gives no rows.
    """
    chosen = _select(_numbered(rows(source, split, column)), source, categories, limit)
    if not chosen:
        raise UsageError(f"{source} has no prompts")
    return chosen


def check_source(source: str, split: str | None = None) -> None:
    """Raise UsageError if there is no such source; reads no prompts and asks no network."""
    _kind(source)


# -- where rows come from ------------------------------------------------------------------------------------

Located = tuple[str, Any]  # where a row stands, for people; the row


def _kind(source: str) -> str:
    """``registered``, ``hub``, ``file`` or ``directory``."""
    if source in plugins.entries("prompts"):
        return "registered"
    if source.startswith("hf:"):
        return "hub"
    kind = kind_of(source)
    if kind:
        return "directory" if kind == "directory" else "file"
    if path_of(source).suffix or "/" in source or "\\" in source:
        raise UsageError(
            f"there is no prompt file {printable(source)}; check the path (it is relative to {Path.cwd()})"
        )
    hint = "Or give a JSONL file, a directory, or hf:org/name."
    raise UnknownNameError.among("prompt source", source, plugins.entries("prompts"), hint)


def rows(source: str, split: str | None = None, column: str | None = None) -> Iterator[Located]:
    """The rows of a source as they are, see `load_prompts`; with a ``column``, each as ``{"turns": [text]}``."""
    kind = _kind(source)
    if kind in ("hub", "directory"):
        yield from _dataset_rows(source, kind == "hub", split, column)
        return
    if split or column:
        raise UsageError(f"{source} is no data set: it has no split and no column to choose")
    if kind == "file":
        yield from _file_rows(path_of(source))
        return
    found: Any = plugins.get("prompts", source)
    with plugins.guarded("prompts", source):
        found = found() if callable(found) else found
        found = found if isinstance(found, Path) else iter(found)
    yield from _file_rows(found) if isinstance(found, Path) else _registered_rows(source, found)


def _registered_rows(source: str, rows: Iterator[Any]) -> Iterator[Located]:
    end, i = object(), 0
    while True:
        i += 1
        with plugins.guarded("prompts", source, f"its row {i}"):
            row = next(rows, end)
        if row is end:
            return
        yield f"{source}, row {i}", row


def _file_rows(path: Path) -> Iterator[Located]:
    """Rows of a file: Parquet by its name, a JSON list where ``.json`` begins with ``[``, else JSON lines."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".json" and _begins_list(path):
        file, rows = printable(str(path)), parse_json(read_text(path, PROMPT_FILE_BYTES), path)
        if not rows:
            raise UsageError(f"{file} is an empty list; it needs a JSON object for each prompt")
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, 1))
    else:
        yield from _jsonl_rows(path)


def _begins_list(path: Path) -> bool:
    try:
        with open_file(path, PROMPT_FILE_BYTES) as opened:
            return opened.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except (OSError, UsageError):
        return False  # whoever reads it will say why


def _parquet_rows(path: Path) -> Iterator[Located]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with open_file(path, TABLE_BYTES) as file, parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{printable(str(path))}, row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {printable(str(path))}: {first_line(error)}") from None


def _jsonl_rows(path: Path) -> Iterator[Located]:
    file, empty = printable(str(path)), True
    for number, line in read_lines(path, PROMPT_FILE_BYTES, LINE_BYTES):
        if line.strip():
            empty = False
            yield f"{file}:{number}", parse_json(line, path, line=number)
    if empty:
        raise UsageError(f"{file} is empty; it needs one JSON object a line")


def _dataset_rows(source: str, hub: bool, split: str | None, column: str | None) -> Iterator[Located]:
    import datasets

    address, _, query = source.partition("?") if hub else (source, "", "")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := set(options) - {"split", "column"}:
        raise UsageError(f"{source}: unknown option {min(unknown)!r}; it may have split and column")
    split, column = split or options.get("split"), column or options.get("column")
    path, _, config = address.removeprefix("hf:").partition(":") if hub else (address, "", "")
    if not hub:
        refuse_special_files(path_of(path), below=True)
    try:
        if not hub and any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json")):
            data: Any = datasets.load_from_disk(path)
        else:  # a local directory is streamed: nothing to gain from a copy in the cache
            data = datasets.load_dataset(path, config or None, streaming=not hub)
    except Exception as error:  # the library raises its own, the Hub's and the readers' errors
        raise UsageError(f"the data set {source} cannot be read: {first_line(error)}") from error
    if isinstance(data, Mapping):
        names = [str(name) for name in data]
        split = split or (names[0] if len(names) == 1 else None)
        if split not in names:
            given = f"no split {split!r}" if split else "several splits"
            raise UsageError(f"the data set {source} has {given}; its splits: {', '.join(names)}")
        data = data[split]
    rows, i = iter(data), 0
    while True:
        i += 1
        where = f"{source}, row {i}"
        try:
            row = next(rows, None)
        except Exception as error:  # as above: a streamed data set is read row by row
            raise UsageError(f"{where}: the data set cannot be read: {first_line(error)}") from error
        if row is None:
            return
        if column is not None:
            if column not in row:
                raise UsageError(f"{where}: no column {column!r}; its columns: {_listed(row)}")
            text, category = row[column], row.get("category")
            # Classes of the Hub's data sets are numbers.
            category = str(category) if isinstance(category, int) else category
            row = {"turns": text if isinstance(text, list) else [text], "category": category}
        yield where, row


# -- from rows to prompts ------------------------------------------------------------------------------------


def _numbered(rows: Iterable[Located]) -> Iterator[tuple[str, Prompt]]:
    seen: dict[str, str] = {}
    silent = cut = 0  # recorded conversations in which nobody asks anything, or that go on for longer than can be asked
    try:
        for index, (where, row) in enumerate(rows):
            if reason := MOST_PROMPTS.refusal(index + 1):
                raise UsageError(f"{where}: there are more prompts than can be answered; {reason}; give a limit")
            prompt = _prompt(where, row, index)
            if prompt is None:
                silent += 1
                continue
            name = str(prompt.question_id)  # what records know it by
            if name in seen:
                raise UsageError(f"{where}: question_id {prompt.question_id!r} was already used in {seen[name]}")
            seen[name] = where
            if len(prompt.turns) > MOST_TURNS:
                cut += 1
                reference = prompt.reference and prompt.reference[:MOST_TURNS]
                prompt = replace(prompt, turns=prompt.turns[:MOST_TURNS], reference=reference)
            yield where, prompt
    finally:
        if silent:
            logger.warning("crossdraft: left out %d conversations in which nobody asks anything", silent)
        if cut:
            logger.warning("crossdraft: cut %d conversations after %d turns", cut, MOST_TURNS)


def _prompt(where: str, row: Any, index: int) -> Prompt | None:
    """The prompt of a row; None for a conversation without a question, which recorded ones may be."""
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: a prompt is a JSON object, not {type(row).__name__}")
    key = next((key for key in _TEXT_KEYS if row.get(key) is not None), None)
    if key is None:
        raise UsageError(f"{where}: a prompt needs one of the keys {', '.join(_TEXT_KEYS)}; it has: {_listed(row)}")
    reference = None
    if key in FORMS:
        turns, answers = turns_of(where, key, row[key])
        if not turns:
            return None
        reference = tuple(answers) if answers else None
    else:
        turns = row[key] if key == "turns" else [row[key]]
    if not (isinstance(turns, list) and turns and all(isinstance(t, str) and t.strip() for t in turns)):
        what = "must be a list of texts" if key == "turns" else "must be a text"
        raise UsageError(f"{where}: {key!r} {what}, and none of them empty")
    if len(turns) > MOST_TURNS and key not in FORMS:
        raise UsageError(f"{where}: {len(turns)} turns; a conversation may have at most {MOST_TURNS}")
    for turn, text in enumerate(turns, 1):
        if reason := flaw(text, BROKEN):
            raise UsageError(f"{where}: turn {turn} holds {reason}, which no tokenizer reads")
        if _WITHHELD in text:
            raise UsageError(
                f"{where}: SPEED-Bench does not hold this text, only where it comes from; its authors' prepare.py "
                "fetches it and writes a file to give here"
            )
    category = row.get("category")
    if category is None or category == "":
        category = _CATEGORIES.get(key, "all")
    return Prompt(
        question_id=_question_id(where, row, index),
        category=_name(where, "category", category),
        turns=tuple(turns),
        reference=reference or _reference(where, row),
        index=index,
    )


def _question_id(where: str, row: Mapping[str, Any], index: int) -> int | str:
    key = "question_id" if row.get("question_id") is not None else "task_id"
    found = row.get(key)
    if found is None:
        return index + 1
    return found if isinstance(found, int) and not isinstance(found, bool) else _name(where, key, found, "or a number")


def _name(where: str, key: str, value: Any, other: str = "") -> str:
    """A short text that tables and records show."""
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key!r} must be a text{other and ' '}{other}, not {quoted(value)}")
    if reason := flaw(value, UNPRINTABLE):
        raise UsageError(f"{where}: {key!r} holds {reason}, which cannot be printed: {quoted(value)}")
    if reason := MOST_NAME.refusal(value):
        raise UsageError(f"{where}: {key!r} has {len(value)} characters; {reason}")
    return value


def _reference(where: str, row: Mapping[str, Any]) -> tuple[str, ...] | None:
    key = next((k for k in ("reference", "answer", "canonical_solution") if row.get(k) is not None), None)
    if key is None:
        return None
    found = [row[key]] if isinstance(row[key], str) else row[key]
    if not (isinstance(found, list) and all(isinstance(text, str) for text in found)):
        raise UsageError(f"{where}: {key!r} must be a text or a list of texts, not {quoted(row[key])}")
    if reason := next((reason for text in found if (reason := flaw(text, BROKEN))), None):
        raise UsageError(f"{where}: {key!r} holds {reason}, which no file keeps")
    return tuple(found)


def _listed(row: Mapping[Any, Any]) -> str:
    """The keys of a row, a few of them."""
    shown = ", ".join(printable(str(key)) for key in islice(row, 12))
    return shown if len(shown) <= 200 else f"{shown[:199]}…"


def _select(
    rows: Iterable[tuple[str, Prompt]], source: str, categories: Sequence[str], limit: int | None
) -> list[Prompt]:
    prompts = (prompt for _, prompt in rows)
    if not categories:
        return list(islice(prompts, limit))
    every = list(prompts)
    known = sorted({prompt.category for prompt in every})
    for category in categories:
        if category not in known:
            nearest = difflib.get_close_matches(category, known, n=1, cutoff=0.5)
            guess = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise UsageError(f"{source} has no category {category!r}; {guess}It has: {', '.join(known)}.")
    return [prompt for prompt in every if prompt.category in categories][:limit]
