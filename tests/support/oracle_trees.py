"""Fixtures of the decode loop's tests: prompts, and a drafter of random trees around the right answer."""

import random
from typing import Any

import torch

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.draft_kind import DETERMINISTIC
from crossdraft.framework.contracts.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig

NEW = 18
#: Lengths differ, the shortest has no committed token before its root, the longest outgrows a window of 8;
#: the repetitions give prompt lookup something to find.
PROMPTS = ([5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 11, 12, 13])


def drafter_class(name: str) -> Any:
    return plugins.get("drafters", name)


def verifier_class(name: str) -> Any:
    return plugins.get("verifiers", name)


class OracleTrees(Drafter):
    """Random trees around a given correct continuation."""

    name = "oracle-trees"

    class Config(StrategyConfig):
        answers: dict[tuple[int, ...], list[int]]
        nodes: int = 7
        seed: int = 0

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.random = random.Random(self.config.seed)
        self.started: dict[int, int] = {}
        self.answer: dict[int, list[int]] = {}
        self.branched = 0  # accepted paths that were not simply the first nodes

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(kind=DETERMINISTIC, point_mass=True, nodes=16)

    def start(self, row: int, prompt: Any, hidden: Any = None) -> None:
        self.started[row], self.answer[row] = len(prompt), self.config.answers[tuple(prompt)]

    def propose(self, sequences: Any, rng: Any) -> Draft:
        b, n = sequences.batch_size, self.config.nodes
        tokens, parents = torch.zeros(b, n, dtype=torch.long), torch.full((b, n), -1)
        valid = torch.zeros(b, n, dtype=torch.bool)
        for row, history in enumerate(sequences.history):
            if not history:
                continue
            upcoming = self.answer[row][len(history) - self.started[row] :]
            right, depth, used = {-1}, {-1: 0}, set()
            for node in range(self.random.randint(0, n)):
                parent = self.random.choice([i for i in depth if depth[i] < sequences.limit[row]] or [None])
                if parent is None:
                    break
                token = self.random.randrange(self.context.vocab_size)
                if parent in right and self.random.random() < 0.7:
                    token = upcoming[depth[parent]]
                if (parent, token) in used:  # siblings differ
                    break
                used.add((parent, token))
                if parent in right and token == upcoming[depth[parent]]:
                    right.add(node)
                tokens[row, node], parents[row, node], valid[row, node] = token, parent, True
                depth[node] = depth[parent] + 1
        return Draft(tokens, parents, valid, kind=DETERMINISTIC)

    def observe(self, sequences: Any, draft: Any, verdict: Any, accepted: Any, scores: Any) -> None:
        for row, tau in enumerate(accepted):
            self.branched += verdict.path[row, :tau].tolist() != list(range(tau))
