"""The drafter ``suffix``: SuffixDecoding, which copies the most frequent continuation of the longest match.

G. Oliaro, Z. Jia, D. Campos, A. Qiao, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
NeurIPS 2025 (arXiv:2411.04975), section 3: contexts are looked up in the request's own prompt and output and
in the outputs of earlier requests. A match of m tokens gives a draft of at most ``factor`` * m tokens along the most
frequent continuations; the match with the largest score is used, the sum of its tokens' estimated probabilities. The
estimates only select lengths: drafts are point masses.

The paper counts all occurrences in suffix trees; this drafter counts the latest occurrences of each context (see
`History`), so the time of a look-up does not depend on the length of the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import Field
from torch import Tensor

from crossdraft import (
    CHAIN,
    DETERMINISTIC,
    MOST_LEVELS,
    Draft,
    DraftContext,
    Drafter,
    DraftTraits,
    Limit,
    Sampling,
    Scores,
    Sequences,
    StepRng,
    StrategyConfig,
    Verdict,
)

from . import compiled
from .history import END, History
from .speculation import Speculation, speculate

MOST_DEPTH = Limit(64, "every occurrence is compared over as many tokens in every step")
MOST_OCCURRENCES = Limit(4096, "each of them is compared in every step")
MOST_REMEMBERED = Limit(2**27, "each token takes up to 52 bytes")


class Suffix(Drafter):
    """Copies the most frequent continuations of the longest matches, as a chain or a tree.

    The memory of earlier outputs lives as long as the instance, and is shared by all requests; ``memory: 0`` isolates
    them.
    """

    name = "suffix"

    class Config(StrategyConfig):
        gamma: int = Field(default=16, ge=0, le=MOST_LEVELS, description="maximum number of drafted tokens")
        depth: int = Field(default=24, ge=1, le=MOST_DEPTH, description="longest match, in tokens")
        factor: float = Field(
            default=1.0, gt=0, le=16, description="maximum number of drafted tokens per matching token"
        )
        min_prob: float = Field(default=0.1, ge=0, le=1, description="minimum estimated probability of a drafted token")
        memory: int = Field(
            default=1_000_000,
            ge=0,
            le=MOST_REMEMBERED,
            description="number of latest tokens of earlier outputs in memory; 0 = only the own text",
        )
        occurrences: int = Field(
            default=32, ge=1, le=MOST_OCCURRENCES, description="latest occurrences of a context that are counted"
        )
        tree: bool = Field(default=False, description="draft a tree of several continuations, not only the best one")

    config: Config

    def __init__(self, config: StrategyConfig | None = None, context: DraftContext | None = None):
        options: Any = config if config is not None else self.Config()
        self._memory = _memory(options)
        super().__init__(config, context)

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        #: Per slot, its text, and the start of the output.
        self._own: list[tuple[History, int] | None] = [None] * context.batch_size

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(
            kind=DETERMINISTIC if config.tree else CHAIN,
            point_mass=True,
            nodes=config.gamma,
            shortenable=not config.tree,
            on_host=True,
        )

    def reset(self) -> None:
        if self._memory is not None:
            self._memory.clear()

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        own = History(self.context.max_length, self.config.depth, self.config.occurrences)
        own.extend(prompt)
        self._own[row] = own, len(prompt)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        drafts = [
            _draft(self.config, own[0], self._memory, history[-self.config.depth :], limit)
            if own is not None and history
            else Speculation()
            for own, history, limit in zip(self._own, sequences.history, sequences.limit, strict=True)
        ]
        parents = [draft.parents for draft in drafts] if self.config.tree else None
        return Draft.copied([draft.tokens for draft in drafts], sequences.device, parents)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        for own, history in zip(self._own, sequences.history, strict=True):
            if own is not None and history:
                own[0].extend(history[own[0].total :])

    def free(self, row: int, finish_reason: str | None = None) -> None:
        own, self._own[row] = self._own[row], None
        if own is not None and self._memory is not None and finish_reason not in (None, "error"):
            _remember(self._memory, *own)

    @classmethod
    def response_drafts(
        cls, config: Any, texts: Iterable[tuple[Sequence[int], Sequence[int]]], depth: int
    ) -> Iterator[np.ndarray]:
        memory = _memory(config)
        empty = History(1, config.depth, config.occurrences)
        for prompt, response in texts:
            own = History(len(prompt) + len(response), config.depth, config.occurrences)
            own.extend(prompt)
            drafts = np.full((len(response), depth), -1)
            compiled.replay_drafts(
                own.links,
                (empty if memory is None else memory).links,
                np.array([*prompt, *response], dtype=np.int64),
                len(prompt),
                config.depth,
                config.occurrences,
                config.factor,
                config.min_prob,
                drafts[:, : config.gamma],
            )
            if memory is not None:
                _remember(memory, own, len(prompt))
            yield drafts


def _memory(config: Any) -> History | None:
    """Memory of earlier outputs; None if disabled."""
    return History(config.memory, config.depth, config.occurrences) if config.memory else None


def _remember(memory: History, own: History, start: int) -> None:
    """Add the output of a text to the memory."""
    memory.extend(np.append(own.since(start), END))


def _draft(config: Any, own: History, memory: History | None, tail: Sequence[int], limit: int) -> Speculation:
    """Draft after ``tail``, at most ``limit`` levels deep; ties go to the request's own text.

    The match is selected by its full draft, which is then cut: a shorter draft is a prefix of a longer one.
    """
    histories = [own] if memory is None else [own, memory]
    draft = speculate(histories, tail, config.factor, config.min_prob, config.tree)
    return draft.cut(config.gamma, limit)
