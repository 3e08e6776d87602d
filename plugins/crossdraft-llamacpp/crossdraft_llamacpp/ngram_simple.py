"""``ngram-simple``: llama.cpp's n-gram drafting by ``--spec-type ngram-simple``.

https://github.com/ggml-org/llama.cpp: common/ngram-map.cpp. It copies up to gamma tokens after the latest earlier
occurrence of the last n tokens. Unlike prompt lookup, it looks up one size only, drops drafts of fewer than n tokens,
ignores the last token of the text and an occurrence at its beginning, and starts after n + gamma + 2 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from crossdraft import CHAIN, Draft, Drafter, DraftTraits, StrategyConfig


class NgramSimple(Drafter):
    """N-gram copying as in llama.cpp."""

    name = "ngram-simple"

    class Config(StrategyConfig):
        gamma: int = Field(default=8, ge=1, le=64, description="tokens of a draft (--spec-ngram-simple-size-m)")
        n: int = Field(default=3, ge=1, le=64, description="tokens of the suffix (--spec-ngram-simple-size-n)")

        @model_validator(mode="after")
        def _drafts_are_kept(self) -> Self:
            if self.gamma < self.n:
                raise ValueError(f"gamma must be at least n = {self.n}, because llama.cpp drops drafts of fewer tokens")
            return self

    config: Config

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma, on_host=True)

    @classmethod
    def response_drafts(
        cls, config: Any, texts: Iterable[tuple[Sequence[int], Sequence[int]]], depth: int
    ) -> Iterator[np.ndarray]:
        for prompt, response in texts:
            text = [*prompt, *response]
            rows, latest = np.full((len(response), depth), -1), {}
            for end in range(1, len(text)):
                _extend(latest, text, end, config.n)
                if end >= len(prompt):
                    draft = _draft(latest, text, end, config.n, config.gamma)[:depth]
                    rows[end - len(prompt), : len(draft)] = draft
            yield rows

    def propose(self, sequences: Any, rng: Any) -> Draft:
        drafts = []
        for history, limit in zip(sequences.history, sequences.limit, strict=True):
            latest: dict[tuple[int, ...], int] = {}
            for end in range(1, len(history) + 1):
                _extend(latest, history, end, self.config.n)
            drafts.append(_draft(latest, history, len(history), self.config.n, self.config.gamma)[:limit])
        return Draft.copied(drafts, sequences.device)


def _extend(latest: dict[tuple[int, ...], int], text: Sequence[int], end: int, n: int) -> None:
    """Add the n-gram that becomes eligible for a text of ``end`` tokens: two tokens follow it."""
    start = end - 2 - n
    if start > 0:
        latest[tuple(text[start : start + n])] = start


def _draft(latest: dict[tuple[int, ...], int], text: Sequence[int], end: int, n: int, gamma: int) -> list[int]:
    """The draft after the first ``end`` tokens of a text."""
    start = latest.get(tuple(text[end - n : end])) if end - 1 > n + gamma + 1 else None
    if start is None:
        return []
    draft = list(text[start + n : min(start + n + gamma, end - 1)])
    return draft if len(draft) >= n else []
