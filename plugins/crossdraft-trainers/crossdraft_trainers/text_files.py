"""Reading and writing of texts as JSONL, with validation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crossdraft import LoadedModel, UsageError
from crossdraft.commands import LINE_BYTES, RESPONSE_FILE_BYTES, parse_json, read_lines

from .contract import Text
from .writer import Chat


def rows(path: Path, maximum: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers (from 1) and JSON objects of a file; the first ``maximum``, 0: all.

    Raises:
        UsageError: the file cannot be read, or a line is too long, not UTF-8, or not a JSON object.
    """
    count = 0
    for number, line in read_lines(path, RESPONSE_FILE_BYTES, LINE_BYTES, subject="the texts"):
        if not line.strip():
            continue
        row = parse_json(line, path, line=number)
        if not isinstance(row, dict):
            raise UsageError(f"{path}, line {number}: not a JSON object")
        yield number, row
        count += 1
        if count == maximum:
            return
    if not count:
        raise UsageError(f"{path} does not contain texts; it needs one JSON object per line")


def line_of(index: int, text: Text) -> bytes:
    """Encode a text as a line for `read`."""
    return json.dumps({**vars(text), "index": index}).encode() + b"\n"


def read(path: Path, vocab_size: int, context: int | None) -> tuple[list[Text], list[int] | None]:
    """Texts as `line_of` writes them, and their indices; None where lines have none, or not in order.

    Args:
        vocab_size: upper bound of token ids.
        context: maximum tokens of a text; None: unlimited.

    Raises:
        UsageError: invalid line, with file, line and key.
    """
    texts, indices = [], []
    for number, row in rows(path):
        place = f"{path}, line {number}"
        ids_of: list[list[int]] = []
        for key in ("prompt", "response"):
            ids = row.get(key)
            if not isinstance(ids, list) or not ids or any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
                raise UsageError(
                    f"{place}: '{key}' must be a non-empty list of the target's token ids, 0 to {vocab_size - 1}; give "
                    "a file that crossdraft train wrote for this target"
                )
            ids_of.append(ids)
        source = row.get("source")
        if not isinstance(source, str):
            raise UsageError(f"{place}: 'source' must be text")
        text = Text(ids_of[0], ids_of[1], source)
        if context is not None and len(text.ids) > context:
            raise UsageError(
                f"{place}: has {len(text.ids)} tokens, but the target's context length is {context}; remove the line"
            )
        texts.append(text)
        indices.append(row.get("index"))
    numbered = all(type(index) is int for index in indices)
    if not numbered or indices != sorted(set(indices)) or indices[0] < 0:
        return texts, None
    return texts, indices


def drop_half_line(path: Path) -> None:
    """Remove an incomplete last line of a killed run; terminate a complete one that lacks its newline.

    Raises:
        OSError: the file cannot be read or written.
    """
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        start = end
        while start:  # to the newline before the last line
            step = min(start, 2**16)
            file.seek(start - step)
            newline = file.read(step).rfind(b"\n") + 1
            start -= step - newline
            if newline:
                break
            if end - start > LINE_BYTES:
                return  # reading it raises the error
        if start == end:
            return
        file.seek(start)
        try:
            complete = isinstance(json.loads(file.read(end - start)), dict)
        except (ValueError, RecursionError):
            complete = False
        if complete:
            file.write(b"\n")
        else:
            file.truncate(start)


def read_finished(path: Path, target: LoadedModel, max_prompt: int, max_response: int, maximum: int = 0) -> list[Text]:
    """Read finished texts: JSONL rows with ``prompt`` and ``response``, or ``question`` and ``answer`` (GSM8K).

    GSM8K's calculator annotations (``<<3*4=12>>``) are removed. Longer prompts are skipped, longer responses truncated.

    Args:
        maximum: maximum number of rows; 0: all.

    Raises:
        UsageError: invalid row, with file and line, or all prompts are too long.
    """
    chat, texts, shortest = Chat(target, max_prompt), [], 0
    for number, row in rows(path, maximum):
        prompt, response = row.get("prompt", row.get("question")), row.get("response", row.get("answer"))
        if not isinstance(prompt, str) or not isinstance(response, str):
            raise UsageError(f"{path}, line {number}: needs 'prompt' and 'response' (or 'question' and 'answer')")
        try:
            (prompt + response).encode()
        except UnicodeEncodeError:
            raise UsageError(f"{path}, line {number}: contains an unpaired surrogate; remove it") from None
        ids = chat.conversation(prompt)
        shortest = min(shortest or len(ids), len(ids))
        answer = [*chat.encode(re.sub(r"<<.*?>>", "", response)), *target.eos_token_ids[:1]]
        max_answer = (
            max_response if target.context_length is None else min(max_response, target.context_length - len(ids))
        )
        if len(ids) <= chat.maximum and answer:
            texts.append(Text(ids, answer[:max_answer], "finished"))
    if not texts:
        raise UsageError(
            f"all prompts of {path} exceed --max-prompt {chat.maximum}: the shortest has {shortest} tokens with the "
            "chat template; increase --max-prompt"
        )
    return texts
