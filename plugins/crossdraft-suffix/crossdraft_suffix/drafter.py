"""The drafter ``suffix``: SuffixDecoding, which copies what mostly followed the longest match.

G. Oliaro, Z. Jia, D. Campos, A. Qiao, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
NeurIPS 2025 (arXiv:2411.04975), section 3: contexts are found again in the prompt and output of the request itself and
in the outputs of earlier requests. A match of m tokens gives a draft of at most ``factor`` * m tokens, grown along the
most frequent continuations; of all matches that one is taken whose draft is expected to be accepted furthest, by the
sum of its tokens' estimated probabilities. These are estimates that lengths are chosen by, not the law of a draw: what
is drafted is a point mass.

Where the paper counts in suffix trees over all occurrences, this counts the latest ones of each context (see
`History`), so that a look-up takes as long after ten million tokens as after ten thousand.
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

MOST_DEPTH = Limit(64, "every occurrence is compared over that many tokens in every step")
MOST_OCCURRENCES = Limit(4096, "each of them is looked at in every step")
MOST_REMEMBERED = Limit(2**27, "each token takes up to 52 bytes")


class Suffix(Drafter):
    """Copies along the most frequent continuations of the longest matches, in a chain or a tree.

    Its memory of earlier outputs is the instance's: hold one, and the next call begins with it. It holds what was said
    to all prompts, and drafts it to any; ``memory: 0`` keeps requests apart.
    """

    name = "suffix"

    class Config(StrategyConfig):
        gamma: int = Field(default=16, ge=0, le=MOST_LEVELS, description="most tokens a draft may have")
        depth: int = Field(default=24, ge=1, le=MOST_DEPTH, description="longest match, in tokens")
        factor: float = Field(
            default=1.0, gt=0, le=16, description="most tokens that are drafted for each token that matches"
        )
        min_prob: float = Field(
            default=0.1, ge=0, le=1, description="drafted tokens are at least this probable, as counts estimate it"
        )
        memory: int = Field(
            default=1_000_000,
            ge=0,
            le=MOST_REMEMBERED,
            description="tokens of earlier outputs that are remembered, the latest ones; 0 = the own text alone",
        )
        occurrences: int = Field(
            default=32, ge=1, le=MOST_OCCURRENCES, description="latest occurrences of a context that are counted"
        )
        tree: bool = Field(default=False, description="draft a tree of several continuations, not the best one alone")

    config: Config

    def __init__(self, config: StrategyConfig | None = None, context: DraftContext | None = None):
        options: Any = config if config is not None else self.Config()
        self._memory = _memory(options)
        super().__init__(config, context)

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        #: Per slot, its text, and where the output begins.
        self._own: list[tuple[History, int] | None] = [None] * context.batch_size

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=DETERMINISTIC if config.tree else CHAIN, point_mass=True, nodes=config.gamma)

    def reset(self) -> None:
        if self._memory is not None:
            self._memory.clear()

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        own = History(self.context.max_length, self.config.depth, self.config.occurrences)
        own.extend(prompt)
        self._own[row] = own, len(prompt)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        found = [
            _draft(self.config, own[0], self._memory, history[-self.config.depth :], limit)
            if own is not None and history
            else Speculation()
            for own, history, limit in zip(self._own, sequences.history, sequences.limit, strict=True)
        ]
        parents = [one.parents for one in found] if self.config.tree else None
        return Draft.copied([one.tokens for one in found], sequences.device, parents)

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
    def drafts_along(
        cls, config: Any, texts: Iterable[tuple[Sequence[int], Sequence[int]]], depth: int
    ) -> Iterator[np.ndarray]:
        memory = _memory(config)
        nothing = History(1, config.depth, config.occurrences)
        for prompt, response in texts:
            own = History(len(prompt) + len(response), config.depth, config.occurrences)
            own.extend(prompt)
            found = np.full((len(response), depth), -1)
            compiled.along(
                own.links,
                (nothing if memory is None else memory).links,
                np.array([*prompt, *response], dtype=np.int64),
                len(prompt),
                config.depth,
                config.occurrences,
                config.factor,
                config.min_prob,
                found[:, : config.gamma],
            )
            if memory is not None:
                _remember(memory, own, len(prompt))
            yield found


def _memory(config: Any) -> History | None:
    """That of earlier outputs; none if there is to be none."""
    return History(config.memory, config.depth, config.occurrences) if config.memory else None


def _remember(memory: History, own: History, start: int) -> None:
    """Add the output of a text to what is remembered."""
    memory.extend(np.append(own.since(start), END))


def _draft(config: Any, own: History, memory: History | None, tail: Sequence[int], limit: int) -> Speculation:
    """What follows ``tail``, the request's own text first, at most ``limit`` tokens deep.

    The match is chosen by drafts as long as it allows, and the chosen one is cut: a shorter draft is a longer one's
    beginning.
    """
    histories = [own] if memory is None else [own, memory]
    found = speculate(histories, tail, config.factor, config.min_prob, config.tree)
    return found.cut(config.gamma, limit)
