"""Lookahead decoding: n-grams that the target makes up in its own passes are the draft.

Y. Fu, P. Bailis, I. Stoica, H. Zhang, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
ICML 2024, algorithm 2. Beside the text goes a window of N - 1 rows of W guesses, what W parallel Jacobi iterations
said in their last N - 1 steps: column c guesses what stands c + 1 places after the last token, row r one place
further on. Every pass of the target scores them with the draft (they are the probes of `Draft`): row 0 is a chain
behind the last token, and below each of its tokens hang the later guesses of its column. What the target says after
the last row

* ends W new n-grams of N tokens, one a column, which go into a pool by their first token, the latest G of each;
* is the new last row: the oldest one goes, and all rows move on with the text.

The draft is the pool's n-grams that begin with the last token, a tree of point masses, since no number was drawn for
them. So any rule for such trees keeps the target's law; the paper's own samples the target and compares
(``sample-match``).

A step costs (W + G) (N - 1) target rows at most, which is why it pays only while a pass over more rows takes no
longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from pydantic import Field, model_validator
from torch import Tensor, arange

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict, on_device
from ...framework.contracts.draft_kind import DETERMINISTIC
from ...framework.contracts.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.util.limits import MOST_LEVELS, MOST_NODES, MOST_SIBLINGS

#: A draft of one row: tokens, and the index of each one's parent, -1 = the root.
Tree = tuple[list[int], list[int]]


class Guesses:
    """Window and pool of one sequence.

    Attributes:
        rows: N - 1 lists of W tokens, the oldest guesses first.
        pool: for each token the (N - 1)-grams that followed it in guesses, the latest last; at most G.
    """

    def __init__(self, prompt: Sequence[int], window: int, ngram: int, guesses: int, from_prompt: bool):
        self._size, self._most, self._text = window, guesses, list(prompt)
        # What is not known yet is some token of the text; which, follows from the prompt alone.
        self._random = Random(" ".join(map(str, prompt)))
        self.rows = [[self._any() for _ in range(window)] for _ in range(ngram - 1)]
        self._age = [0] * window  # steps that each column has been in the window
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}
        if from_prompt:
            for start in range(len(prompt) - ngram + 1):
                self.learn(prompt[start : start + ngram])

    def learn(self, ngram: Sequence[int]) -> None:
        """Put an n-gram into the pool, as the latest."""
        first, *rest = ngram
        known = self.pool.setdefault(first, {})
        known.pop(tuple(rest), None)
        known[tuple(rest)] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def tree(self, last: int, depth: int) -> Tree:
        """The n-grams that follow ``last``, the latest first, equal beginnings merged, at most ``depth`` deep."""
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

    def move(self, said: Sequence[int], tau: int, text: Sequence[int]) -> None:
        """The target said ``said [W]`` after the last row, and accepted ``tau`` tokens; ``text`` is all of it."""
        for column, new in enumerate(said):
            if self._age[column] >= len(self.rows) - 1:  # all but the first token were said by the target
                self.learn([*(row[column] for row in self.rows), new])
        self._text = list(text)
        self.rows = [*self.rows[1:], list(said)]
        # One place further on is where the next row stands already; tau places more are tau columns.
        new = min(tau, self._size)
        for row in self.rows:
            row[:] = [*row[tau:], *(self._any() for _ in range(new))]
        self._age = [*(age + 1 for age in self._age[tau:]), *[0] * new]

    def _any(self) -> int:
        return self._random.choice(self._text)


class Lookahead(Drafter):
    """The target's own guesses, W columns of them, N tokens long, and at most G candidates a step."""

    name = "lookahead"

    class Config(StrategyConfig):
        window: int = Field(7, ge=1, le=MOST_LEVELS, description="W: places ahead that are guessed")
        ngram: int = Field(5, ge=2, le=MOST_LEVELS, description="N: length of the n-grams that are made up")
        guesses: int = Field(7, ge=1, le=MOST_SIBLINGS, description="G: n-grams kept for a token, and drafted at most")
        from_prompt: bool = Field(False, description="take up the prompt's own n-grams, too")

        @model_validator(mode="after")
        def _size(self) -> Any:
            if reason := MOST_NODES.refusal(self.nodes()):
                raise ValueError(f"window, ngram and guesses make drafts of {self.nodes()} nodes; {reason}")
            return self

        def nodes(self) -> int:
            return (self.window + self.guesses) * (self.ngram - 1)

    config: Config

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        self.guesses: list[Guesses | None] = [None] * context.batch_size
        self._candidates: int | None = None  # of the widest row of the last draft; None = there were no probes

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        levels = config.ngram - 1
        return DraftTraits(kind=DETERMINISTIC, point_mass=True, nodes=config.nodes(), levels=levels, adapts=True)

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
        probes, below = self._probes(n)
        tokens = [[*tree, *[0] * (n - len(tree)), *window] for (tree, _), window in zip(trees, probes, strict=True)]
        parents = [[*tree, *[-1] * (n - len(tree)), *below] for _, tree in trees]
        counts = on_device([len(tree) for tree, _ in trees], sequences.device)[:, None]
        busy = on_device([len(history) for history in sequences.history], sequences.device)[:, None].bool()
        order = arange(n + len(below), device=sequences.device)
        return Draft(
            tokens=on_device(tokens, sequences.device),
            parents=on_device(parents, sequences.device),
            valid=((order < counts) | (order >= n)) & busy,
            kind=DETERMINISTIC,
            levels=self.config.ngram - 1,
            probes=len(below),
        )

    def _probes(self, first: int) -> tuple[list[list[int]], list[int]]:
        """The tokens of each window, row by row, and their parents, where the first of them is node ``first``."""
        w, rows = self.config.window, self.config.ngram - 1
        nothing = [0] * (w * rows)
        tokens = [nothing if g is None else [token for row in g.rows for token in row] for g in self.guesses]
        chain = [-1, *range(first, first + w - 1)]
        return tokens, chain + [first + i for i in range(w * (rows - 1))]

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        if self._candidates is None:
            return
        said = scores.logits[:, -self.config.window :].argmax(-1).tolist()  # the last probes are the last row
        for row, (guesses, history) in enumerate(zip(self.guesses, sequences.history, strict=True)):
            if guesses is not None and history:
                guesses.move(said[row], accepted[row], history)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self.guesses[row] = None
