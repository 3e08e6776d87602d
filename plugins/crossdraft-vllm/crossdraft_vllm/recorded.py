"""The drafter ``recorded-responses``: drafts the recorded response of a prompt.

With responses that the target itself gave at temperature 0, every token is accepted: the throughput is an upper bound
for any drafter of this length in the same engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from crossdraft import (
    CHAIN,
    MOST_LEVELS,
    Draft,
    DraftContext,
    Drafter,
    DraftTraits,
    Sampling,
    Sequences,
    StepRng,
    StrategyConfig,
    UsageError,
)


class RecordedResponses(Drafter):
    """Copies the recorded text that starts with the sequence so far; drafts nothing if none does."""

    name = "recorded-responses"

    class Config(StrategyConfig):
        responses: str = Field(description="JSONL file; each line has prompt and tokens, two lists of token ids")
        gamma: int = Field(default=8, ge=0, le=MOST_LEVELS, description="maximum draft length")

    config: Config

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        path = Path(self.config.responses).expanduser()
        try:
            stamp = path.stat().st_mtime_ns
        except OSError as error:
            raise UsageError(f"the responses {path} cannot be read ({error.strerror}); give a JSONL file") from None
        self._texts = read_texts(path, stamp)
        if (largest := max(map(max, self._texts), default=0)) >= context.vocab_size:
            raise UsageError(
                f"{path} holds token id {largest}, but the target has only {context.vocab_size} tokens; record the "
                "responses with the same target"
            )
        #: Per slot, the recorded texts that start with the sequence.
        self._candidates: list[list[list[int]]] = [[] for _ in range(context.batch_size)]
        self._checked = [0] * context.batch_size

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma, on_host=True)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self._candidates[row], self._checked[row] = starting_with(self._texts, 0, prompt), len(prompt)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        rows = []
        for row, (history, limit) in enumerate(zip(sequences.history, sequences.limit, strict=True)):
            start, end = self._checked[row], len(history)
            texts = self._candidates[row] = starting_with(self._candidates[row], start, history[start:])
            self._checked[row] = end
            rows.append(texts[0][end : end + min(self.config.gamma, limit)] if texts else [])
        return Draft.copied(rows, sequences.device)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self._candidates[row] = []


def starting_with(texts: Iterable[list[int]], start: int, tokens: Sequence[int]) -> list[list[int]]:
    """The ``texts`` with ``tokens`` at position ``start``."""
    tokens = list(tokens)
    return [text for text in texts if text[start : start + len(tokens)] == tokens]


@lru_cache(maxsize=2)
def read_texts(path: Path, stamp: int) -> tuple[list[int], ...]:
    """Read the texts of a JSONL file, prompt and response in one list; ``stamp`` is its time of change."""
    texts = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
                parts: list[Any] = [item["prompt"], item["tokens"]]
            except (ValueError, KeyError, TypeError):
                parts: list[Any] = [None]
            if any(not isinstance(part, list) or any(type(x) is not int or x < 0 for x in part) for part in parts):
                raise UsageError(
                    f"{path}, line {number}: expected an object with 'prompt' and 'tokens', two lists of token ids, "
                    f"got {line.strip()[:80]!r}; record the responses with token ids"
                )
            texts.append([token for part in parts for token in part])
    return tuple(texts)
