"""Sources of recorded responses, read lazily, one line at a time.

- the directory of a finished run, or of one of its cells: the responses of plain decoding, or of that cell;
- a file of responses, JSONL or one JSON value, in the plain format or OpenAI's (`jsonl_formats`), or in one that is
  converted to it (`response_formats`). An object that cannot be read is skipped and counted;
- a dataset of the ``datasets`` library, or a file of rows with a text: each text is split into prompt and response.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from crossdraft import Prompt, Sampling, UsageError, printable, quoted
from crossdraft.commands import (
    LINE_BYTES,
    RESPONSE_FILE_BYTES,
    kind_of,
    open_file,
    parse_json,
    path_of,
    read_lines,
    read_text,
)
from crossdraft.framework import plugins
from crossdraft.framework.recipe.prompts import rows
from crossdraft.framework.runs.run_directory import read_cell_config
from crossdraft.models import encode, encode_text
from crossdraft.runs import RunDirectory

from ..engines.engine_log import packed_as
from ..report import sampling_text
from .jsonl_formats import response_of
from .response import OptionsError, ParseContext, Response, log_probabilities, token_ids
from .response_formats import plain_rows

_VALUE = re.compile(r"\S")
#: What to do about a file that is not JSON.
_JSON = (
    "responses are JSON, one in a line (docs/replay.md); for the log or the counters of an engine there are crossdraft "
    "advise and crossdraft diagnose --counters"
)
TEXTS = "texts of a dataset, assumed to be samples of the target"  # assumption made for dataset texts


@dataclass
class Reader(ParseContext):
    """Reader of recorded responses; see `ParseContext`."""

    # prompt_tokens, tokens: length of the prompt, and maximum length of the response, of a dataset text
    prompt_tokens: int = 64
    tokens: int = 128
    # split, column: of a dataset
    split: str | None = None
    column: str | None = None
    limit: int | None = None  # maximum number of responses; None = all

    def read(self, sources: Sequence[str]) -> Iterator[Response]:
        """Yield the responses of all sources. Raises UsageError with file and line."""
        count = 0
        for source in sources:
            for response in self._source(source):
                if not len(response.tokens):
                    self.assumed["skipped: without tokens"] += 1
                    continue
                if not len(response.prompt):
                    self.skip("that cannot be read", f"{response.place}: the prompt is empty; it needs a token")
                    continue
                if self.limit is not None and count >= self.limit:
                    return
                count += 1
                yield response
        if not count and self.skipped:
            reason = f"{next(iter(self.skipped.values()))}; no other response can be replayed"
            raise UsageError(f"{reason}; {_JSON}" if "not JSON" in reason else reason)
        if not count and self.requests:
            names = ", ".join(map(quoted, sources))
            raise UsageError(f"{names}: the input of an OpenAI batch has no responses; give its output, too")

    def sampled(
        self, sources: Sequence[str], sampling: Sampling | None, title: str = ""
    ) -> tuple[Iterator[Response], Sampling | None]:
        """The responses of all sources, and their sampling parameters, by default those of the first one.

        ``title``: of the sources in messages. Raises UsageError: no responses; while they are read, one with other
        sampling parameters.
        """
        responses = self.read(sources)
        first = next(responses, None)
        if first is None:
            raise UsageError(f"{title or ', '.join(map(quoted, sources))}: no responses to replay")
        sampling = sampling or first.sampling

        def same() -> Iterator[Response]:
            for response in chain([first], responses):
                if response.sampling is not None and response.sampling != sampling:
                    raise UsageError(
                        f"{response.place}: sampling parameters differ from those of earlier responses; replay them "
                        "separately"
                    )
                yield response

        return same(), sampling

    def _source(self, source: str) -> Iterator[Response]:
        kind = "" if source.startswith("hf:") else kind_of(source)
        if kind == "directory":
            path = path_of(source)
            if (path / "cells").is_dir() or (path / "recipe.json").is_file():
                yield from self._cell(self._baseline_cell(path))
                return
            if (path / "config.json").is_file() and (path / "responses.jsonl").is_file():
                yield from self._cell(path)
                return
        if kind == "other" or (kind == "file" and self.column is None):  # a device or a pipe is refused
            for place, parse in _rows(path_of(source)):
                try:
                    parts = [value := parse()]
                    for key in ("response", "body", "request"):  # of a batch
                        parts += [part[key] for part in parts if isinstance(part, dict) and key in part]
                    names = [self.model or None, *(part.get("model") for part in parts if isinstance(part, dict))]
                    self.model = next((name for name in names if isinstance(name, str)), "")
                    for row in plain_rows(value, self, place):
                        yield from response_of(self, row, place)
                except OptionsError:
                    raise
                except UsageError as error:
                    self.skip("that cannot be read", str(error))
            return
        yield from self._texts(source)

    def _baseline_cell(self, run: Path) -> Path:
        """The plain-decoding cell of a run with the requested sampling."""
        cells = {}
        for path in RunDirectory(run).cell_paths():
            config, _ = read_cell_config(path)
            if config.is_baseline and (path / "responses.jsonl").exists():
                cells[path] = config
        matching = {path: c for path, c in cells.items() if self.sampling is None or c.sampling == self.sampling}
        if not matching:
            available = ", ".join(sorted({sampling_text(c.sampling) for c in cells.values()})) or "none"
            raise UsageError(
                f"the run {run} does not have a finished plain-decoding cell with that sampling; available: {available}"
            )
        groups = {(c.target, c.sampling, c.max_new_tokens, c.seed) for c in matching.values()}
        if len({(c.target, c.sampling) for c in matching.values()}) > 1:
            available = ", ".join(sorted({f"{c.target} at {sampling_text(c.sampling)}" for c in matching.values()}))
            raise UsageError(
                f"the run {run} has several plain-decoding cells: {available}; choose one with --temperature, or give "
                "the directory of a cell"
            )
        if any(path.parent.parent != run for path in matching):
            self.assumed["the run is not finished: its cells contain a part of the prompts"] += 1
        if len(groups) > 1:
            self.assumed["the run has several groups: responses are taken from the first"] += 1
        return min(matching, key=lambda path: (matching[path].batch_size, path.name))

    def _cell(self, path: Path) -> Iterator[Response]:
        config, file = read_cell_config(path)[0], path / "responses.jsonl"
        if self.sampling is not None and config.sampling != self.sampling:
            own, requested = sampling_text(config.sampling), sampling_text(self.sampling)
            raise UsageError(f"the cell {path} was sampled at {own}, not at {requested}; change the sampling options")
        if config.constraint is not None:
            raise _constrained(f"the cell {path}")
        if self.target and config.target != self.target:
            raise UsageError(f"the cell {path} was decoded by {config.target}, not by --target {self.target}")
        self.target = config.target
        prompts: dict[str, Prompt] = {}
        answers: dict[str, list[str]] = {}
        for number, line in read_lines(file, RESPONSE_FILE_BYTES, LINE_BYTES):
            place = f"{printable(str(file))}:{number}"
            row = parse_json(line, file, line=number)
            if (
                not isinstance(row, dict)
                or not {"question_id", "turn", "tokens", "finish_reason", "text"} <= row.keys()
            ):
                raise UsageError(f"{place}: not a response record of a run; rerun the cell")
            prompts = prompts or {str(prompt.question_id): prompt for prompt in config.prompts.load()}
            name, turn = str(row["question_id"]), row["turn"]
            prompt = prompts.get(name)
            if prompt is None or not (isinstance(turn, int) and 0 <= turn < len(prompt.turns)):
                raise UsageError(
                    f"{place}: turn {turn} of {quoted(name)} is not in the run's prompts; the prompt file has changed"
                )
            if prompt.constraint is not None:
                raise _constrained(f"{place}: the response to {quoted(name)}")
            earlier = answers.setdefault(name, [])
            tokenizer = self.tokenizer(place).tokenizer
            ids = encode(tokenizer, prompt.turns[: turn + 1], earlier) if len(earlier) == turn else []
            if len(prompt.turns) > 1:
                earlier.append(str(row["text"]))
            if len(ids) != row.get("prompt_tokens"):
                if turn == 0:
                    raise UsageError(
                        f"{place}: the prompt {quoted(name)} has {len(ids)} tokens, but had "
                        f"{row.get('prompt_tokens')} in the run; the prompts or the tokenizer have changed"
                    )
                self.assumed["skipped: later turns of conversations that the run truncated"] += 1
                continue
            tokens = token_ids(row["tokens"], "tokens", place)
            log_p = (
                None
                if row.get("logprobs") is None
                else log_probabilities(row["logprobs"], "logprobs", len(tokens), place)
            )
            ended = row["finish_reason"] == "stop"
            maximum = config.max_new_tokens if ended else len(tokens)  # "length" may be that of the context
            yield Response(name, prompt.category, ids, tokens, log_p, ended, maximum, config.sampling, place)

    def _texts(self, source: str) -> Iterator[Response]:
        if not (source.startswith("hf:") or kind_of(source) or source in plugins.entries("prompts")):
            raise UsageError(
                f"responses {quoted(source)} do not exist; give a run, one of its cells, a JSONL file, a directory for "
                "the datasets library, or hf:org/name"
            )
        self.tokenizer(source)  # before a data set is loaded
        for place, row in rows(source, self.split, self.column):
            texts = row.get("turns") if isinstance(row, dict) else None
            text = texts[0] if isinstance(texts, list) and texts else row.get("text") if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise UsageError(f"{place}: the row does not contain a text; set its column with --column NAME")
            ids = encode_text(self.tokenizer(place).tokenizer, text, special=True)
            start = self.prompt_tokens
            response = ids[start : start + self.tokens]
            if len(response) < self.tokens:
                self.assumed[f"texts shorter than {start} + {self.tokens} tokens"] += 1
            self.assumed[TEXTS] += 1
            category = row.get("category") if isinstance(row.get("category"), str) else "all"
            yield Response(place, str(category), ids[:start], response, None, False, None, self.sampling, place)


def _rows(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The place of each object of a file, and a function that parses it: JSONL, or one JSON value, perhaps a list."""
    file = printable(str(path))
    with open_file(path, RESPONSE_FILE_BYTES) as lines:
        first = next((text for text in iter(lambda: lines.readline(LINE_BYTES + 1), b"") if text.strip()), b"").strip()
    if kind := packed_as(first):
        raise UsageError(f"{file} is {kind} and give the result")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UsageError(f"{file} is not UTF-8 text but UTF-16; save it as UTF-8")
    if first.startswith(b"[") or (first.startswith(b"{") and not first.endswith(b"}")):
        text = read_text(path, RESPONSE_FILE_BYTES)
        try:
            value = parse_json(text, path)
        except UsageError:
            value = _values(text, path)  # empty for a truncated first line of JSONL
        for i, item in enumerate(value if isinstance(value, list) else [value] if value else []):
            yield f"{file}, item {i + 1}", lambda item=item: item
        if value:
            return
    with open_file(path, RESPONSE_FILE_BYTES) as lines:
        for number, data in enumerate(iter(lambda: lines.readline(LINE_BYTES + 1), b""), start=1):
            if reason := LINE_BYTES.violation(data):
                raise UsageError(f"{file}:{number}: the line is too long (in bytes, {reason})")
            if text := data.strip().removeprefix(codecs.BOM_UTF8):
                yield f"{file}:{number}", partial(_parsed, text, path, number)


def _values(text: str, path: Path) -> list[Any]:
    """JSON values one after another, each over several lines, as jq writes them; empty if one is damaged."""
    values, decoder, end = [], json.JSONDecoder(), 0
    try:
        while match := _VALUE.search(text, end):
            end = decoder.raw_decode(text, match.start())[1]
            values.append(parse_json(text[match.start() : end], path))
    except (ValueError, RecursionError, UsageError):
        return []
    return values


def _parsed(data: bytes, path: Path, line: int) -> Any:
    if data.startswith(b"data:"):
        raise UsageError(
            f"{printable(str(path))}:{line}: it is a line of an event stream; record whole responses, each beside its "
            "request"
        )
    try:
        return parse_json(data.decode(), path, line=line)
    except UnicodeDecodeError:
        raise UsageError(f"{printable(str(path))}:{line}: the line is not UTF-8 text") from None


def _constrained(subject: str) -> UsageError:
    return UsageError(
        f"{subject} was decoded under a constraint, which replay does not apply; run the recipe of the candidates "
        "instead"
    )
