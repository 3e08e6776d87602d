"""Recorded responses: what they are, and where they come from.

- the directory of a finished run, or of one of its cells: the responses of plain decoding, or of that cell;
- a JSONL file, a response a line (`lines`);
- a data set in ``datasets``, or a file of rows with a text: each text is cut into a prompt and what follows it.

Everything is read as it is asked for: no more than a line is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError, printable, quoted
from ..models.chat import encode, encode_text
from ..recipe.prompts import Prompt, rows
from ..runs.run_directory import RunDirectory, read_config
from ..util.input_files import kind_of, parse_json, path_of, read_lines
from ..util.limits import LINE_BYTES, RESPONSE_FILE_BYTES
from .jsonl_formats import response_of
from .response import Reading, Response, described, log_probabilities, token_ids

#: Said of texts that nobody knows to be a target's.
TEXTS = "texts of a data set: taken for what the target would say, which they need not be"


@dataclass
class Reader(Reading):
    """Reads responses; see `Reading`.

    Attributes:
        prompt_tokens, tokens: of a text of a data set: of its prompt, and most of what follows.
        split, column: of a data set.
        limit: read so many responses; None = all.
    """

    prompt_tokens: int = 64
    tokens: int = 128
    split: str | None = None
    column: str | None = None
    limit: int | None = None

    def read(self, sources: Sequence[str]) -> Iterator[Response]:
        """The responses of all sources, one after the other. Raises UsageError, naming file and line."""
        count = 0
        for source in sources:
            for response in self._source(source):
                if not len(response.tokens):
                    self.assumed["left out: they have no token"] += 1
                    continue
                if not len(response.prompt):
                    raise UsageError(f"{response.where}: the prompt is empty; a response follows at least one token")
                if self.limit is not None and count >= self.limit:
                    return
                count += 1
                yield response

    def _source(self, source: str) -> Iterator[Response]:
        kind = "" if source.startswith("hf:") else kind_of(source)
        if kind == "directory":
            path = path_of(source)
            if (path / "cells").is_dir() or (path / "recipe.json").is_file():
                yield from self._cell(self._chosen(path))
                return
            if (path / "config.json").is_file() and (path / "responses.jsonl").is_file():
                yield from self._cell(path)
                return
        if kind == "file" and self.column is None:
            file = printable(source)
            for number, line in read_lines(path_of(source), RESPONSE_FILE_BYTES, LINE_BYTES):
                if line.strip():
                    where = f"{file}:{number}"
                    yield from response_of(self, parse_json(line, source, line=number), where)
            return
        yield from self._texts(source)

    # -- the directory of a run ------------------------------------------------------------------------------

    def _chosen(self, run: Path) -> Path:
        """The cell whose responses stand for a run: plain decoding, at the sampling asked for."""
        cells = {}
        for path in RunDirectory(run).cell_paths():
            config, _ = read_config(path)
            if config.is_baseline and (path / "responses.jsonl").exists():
                cells[path] = config
        fitting = {path: c for path, c in cells.items() if self.sampling is None or c.sampling == self.sampling}
        if not fitting:
            had = ", ".join(sorted({described(c.sampling) for c in cells.values()})) or "none"
            raise UsageError(f"the run {run} has no finished cell of plain decoding at that sampling; it has: {had}")
        different = {(c.target, c.sampling, c.max_new_tokens, c.seed) for c in fitting.values()}
        if len({(c.target, c.sampling) for c in fitting.values()}) > 1:
            had = ", ".join(sorted({f"{c.target} at {described(c.sampling)}" for c in fitting.values()}))
            raise UsageError(
                f"the run {run} decoded in several ways, {had}; choose one with --temperature, or name the directory "
                "of a cell"
            )
        if any(path.parent.parent != run for path in fitting):
            self.assumed["the run is not finished: its cells have answered a part of the prompts"] += 1
        if len(different) > 1:
            self.assumed["of several groups of the run, the first one's responses are taken"] += 1
        return min(fitting, key=lambda path: (fitting[path].batch_size, path.name))

    def _cell(self, path: Path) -> Iterator[Response]:
        config, file = read_config(path)[0], path / "responses.jsonl"
        if self.sampling is not None and config.sampling != self.sampling:
            raise UsageError(f"the cell {path} was decoded at {described(config.sampling)}, not as --temperature says")
        if self.target and config.target != self.target:
            raise UsageError(f"the cell {path} was decoded by {config.target}, not by {self.target}")
        self.target = config.target
        prompts: dict[str, Prompt] = {}
        answers: dict[str, list[str]] = {}
        for number, line in read_lines(file, RESPONSE_FILE_BYTES, LINE_BYTES):
            where = f"{printable(str(file))}:{number}"
            row = parse_json(line, file, line=number)
            if (
                not isinstance(row, dict)
                or not {"question_id", "turn", "tokens", "finish_reason", "text"} <= row.keys()
            ):
                raise UsageError(f"{where}: this is no response as a run records it")
            prompts = prompts or {str(prompt.question_id): prompt for prompt in config.prompts.load()}
            name, turn = str(row["question_id"]), row["turn"]
            prompt = prompts.get(name)
            if prompt is None or not (isinstance(turn, int) and 0 <= turn < len(prompt.turns)):
                raise UsageError(f"{where}: the prompts of the run have no turn {turn} of {quoted(name)} any more")
            before = answers.setdefault(name, [])
            tokenizer = self.tokenizer(where).tokenizer
            ids = encode(tokenizer, prompt.turns[: turn + 1], before) if len(before) == turn else []
            if len(prompt.turns) > 1:
                before.append(str(row["text"]))
            if len(ids) != row.get("prompt_tokens"):
                if turn == 0:
                    raise UsageError(
                        f"{where}: the prompt {quoted(name)} has {len(ids)} tokens now and had "
                        f"{row.get('prompt_tokens')} in the run; the prompts or the tokenizer are others"
                    )
                self.assumed["left out: later turns whose conversation the run had to cut"] += 1
                continue
            tokens = token_ids(row["tokens"], "tokens", where)
            log_p = (
                None
                if row.get("logprobs") is None
                else log_probabilities(row["logprobs"], "logprobs", len(tokens), where)
            )
            ended = row["finish_reason"] == "stop"
            most = config.max_new_tokens if ended else len(tokens)  # "length" may be that of the context
            yield Response(name, prompt.category, ids, tokens, log_p, ended, most, config.sampling, where)

    # -- texts -----------------------------------------------------------------------------------------------

    def _texts(self, source: str) -> Iterator[Response]:
        for i, (where, row) in enumerate(rows(source, self.split, self.column)):
            texts = row.get("turns") if isinstance(row, dict) else None
            text = texts[0] if isinstance(texts, list) and texts else row.get("text") if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise UsageError(f"{where}: there is no text; name the column that holds it: --column NAME")
            ids = encode_text(self.tokenizer(where).tokenizer, text, special=True)
            start = self.prompt_tokens
            said = ids[start : start + self.tokens]
            if len(said) < self.tokens:
                self.assumed[f"texts with fewer than {start} + {self.tokens} tokens, taken as far as they go"] += 1
            self.assumed[TEXTS] += 1
            category = row.get("category") if isinstance(row.get("category"), str) else "all"
            yield Response(str(i), str(category), ids[:start], said, None, False, None, self.sampling, where)
