"""The texts of a corpus: a text file, JSON Lines, or a data set of the library ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from crossdraft import UsageError

#: Approximate size of a document of a text file in characters; cut at line ends.
_PIECE = 2**16


def texts(corpus: str, column: str = "text", split: str = "train") -> Iterator[tuple[str, str]]:
    """Yield the location of each text, for messages, and the text.

    Args:
        corpus: a text file, a JSON Lines file (``.jsonl``, ``.json``), or a directory or ``hf:org/name`` for the
            library ``datasets``.
        column: column of a row with a text, a list of texts, or a list of messages with ``content``.
        split: split of a data set.

    Raises:
        UsageError: the corpus does not exist, or a row has no text; the message has file and line.
    """
    for place, row in rows(corpus, split):
        if isinstance(row, str):
            yield place, row
            continue
        value = row.get(column)
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            text = part.get("content") if isinstance(part, dict) else part
            if not isinstance(text, str):
                columns = ", ".join(map(str, list(row)[:8])) or "nothing"
                raise UsageError(f"{place}: no text in column {column!r}; it has {columns}: name another with --column")
            yield place, text


def ids(corpus: str, split: str = "train") -> Iterator[Sequence[int]]:
    """Yield the lists ``tokens`` of the rows of a corpus. Raises UsageError with file and line."""
    for place, row in rows(corpus, split):
        tokens = row.get("tokens") if isinstance(row, dict) else None
        if not isinstance(tokens, list) or any(type(token) is not int or token < 0 for token in tokens):
            raise UsageError(f"{place}: 'tokens' must be a list of token ids")
        yield tokens


def rows(corpus: str, split: str) -> Iterator[tuple[str, Any]]:
    """Yield the location of each row, and the row: a mapping, or a text of a text file."""
    path = Path(corpus).expanduser()
    if not corpus.startswith("hf:") and path.is_file():
        yield from _json_lines(path) if path.suffix in (".jsonl", ".json", ".ndjson") else _pieces(path)
        return
    if not corpus.startswith("hf:") and not path.is_dir():
        raise UsageError(f"the corpus {corpus} does not exist; give a file, a directory, or hf:org/name")
    from datasets import load_dataset

    try:
        for i, row in enumerate(load_dataset(corpus.removeprefix("hf:"), split=split, streaming=True)):
            yield f"{corpus}, row {i}", row
    except UsageError:
        raise
    except Exception as error:  # the library raises various errors for missing or incomplete data sets
        reason = str(error).partition("\n")[0]
        raise UsageError(f"cannot read the corpus {corpus}: {type(error).__name__}: {reason}") from None


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UsageError(f"{path}:{number}: not a JSON object")
        yield f"{path}:{number}", row


def _pieces(path: Path) -> Iterator[tuple[str, str]]:
    piece, size, first = [], 0, 1
    for number, line in enumerate(_lines(path), 1):
        piece.append(line)
        size += len(line)
        if size >= _PIECE:
            yield f"{path}:{first}", "".join(piece)
            piece, size, first = [], 0, number + 1
    if piece:
        yield f"{path}:{first}", "".join(piece)


def _lines(path: Path) -> Iterator[str]:
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                yield line
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {path}: it is not UTF-8 text (after line {number})") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
