"""Random drafts of every shape, with the rules that accept them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from verifier_traits import traits_of

from crossdraft.drafters.autoregressive.trees import Siblings, TreeTemplate, grow_static
from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft, Verdict
from crossdraft.framework.contracts.draft_kind import CHAIN, DETERMINISTIC, GREEDY_DRAFT, IID, WITHOUT_REPLACEMENT
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling

#: Every shape of draft, and its kind.
SHAPES = {
    "chain": CHAIN,
    "point-mass": CHAIN,
    "iid": IID,
    "pair": WITHOUT_REPLACEMENT,
    "without-replacement": WITHOUT_REPLACEMENT,
    "greedy": GREEDY_DRAFT,
    "top-k": DETERMINISTIC,
}
RULES = {name: plugins.get("verifiers", name) for name in plugins.entries("verifiers")}
PAIRS = [
    (name, shape)
    for name, rule in RULES.items()
    for shape in SHAPES
    if traits_of(rule).accepts_kind(SHAPES[shape])
    and not (traits_of(rule).pairs_only and shape == "without-replacement")
]
#: The same, but a rule's second and later shapes are for slow tests.
ONE_SHAPE = [
    pytest.param(*pair, marks=[pytest.mark.slow] if pair[0] in {name for name, _ in PAIRS[:i]} else [])
    for i, pair in enumerate(PAIRS)
]
LOSSLESS = [pair for pair in PAIRS if traits_of(RULES[pair[0]]).lossless]
SEEDS = st.integers(0, 2**31)
#: b rows, drafts of at most `depth` levels; every shape with siblings has some at the first two levels.
sizes = dict(b=st.integers(1, 4), depth=st.integers(0, 4), vocab=st.integers(1, 12))


def shipped_rng(seed: int, streams: Sequence[int], position: int = 0) -> Any:
    return CounterRng(seed).for_step(list(streams), [position] * len(streams), torch.device("cpu"))


# -- random drafts of every shape -----------------------------------------------------------------------


class RandomLM:
    """A target and a drafter whose distributions depend on the whole prefix, through a state; each row has its own.

    Distributions go from nearly flat to one-hot, some with most tokens cut off, some equal for both models.
    """

    STATES = 13

    def __init__(self, seed: int, b: int, vocab: int, dtype: torch.dtype, equal: float = 0.3):
        self.generator = torch.Generator().manual_seed(seed)
        self.b, self.vocab = b, vocab
        self.q = self._table(dtype)
        self.p = self._table(dtype)
        same = torch.rand(b, self.STATES, generator=self.generator) < equal
        self.p[same] = self.q[same]
        self.rows = torch.arange(b)[:, None]

    def _table(self, dtype: torch.dtype) -> Tensor:
        shape, generator = (self.b, self.STATES), self.generator
        sharpness = 10 ** (torch.rand(*shape, 1, generator=generator) * 3 - 1.5)
        logits = torch.randn(*shape, self.vocab, generator=generator) * sharpness
        cut = torch.rand(logits.shape, generator=generator) < torch.rand(*shape, 1, generator=generator) - 0.2
        cut.scatter_(-1, logits.argmax(-1, keepdim=True), False)
        logits = logits.masked_fill(cut, -torch.inf).to(dtype).log_softmax(-1)
        return logits.softmax(-1)

    def after(self, state: Tensor, token: Tensor) -> Tensor:
        return (state * 5 + token + 1) % self.STATES

    def target(self, draft: Draft) -> Tensor:
        """``[B, N+1, V]``: the target's distribution after the root and after every node."""
        states = torch.zeros(self.b, draft.width + 1, dtype=torch.long)
        for node in range(draft.width):
            before = states.gather(1, draft.parents[:, node : node + 1] + 1)
            states[:, node + 1] = self.after(before, draft.tokens[:, node : node + 1]).squeeze(1)
        return self.p[self.rows, states]

    def sequences(self, k: int, depth: int) -> tuple[Tensor, Tensor]:
        """K sequences drawn independently, ``[B, K, depth]``, and their distributions as `Draft.iid` wants them."""
        states = torch.zeros(self.b, k, dtype=torch.long)
        tokens, distributions = [], []
        for level in range(depth):
            q = self.q[self.rows, states]
            distributions.append(q if level else q[:, :1])
            drawn = torch.multinomial(q.double().view(-1, self.vocab), 1, generator=self.generator)
            tokens.append(drawn.view(self.b, k))
            states = self.after(states, tokens[-1])
        return torch.stack(tokens, 2), torch.cat(distributions, 1)

    def tree(self, siblings: Siblings, shape: TreeTemplate, limit: Tensor, rng: Any) -> Draft:
        states = torch.zeros(self.b, 1, dtype=torch.long)

        def expand(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal states
            new = self.after(states.gather(1, parents + 1), tokens)
            states = torch.cat([states, new], 1)
            return self.q[self.rows, new].log()

        return grow_static(shape, len(shape.ranks), siblings, self.q[:, 0].log(), expand, Sampling(), limit, rng)[0]


def random_draft(
    shape: str, seed: int, b: int, depth: int, vocab: int, dtype: torch.dtype = torch.float64, equal: float = 0.3
) -> tuple[Draft, Tensor]:
    """``b`` ragged drafts that were really drawn from their q, and the target's p."""
    wide = dtype if dtype == torch.float64 else torch.float32
    lm = RandomLM(seed, b, vocab, wide, equal)
    limit = torch.randint(0, depth + 1, (b,), generator=lm.generator)
    if depth == 0:
        draft = Draft.empty(b)
    elif SHAPES[shape] is CHAIN:
        tokens, q = lm.sequences(1, depth)
        draft = Draft.chain(tokens[:, 0], limit, q if shape == "chain" else None)
    elif shape == "iid":
        tokens, q = lm.sequences(1 + seed % 3, depth)
        draft = Draft.iid(tokens, limit, q)
    else:
        branching = TreeTemplate.branching(([2, 1, 1, 1] if shape == "pair" else [3, 2, 1, 1])[:depth])
        siblings: Any = "without-replacement" if shape == "pair" else shape
        draft = lm.tree(siblings, branching, limit, shipped_rng(seed, range(b)))
    p = lm.target(draft).to(dtype)
    if draft.q is not None:
        draft.q = draft.q.to(dtype)
    return draft, p


def single_row(draft: Draft, p: Tensor, row: int) -> tuple[Draft, Tensor]:
    """Row ``row`` as a batch of its own, no wider and no deeper than it has to be."""
    valid = draft.valid[row].nonzero().flatten()
    if not len(valid):
        return Draft.empty(1), p[row : row + 1, :1]
    n, depth = int(valid[-1]) + 1, int(draft.depth[row, valid].max())
    if draft.sequences is None and draft.levels and draft.width == 2 * draft.levels:  # a pair of chains: whole levels
        n = 2 * depth
    one = slice(row, row + 1)
    cut = Draft(
        tokens=draft.tokens[one, :n],
        parents=draft.parents[one, :n],
        valid=draft.valid[one, :n],
        q=None if draft.q is None else draft.q[one],
        q_index=None if draft.q_index is None else draft.q_index[one, :n],
        kind=draft.kind,
        sequences=None if draft.sequences is None else draft.sequences[one, :, :depth],
        levels=None if draft.levels is None else depth,
    )
    return cut, p[one, : n + 1]


def accepted(draft: Draft, verdict: Verdict, row: int) -> list[int]:
    """The accepted nodes of a row, checked to be a path from the root."""
    tau = int(verdict.length[row])
    nodes = list(range(tau))
    if verdict.path is not None:
        nodes = verdict.path[row, :tau].tolist()
        assert (verdict.path[row, tau:] == -1).all(), "the path goes on behind its end"
    for parent, node in zip([-1, *nodes], nodes, strict=False):
        assert 0 <= node < draft.width and draft.valid[row, node]
        assert draft.parents[row, node] == parent
    return nodes


def tokens_of(draft: Draft, verdict: Verdict) -> list[list[int]]:
    """Output of every row: accepted tokens and the one after them."""
    return [
        [*draft.tokens[row, accepted(draft, verdict, row)].tolist(), int(verdict.token[row])]
        for row in range(draft.batch_size)
    ]
