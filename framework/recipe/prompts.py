"""Prompt sources: registered sets, files (JSONL, JSON list, Parquet), datasets of the Hub or in a directory.

The format of a row is detected by its keys:

- ``turns`` (Spec-Bench, SPEED-Bench: ``question_id``, ``category``, ``turns``, ``reference``),
- ``question`` (GSM8K: ``question``, ``answer``),
- ``prompt`` (HumanEval: ``task_id``, ``prompt``, ``canonical_solution``),
- ``conversations`` (ShareGPT) or ``messages`` (chat APIs): see `conversations`.

Any row may have a ``constraint``, the language of its responses.

A plug-in registers a prompt source with ``crossdraft_register_prompts``: the `Path` of a JSONL file, or a function
without arguments that returns such a path or the rows (dicts as above).

This module is imported by ``crossdraft list`` and must stay cheap to import.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from .. import plugins
from ..contracts.hookspecs import Register, hookimpl
from ..errors import UnknownNameError, UsageError, first_line, printable, quoted
from ..util.input_files import (
    BROKEN,
    UNPRINTABLE,
    describe_forbidden_char,
    kind_of,
    open_file,
    parse_json,
    path_of,
    read_lines,
    read_text,
    refuse_special_files,
)
from ..util.limits import LINE_BYTES, MOST_NAME, MOST_PROMPTS, PROMPT_FILE_BYTES, TABLE_BYTES
from .builtin_recipes import FOLDER
from .conversations import FORMS, turns_of

if TYPE_CHECKING:
    from ..contracts.constraint import Constraint

logger = logging.getLogger(__name__)

#: Maximum turns of a conversation. Turn k of prompt i uses the random stream ``MOST_TURNS * i + k``.
MOST_TURNS = 16
#: Keys that contain the prompt, in order of precedence.
_TEXT_KEYS = ("turns", "question", "prompt", *FORMS)
#: Default categories of rows, by that key.
_CATEGORIES = {"question": "question", "prompt": "completion", **dict.fromkeys(FORMS, "conversation")}
#: Placeholder in SPEED-Bench for texts that its authors may not redistribute.
_WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@hookimpl
def crossdraft_register_prompts(register: Register) -> None:
    register(
        "builtin",
        builtin,
        summary="96 prompts of six categories: chat, translation, summaries, questions, mathematics, RAG",
    )
    summary = "24 notices whose event is to be written as JSON, for constrained decoding"
    register("builtin-json", partial(builtin, "json.jsonl"), summary=summary)
    register("builtin-code", partial(builtin, "code.jsonl"), summary="24 prompts: write code, or change a file")


def builtin(name: str = "builtin.jsonl") -> Path:
    """Return a file of built-in prompts, interleaved by category: the first N are a stratified sample."""
    return FOLDER / name


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered.

    Attributes:
        question_id: name in records and errors.
        category: category by which results are grouped.
        turns: user messages; turn k follows the response to turn k - 1.
        reference: reference answers, one per turn; None if the source has none.
        index: position in the source before any selection; determines the random streams.
        constraint: language of its responses; None = that of the recipe, if it has one.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] | None = None
    index: int = 0
    constraint: Constraint | None = None

    def stream(self, turn: int) -> int:
        """Random stream of a turn, independent of batch size and limit."""
        return MOST_TURNS * self.index + turn


def load_prompts(
    source: str,
    *,
    categories: Sequence[str] = (),
    limit: int | None = None,
    split: str | None = None,
    column: str | None = None,
) -> list[Prompt]:
    """Load prompts in the order of their source.

    Args:
        source: a registered name, a file, a directory readable by the library ``datasets``, or
            ``hf:org/name[:config]?split=test&column=question`` for a dataset of the Hub.
        categories: keep only these categories.
        limit: keep only the first ``limit`` prompts.
        split: split of a dataset with several splits.
        column: column of a dataset with the prompt; by default the format of rows is detected by their keys.

    Raises:
        UsageError: the source does not exist, or a row is not a valid prompt; with its place.
        ContractError: a registered source does not return rows.
    """
    prompts: Iterable[Prompt] = _numbered(rows(source, split, column))
    if categories:
        prompts = list(prompts)
        names = sorted({prompt.category for prompt in prompts})
        for category in categories:
            if category not in names:
                nearest = difflib.get_close_matches(category, names, n=1, cutoff=0.5)
                guess = f"did you mean {nearest[0]!r}? " if nearest else ""
                raise UsageError(f"{source} has no category {category!r}; {guess}It has: {', '.join(names)}.")
        prompts = [prompt for prompt in prompts if prompt.category in categories]
    chosen = list(islice(prompts, limit))
    if not chosen:
        raise UsageError(f"{source} has no prompts; give a source with at least one")
    return chosen


def refuse_constraints(prompts: Iterable[Prompt], command: str) -> None:
    """Raise UsageError if a prompt has a constraint, which ``command`` does not apply."""
    for prompt in prompts:
        if prompt.constraint is not None:
            raise UsageError(
                f"prompt {prompt.question_id!r} has a constraint, which {command} does not apply; remove the key "
                "constraint, or run a recipe on crossdraft's own engine"
            )


# -- rows of sources -----------------------------------------------------------------------------------------

Located = tuple[str, Any]  # place of a row, for messages; the row


def source_kind(source: str) -> str:
    """Kind of a source: ``registered``, ``hub``, ``file`` or ``directory``.

    Reads no prompts and does not access the network. Raises UsageError if the source does not exist.
    """
    if source in plugins.entries("prompts"):
        return "registered"
    if source.startswith("hf:"):
        return "hub"
    kind = kind_of(source)
    if kind:
        return "directory" if kind == "directory" else "file"
    if path_of(source).suffix or "/" in source or "\\" in source:
        raise UsageError(
            f"prompt file {printable(source)} does not exist; check the path (it is relative to {Path.cwd()})"
        )
    hint = "Or give a JSONL file, a directory, or hf:org/name."
    raise UnknownNameError.among("prompt source", source, plugins.entries("prompts"), hint)


def rows(source: str, split: str | None = None, column: str | None = None) -> Iterator[Located]:
    """Yield the rows of a source, see `load_prompts`; with ``column`` as ``{"turns": [text]}``."""
    kind = source_kind(source)
    if kind in ("hub", "directory"):
        yield from _dataset_rows(source, kind == "hub", split, column)
        return
    if split or column:
        raise UsageError(f"{source} is not a dataset; remove split and column")
    if kind == "file":
        yield from _file_rows(path_of(source))
        return
    registered: Any = plugins.get("prompts", source)
    with plugins.guarded("prompts", source):
        registered = registered() if callable(registered) else registered
        registered = registered if isinstance(registered, Path) else iter(registered)
    yield from _file_rows(registered) if isinstance(registered, Path) else _registered_rows(source, registered)


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
    """Yield the rows of a file: Parquet by its suffix, a JSON list if ``.json`` begins with ``[``, else JSON lines."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".json" and _begins_list(path):
        file, rows = printable(str(path)), parse_json(read_text(path, PROMPT_FILE_BYTES), path)
        if not rows:
            raise UsageError(f"{file} is an empty list; it needs one JSON object per prompt")
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, 1))
    else:
        file, empty = printable(str(path)), True
        for number, line in read_lines(path, PROMPT_FILE_BYTES, LINE_BYTES):
            if line.strip():
                empty = False
                yield f"{file}:{number}", parse_json(line, path, line=number)
        if empty:
            raise UsageError(f"{file} is empty; it needs one JSON object per line")


def _begins_list(path: Path) -> bool:
    try:
        with open_file(path, PROMPT_FILE_BYTES) as opened:
            return opened.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except (OSError, UsageError):
        return False  # raised again when the file is read


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


def _dataset_rows(source: str, hub: bool, split: str | None, column: str | None) -> Iterator[Located]:
    import datasets

    address, _, query = source.partition("?") if hub else (source, "", "")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := set(options) - {"split", "column"}:
        raise UsageError(f"{source}: unknown option {min(unknown)!r}; only split and column are supported")
    split, column = split or options.get("split"), column or options.get("column")
    path, _, config = address.removeprefix("hf:").partition(":") if hub else (address, "", "")
    if not hub:
        refuse_special_files(path_of(path), below=True)
    try:
        if not hub and any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json")):
            data: Any = datasets.load_from_disk(path)
        else:  # a local directory is streamed, to avoid a copy in the cache
            data = datasets.load_dataset(path, config or None, streaming=not hub)
    except Exception as error:  # errors of the library, the Hub and the file readers
        raise UsageError(f"the dataset {source} is not readable: {first_line(error)}") from error
    if isinstance(data, Mapping):
        names = [str(name) for name in data]
        split = split or (names[0] if len(names) == 1 else None)
        if split not in names:
            problem = f"no split {split!r}" if split else "several splits"
            raise UsageError(f"the dataset {source} has {problem}; choose one of: {', '.join(names)}")
        data = data[split]
    rows, i = iter(data), 0
    while True:
        i += 1
        place = f"{source}, row {i}"
        try:
            row = next(rows, None)
        except Exception as error:  # as above: a streamed data set is read row by row
            raise UsageError(f"{place}: the dataset is not readable: {first_line(error)}") from error
        if row is None:
            return
        if column is not None:
            if column not in row:
                raise UsageError(f"{place}: no column {column!r}; its columns: {_listed(row)}")
            text, category = row[column], row.get("category")
            # Class labels of Hub datasets are numbers.
            category = str(category) if isinstance(category, int) else category
            row = {"turns": text if isinstance(text, list) else [text], "category": category}
        yield place, row


# -- from rows to prompts ------------------------------------------------------------------------------------


def _numbered(rows: Iterable[Located]) -> Iterator[Prompt]:
    places: dict[str, str] = {}
    without_question = truncated = 0  # numbers of recorded conversations
    try:
        for index, (place, row) in enumerate(rows):
            if reason := MOST_PROMPTS.violation(index + 1):
                raise UsageError(f"{place}: too many prompts; {reason}; set a limit")
            prompt = _prompt(place, row, index)
            if prompt is None:
                without_question += 1
                continue
            name = str(prompt.question_id)  # name in records
            if name in places:
                raise UsageError(f"{place}: question_id {prompt.question_id!r} was already used in {places[name]}")
            places[name] = place
            if len(prompt.turns) > MOST_TURNS:
                truncated += 1
                reference = prompt.reference and prompt.reference[:MOST_TURNS]
                prompt = replace(prompt, turns=prompt.turns[:MOST_TURNS], reference=reference)
            yield prompt
    finally:
        if without_question:
            logger.warning("crossdraft: skipped %d conversations without a user message", without_question)
        if truncated:
            logger.warning("crossdraft: truncated %d conversations to %d turns", truncated, MOST_TURNS)


def _prompt(place: str, row: Any, index: int) -> Prompt | None:
    """Parse the prompt of a row; None for a recorded conversation without a user message."""
    if not isinstance(row, Mapping):
        raise UsageError(f"{place}: a prompt must be a JSON object, not {type(row).__name__}")
    key = next((key for key in _TEXT_KEYS if row.get(key) is not None), None)
    if key is None:
        raise UsageError(f"{place}: a prompt needs one of the keys {', '.join(_TEXT_KEYS)}; it has: {_listed(row)}")
    reference = None
    if key in FORMS:
        turns, answers = turns_of(place, key, row[key])
        if not turns:
            return None
        reference = tuple(answers) if answers else None
    else:
        turns = row[key] if key == "turns" else [row[key]]
    if not (isinstance(turns, list) and turns and all(isinstance(t, str) and t.strip() for t in turns)):
        requirement = "must be a list of texts" if key == "turns" else "must be a text"
        raise UsageError(f"{place}: {key!r} {requirement} and must not be empty")
    if len(turns) > MOST_TURNS and key not in FORMS:
        raise UsageError(f"{place}: {len(turns)} turns; the maximum is {MOST_TURNS}")
    for turn, text in enumerate(turns, 1):
        if reason := describe_forbidden_char(text, BROKEN):
            raise UsageError(f"{place}: turn {turn} contains {reason}, which tokenizers cannot encode")
        if _WITHHELD in text:
            raise UsageError(
                f"{place}: SPEED-Bench contains only the source of this text; run its prepare.py, which "
                "fetches the text, and use the file that it writes"
            )
    category = row.get("category")
    if category is None or category == "":
        category = _CATEGORIES.get(key, "all")
    if (constraint := row.get("constraint")) is not None:
        from ..contracts.constraint import checked_constraint  # it imports pydantic

        constraint = checked_constraint(constraint, f"{place}: constraint")
    return Prompt(
        question_id=_question_id(place, row, index),
        category=_name(place, "category", category),
        turns=tuple(turns),
        reference=reference or _reference(place, row),
        index=index,
        constraint=constraint,
    )


def _question_id(place: str, row: Mapping[str, Any], index: int) -> int | str:
    key = "question_id" if row.get("question_id") is not None else "task_id"
    value = row.get(key)
    if value is None:
        return index + 1
    return value if isinstance(value, int) and not isinstance(value, bool) else _name(place, key, value, "or a number")


def _name(place: str, key: str, value: Any, alternative: str = "") -> str:
    """Validate a short printable text."""
    if not isinstance(value, str):
        raise UsageError(f"{place}: {key!r} must be a text{alternative and ' '}{alternative}, not {quoted(value)}")
    if reason := describe_forbidden_char(value, UNPRINTABLE):
        raise UsageError(f"{place}: {key!r} contains {reason}, which is not printable: {quoted(value)}")
    if reason := MOST_NAME.violation(value):
        raise UsageError(f"{place}: {key!r} has {len(value)} characters; {reason}")
    return value


def _reference(place: str, row: Mapping[str, Any]) -> tuple[str, ...] | None:
    key = next((k for k in ("reference", "answer", "canonical_solution") if row.get(k) is not None), None)
    if key is None:
        return None
    texts = [row[key]] if isinstance(row[key], str) else row[key]
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise UsageError(f"{place}: {key!r} must be a text or a list of texts, not {quoted(row[key])}")
    if reason := next((reason for text in texts if (reason := describe_forbidden_char(text, BROKEN))), None):
        raise UsageError(f"{place}: {key!r} contains {reason}, which cannot be written to a file")
    return tuple(texts)


def _listed(row: Mapping[Any, Any]) -> str:
    """List the first keys of a row."""
    keys = ", ".join(printable(str(key)) for key in islice(row, 12))
    return keys if len(keys) <= 200 else f"{keys[:199]}…"
