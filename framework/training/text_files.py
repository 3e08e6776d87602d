"""Texts on disk: JSON objects, one a line. What is read is checked, whoever wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..contracts.models import LoadedModel
from ..contracts.training import Text
from ..errors import UsageError
from .writer import Chat

#: Longest line of a file of texts, in bytes.
MOST_LINE = 2**23


def rows(path: Path, most: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file and the numbers of their lines, counted from 1; the first ``most``, 0: all.

    Raises:
        UsageError: the file cannot be read, or a line is too long, not UTF-8, or no JSON object; says which.
    """
    found = 0
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MOST_LINE + 1):
                number += 1
                if len(line) > MOST_LINE:
                    raise UsageError(f"{path}, line {number}: is longer than {MOST_LINE:,} bytes; a text is one line")
                if not line.strip():
                    continue
                yield number, _row(path, number, line)
                found += 1
                if found == most:
                    return
    except OSError as error:
        raise UsageError(f"cannot read texts {path}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"cannot read texts {path}: {error}") from None
    if not found:
        raise UsageError(f"{path} holds no texts; it needs one JSON object a line")


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}, line {number}: is not UTF-8 text (byte {error.start + 1} of the line)") from None
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise UsageError(f"{path}, line {number}: not a JSON object")
    return row


def line_of(index: int, text: Text) -> bytes:
    """A line of a file that `read` reads."""
    return json.dumps({**vars(text), "index": index}).encode() + b"\n"


def read(path: Path, vocab_size: int, context: int | None) -> tuple[list[Text], list[int] | None]:
    """Texts as `line_of` writes them, and their indices; None where lines have none, or not in order.

    Args:
        vocab_size: token ids are below it.
        context: most tokens of a text; None: any number.

    Raises:
        UsageError: a line that is no such text; names file, line and key.
    """
    texts, indices = [], []
    for number, row in rows(path):
        where = f"{path}, line {number}"
        parts: list[list[int]] = []
        for key in ("prompt", "response"):
            ids = row.get(key)
            if not isinstance(ids, list) or not ids or any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
                raise UsageError(
                    f"{where}: '{key}' must be a list of the target's token ids, 0 to {vocab_size - 1}, with at least "
                    "one; is it a file that crossdraft train wrote for this target?"
                )
            parts.append(ids)
        source = row.get("source")
        if not isinstance(source, str):
            raise UsageError(f"{where}: 'source' must be text")
        text = Text(parts[0], parts[1], source)
        if context is not None and len(text.ids) > context:
            raise UsageError(f"{where}: has {len(text.ids)} tokens, but the target's context is {context} tokens")
        texts.append(text)
        indices.append(row.get("index"))
    numbered = all(type(index) is int for index in indices)
    if not numbered or indices != sorted(set(indices)) or indices[0] < 0:
        return texts, None
    return texts, indices


def drop_half_line(path: Path) -> None:
    """Cut what a run that was killed, or a full disk, left of a line; end a whole one that only lacks its end.

    Raises:
        OSError: the file cannot be read or written.
    """
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        start = end
        while start:  # to the newline before the last line
            step = min(start, 2**16)
            file.seek(start - step)
            at = file.read(step).rfind(b"\n") + 1
            start -= step - at
            if at:
                break
            if end - start > MOST_LINE:
                return  # reading it says what is wrong
        if start == end:
            return
        file.seek(start)
        try:
            whole = isinstance(json.loads(file.read(end - start)), dict)
        except (ValueError, RecursionError):
            whole = False
        if whole:
            file.write(b"\n")
        else:
            file.truncate(start)


def read_finished(path: Path, target: LoadedModel, max_prompt: int, max_response: int, most: int = 0) -> list[Text]:
    """Finished texts by others: JSONL rows with ``prompt`` and ``response``, or ``question`` and ``answer`` (GSM8K).

    GSM8K's calculator notes (``<<3*4=12>>``) are taken out. Longer prompts are left out, longer responses cut.

    Args:
        most: how many rows to read; 0: all.

    Raises:
        UsageError: a row that is no text, or none that fits; names file and line.
    """
    chat, texts, shortest = Chat(target, max_prompt), [], 0
    for number, row in rows(path, most):
        prompt, response = row.get("prompt", row.get("question")), row.get("response", row.get("answer"))
        if not isinstance(prompt, str) or not isinstance(response, str):
            raise UsageError(f"{path}, line {number}: needs 'prompt' and 'response' (or 'question' and 'answer')")
        try:
            (prompt + response).encode()
        except UnicodeEncodeError:
            raise UsageError(f"{path}, line {number}: holds half a surrogate pair, which is no character") from None
        ids = chat.conversation(prompt)
        shortest = min(shortest or len(ids), len(ids))
        answer = [*chat.encode(re.sub(r"<<.*?>>", "", response)), *target.eos_token_ids[:1]]
        room = max_response if target.context_length is None else min(max_response, target.context_length - len(ids))
        if len(ids) <= chat.most and answer:
            texts.append(Text(ids, answer[:room], "finished"))
    if not texts:
        raise UsageError(
            f"no text of {path} fits into --max-prompt {chat.most} tokens: the shortest prompt takes {shortest} with "
            "the chat template"
        )
    return texts
