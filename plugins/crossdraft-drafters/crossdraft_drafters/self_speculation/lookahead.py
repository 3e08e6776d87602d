"""``lookahead``: lookahead decoding, which drafts n-grams generated in the target's own passes.

Y. Fu, P. Bailis, I. Stoica, H. Zhang, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
ICML 2024, algorithm 2. Each sequence has a window of N - 1 rows of W guesses, from the last N - 1 steps of W parallel
Jacobi iterations: column c of row 0 guesses the token c + 1 positions after the last token, row r the one r positions
later. Every pass of the target scores the window with the draft (as the probes of `Draft`): row 0 is a chain after the
last token, and each of its tokens is followed by the later guesses of its column. The target's argmax after the last
row

* completes W new n-grams of N tokens, one per column, which go into a pool by their first token, the latest G of each;
* is the new last row: the oldest one is dropped, and all rows move with the text.

The draft is the pool's n-grams that begin with the last token, a tree of point masses. Any verifier for such trees is
lossless; the paper's samples the target and compares (``sample-match``).

A step costs at most (W + G) (N - 1) target rows, so it pays only if a pass over more rows takes the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from pydantic import Field, model_validator
from torch import Tensor, arange

from crossdraft import (
    DETERMINISTIC,
    MOST_LEVELS,
    MOST_NODES,
    MOST_SIBLINGS,
    Draft,
    DraftContext,
    Drafter,
    DraftTraits,
    Sampling,
    Scores,
    Sequences,
    StepRng,
    StrategyConfig,
    Verdict,
    on_device,
)

#: A draft of one row: tokens, and the index of each one's parent, -1 = the root.
Tree = tuple[list[int], list[int]]


class Guesses:
    """Window and pool of one sequence.

    Attributes:
        rows: N - 1 lists of W tokens, the oldest guesses first.
        pool: for each token, the (N - 1)-grams guessed after it, the latest last; at most G.
    """

    def __init__(self, prompt: Sequence[int], window: int, ngram: int, guesses: int, from_prompt: bool):
        self._size, self._limit, self._text = window, guesses, list(prompt)
        # Initial guesses are random tokens of the text, seeded by the prompt.
        self._random = Random(" ".join(map(str, prompt)))
        self.rows = [[self._random_token() for _ in range(window)] for _ in range(ngram - 1)]
        self._age = [0] * window  # steps that each column has been in the window
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}
        if from_prompt:
            for start in range(len(prompt) - ngram + 1):
                self.learn(prompt[start : start + ngram])

    def learn(self, ngram: Sequence[int]) -> None:
        """Add an n-gram to the pool, as the latest."""
        first, *rest = ngram
        ngrams = self.pool.setdefault(first, {})
        ngrams.pop(tuple(rest), None)
        ngrams[tuple(rest)] = None
        if len(ngrams) > self._limit:
            del ngrams[next(iter(ngrams))]

    def tree(self, last: int, depth: int) -> Tree:
        """Merge the n-grams after ``last`` into a tree of at most ``depth`` levels, the latest first."""
        nodes: dict[tuple[int, ...], int] = {}
        tokens: list[int] = []
        parents: list[int] = []
        for ngram in reversed(self.pool.get(last, {})):
            for length in range(1, min(len(ngram), depth) + 1):
                path = ngram[:length]
                if path not in nodes:
                    nodes[path] = len(tokens)
                    tokens.append(path[-1])
                    parents.append(nodes.get(path[:-1], -1))
        return tokens, parents

    def move(self, best: Sequence[int], tau: int, text: Sequence[int]) -> None:
        """Update after a step: ``best [W]``, the target's argmax after the last row; tau; and the whole text."""
        for column, new in enumerate(best):
            if self._age[column] >= len(self.rows) - 1:  # all tokens except the first come from the target
                self.learn([*(row[column] for row in self.rows), new])
        self._text = list(text)
        self.rows = [*self.rows[1:], list(best)]
        # Dropping a row moves the window by one position; the other tau positions are tau columns.
        new = min(tau, self._size)
        for row in self.rows:
            row[:] = [*row[tau:], *(self._random_token() for _ in range(new))]
        self._age = [*(age + 1 for age in self._age[tau:]), *[0] * new]

    def _random_token(self) -> int:
        return self._random.choice(self._text)


class Lookahead(Drafter):
    """W columns of the target's own guesses, n-grams of N tokens, and at most G candidates per step."""

    name = "lookahead"

    class Config(StrategyConfig):
        window: int = Field(7, ge=1, le=MOST_LEVELS, description="W: columns, positions that are guessed in parallel")
        ngram: int = Field(5, ge=2, le=MOST_LEVELS, description="N: length of the generated n-grams")
        guesses: int = Field(
            7, ge=1, le=MOST_SIBLINGS, description="G: n-grams kept per token, and maximum drafted per step"
        )
        from_prompt: bool = Field(False, description="add the prompt's n-grams to the pool, too")

        @model_validator(mode="after")
        def _size(self) -> Any:
            if reason := MOST_NODES.violation(self.nodes()):
                raise ValueError(f"window, ngram and guesses make drafts of {self.nodes()} nodes; {reason}")
            return self

        def nodes(self) -> int:
            return (self.window + self.guesses) * (self.ngram - 1)

    config: Config

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        self.guesses: list[Guesses | None] = [None] * context.batch_size
        self._candidates: int | None = None  # of the widest row of the last draft; None = no probes

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        levels = config.ngram - 1
        nodes = config.nodes()
        return DraftTraits(DETERMINISTIC, point_mass=True, nodes=nodes, levels=levels, adapts=True, waits=1)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        own = self.config
        self.guesses[row] = Guesses(prompt, own.window, own.ngram, own.guesses, own.from_prompt)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        self._candidates = None
        if not max(sequences.limit):
            return Draft.empty(sequences.batch_size, sequences.device)
        trees: list[Tree] = [
            guesses.tree(history[-1], limit) if guesses is not None and history else ([], [])
            for guesses, history, limit in zip(self.guesses, sequences.history, sequences.limit, strict=True)
        ]
        n = self._candidates = max(len(tokens) for tokens, _ in trees)
        probes, probe_parents = self._probes(n)
        tokens = [[*tree, *[0] * (n - len(tree)), *window] for (tree, _), window in zip(trees, probes, strict=True)]
        parents = [[*tree, *[-1] * (n - len(tree)), *probe_parents] for _, tree in trees]
        counts = on_device([len(tree) for tree, _ in trees], sequences.device)[:, None]
        busy = on_device([len(history) for history in sequences.history], sequences.device)[:, None].bool()
        order = arange(n + len(probe_parents), device=sequences.device)
        return Draft(
            tokens=on_device(tokens, sequences.device),
            parents=on_device(parents, sequences.device),
            valid=((order < counts) | (order >= n)) & busy,
            kind=DETERMINISTIC,
            levels=self.config.ngram - 1,
            probes=len(probe_parents),
        )

    def _probes(self, first: int) -> tuple[list[list[int]], list[int]]:
        """Tokens of each window, row by row, and their parents; the first token is node ``first``."""
        w, rows = self.config.window, self.config.ngram - 1
        padding = [0] * (w * rows)
        tokens = [padding if g is None else [token for row in g.rows for token in row] for g in self.guesses]
        chain = [-1, *range(first, first + w - 1)]
        return tokens, chain + [first + i for i in range(w * (rows - 1))]

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        if self._candidates is None:
            return
        best = scores.logits[:, -self.config.window :].argmax(-1).tolist()  # the last W probes are the last row
        for row, (guesses, history) in enumerate(zip(self.guesses, sequences.history, strict=True)):
            if guesses is not None and history:
                guesses.move(best[row], accepted[row], history)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self.guesses[row] = None
