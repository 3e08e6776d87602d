"""What every registered verifier does on every shape of draft it accepts, and the geometry of merged sequences.

Nothing here knows the list of verifiers: a rule that is registered is tested, by what its traits promise.
"""

import dataclasses
import functools
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crossdraft.drafters._growth import Shape, Siblings, grow_fixed
from crossdraft.framework import plugins
from crossdraft.framework.decoding import fused
from crossdraft.framework.decoding.fused import MOST_SHAPES, Fused
from crossdraft.framework.decoding.sampling import Sampling
from crossdraft.framework.draft import Draft, Verdict
from crossdraft.framework.rng import CounterRng
from crossdraft.framework.verifier import Verifier
from crossdraft.verifiers._tree import Children
from crossdraft.verifiers.multipath_block import RADIX, ascending
from crossdraft.verifiers.spectr import rho_star
from crossdraft.verifiers.traversal import Traversal

#: Every shape of draft, and what `VerifierTraits.drawn` calls it.
SHAPES = {
    "chain": "chain",
    "point-mass": "chain",
    "iid": "iid",
    "pair": "without_replacement",
    "without-replacement": "without_replacement",
    "greedy": "greedy_draft",
    "top-k": "deterministic",
}
RULES = {name: plugins.get("verifiers", name) for name in plugins.entries("verifiers")}
PAIRS = [
    (name, shape)
    for name, rule in RULES.items()
    for shape in SHAPES
    if SHAPES[shape] in rule.traits.drawn and not (rule.traits.pairs_only and shape == "without-replacement")
]
LOSSLESS = [pair for pair in PAIRS if RULES[pair[0]].traits.lossless]
SEEDS = st.integers(0, 2**31)
#: b rows, drafts of at most `depth` levels; every shape with siblings has some at the first two levels.
sizes = dict(b=st.integers(1, 4), depth=st.integers(0, 4), vocab=st.integers(1, 12))


def shipped_rng(seed: int, streams: Sequence[int], position: int = 0) -> Any:
    return CounterRng(seed).round(list(streams), [position] * len(streams), torch.device("cpu"))


# -- random drafts of every shape -----------------------------------------------------------------------


class RandomLM:
    """A target and a drafter whose laws depend on the whole prefix, through a state; each row has its own.

    Laws go from nearly flat to one-hot, some with most tokens cut off, some equal for both models.
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
        """``[B, N+1, V]``: the target's law after the root and after every node."""
        states = torch.zeros(self.b, draft.width + 1, dtype=torch.long)
        for node in range(draft.width):
            before = states.gather(1, draft.parents[:, node : node + 1] + 1)
            states[:, node + 1] = self.after(before, draft.tokens[:, node : node + 1]).squeeze(1)
        return self.p[self.rows, states]

    def sequences(self, k: int, depth: int) -> tuple[Tensor, Tensor]:
        """K sequences drawn independently, ``[B, K, depth]``, and their laws as `Draft.iid` wants them."""
        states = torch.zeros(self.b, k, dtype=torch.long)
        tokens, laws = [], []
        for level in range(depth):
            q = self.q[self.rows, states]
            laws.append(q if level else q[:, :1])
            drawn = torch.multinomial(q.double().view(-1, self.vocab), 1, generator=self.generator)
            tokens.append(drawn.view(self.b, k))
            states = self.after(states, tokens[-1])
        return torch.stack(tokens, 2), torch.cat(laws, 1)

    def tree(self, siblings: Siblings, shape: Shape, limit: Tensor, rng: Any) -> Draft:
        states = torch.zeros(self.b, 1, dtype=torch.long)

        def expand(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal states
            new = self.after(states.gather(1, parents + 1), tokens)
            states = torch.cat([states, new], 1)
            return self.q[self.rows, new].log()

        return grow_fixed(shape, siblings, self.q[:, 0].log(), expand, Sampling(), limit, rng)[0]


def random_draft(
    shape: str, seed: int, b: int, depth: int, vocab: int, dtype: torch.dtype = torch.float64, equal: float = 0.3
) -> tuple[Draft, Tensor]:
    """``b`` ragged drafts that were really drawn from their q, and the target's p."""
    wide = dtype if dtype == torch.float64 else torch.float32
    lm = RandomLM(seed, b, vocab, wide, equal)
    limit = torch.randint(0, depth + 1, (b,), generator=lm.generator)
    if depth == 0:
        draft = Draft.empty(b)
    elif SHAPES[shape] == "chain":
        tokens, q = lm.sequences(1, depth)
        draft = Draft.chain(tokens[:, 0], limit, q if shape == "chain" else None)
    elif shape == "iid":
        tokens, q = lm.sequences(1 + seed % 3, depth)
        draft = Draft.iid(tokens, limit, q)
    else:
        branching = Shape.branching(([2, 1, 1, 1] if shape == "pair" else [3, 2, 1, 1])[:depth])
        siblings: Any = "without-replacement" if shape == "pair" else shape
        draft = lm.tree(siblings, branching, limit, shipped_rng(seed, range(b)))
    p = lm.target(draft).to(dtype)
    if draft.q is not None:
        draft.q = draft.q.to(dtype)
    return draft, p


def alone(draft: Draft, p: Tensor, row: int) -> tuple[Draft, Tensor]:
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
        law=None if draft.law is None else draft.law[one, :n],
        drawn=draft.drawn,
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
    """What every row emits: accepted tokens and the one after them."""
    return [
        [*draft.tokens[row, accepted(draft, verdict, row)].tolist(), int(verdict.token[row])]
        for row in range(draft.batch_size)
    ]


# -- every rule, every shape ----------------------------------------------------------------------------


@pytest.mark.parametrize("name, shape", PAIRS)
@settings(deadline=None, max_examples=8)
@given(
    seed=SEEDS,
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    soft=st.booleans(),
    **sizes,
)
def test_a_verdict_is_a_path_and_a_token_the_target_can_say(
    name: str, shape: str, seed: int, dtype: torch.dtype, soft: bool, b: int, depth: int, vocab: int
) -> None:
    draft, p = random_draft(shape, seed, b, depth, vocab, dtype, equal=0.3 if soft else 1.0)
    before = p.clone(), None if draft.q is None else draft.q.clone()
    verdict = RULES[name]().verify(draft, p, shipped_rng(seed, range(b)))
    assert torch.equal(p, before[0]), "p was written to"
    assert draft.q is None or torch.equal(draft.q, before[1]), "q was written to"
    assert verdict.length.dtype == verdict.token.dtype == torch.long
    for row in range(b):
        at = -1
        for node in accepted(draft, verdict, row):
            if RULES[name].traits.lossless:
                assert p[row, at + 1, draft.tokens[row, node]] > 0, "accepted a token that the target never says"
            at = node
        token = int(verdict.token[row])
        assert 0 <= token < vocab
        assert p[row, at + 1, token] > 0, "emitted a token that the target never says"


@pytest.mark.parametrize("name, shape", PAIRS)
@settings(deadline=None, max_examples=8)
@given(seed=SEEDS, **sizes)
def test_a_row_does_not_see_its_neighbours(name: str, shape: str, seed: int, b: int, depth: int, vocab: int) -> None:
    """Also catches random numbers whose index depends on how wide the batch is."""
    draft, p = random_draft(shape, seed, b, depth, vocab)
    together = tokens_of(draft, RULES[name]().verify(draft, p, shipped_rng(seed, range(b))))
    for row in range(b):
        one, law = alone(draft, p, row)
        verdict = RULES[name]().verify(one, law, shipped_rng(seed, [row]))
        assert tokens_of(one, verdict) == [together[row]]


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.traits.stateful])
@settings(deadline=None, max_examples=8)
@given(seed=SEEDS, b=st.integers(2, 4), depth=st.integers(2, 5), vocab=st.integers(2, 8))
def test_a_row_keeps_its_own_state(name: str, seed: int, b: int, depth: int, vocab: int) -> None:
    batch, single = RULES[name](), [RULES[name]() for _ in range(b)]
    for row in range(b):
        batch.begin(row)
        single[row].begin(0)
    for position in range(4):
        draft, p = random_draft("chain", seed + position, b, depth, vocab)
        verdict = batch.verify(draft, p, shipped_rng(seed, range(b), position))
        together = tokens_of(draft, verdict)
        batch.observe(verdict.length.tolist(), draft.count.tolist())
        for row in range(b):
            one, law = alone(draft, p, row)
            if one.q is None:  # an empty draft: the law after its last token is still asked for
                assert draft.q is not None
                one.q = draft.q[row : row + 1]
            verdict = single[row].verify(one, law, shipped_rng(seed, [row], position))
            assert tokens_of(one, verdict) == [together[row]]
            single[row].observe(verdict.length.tolist(), one.count.tolist())
            assert (single[row].snapshot(0) is None) == (batch.snapshot(row) is None)


@pytest.mark.parametrize("name, shape", [pair for pair in LOSSLESS if pair[0] != "greedy"])
@settings(deadline=None, max_examples=8)
@given(seed=SEEDS, **sizes)
def test_at_temperature_zero_every_lossless_rule_is_greedy(
    name: str, shape: str, seed: int, b: int, depth: int, vocab: int
) -> None:
    draft, p = random_draft(shape, seed, b, depth, min(vocab, 4))
    p = torch.zeros_like(p).scatter_(2, p.argmax(2, keepdim=True), 1.0)
    ours, greedy = (RULES[rule]().verify(draft, p, shipped_rng(seed, range(b))) for rule in (name, "greedy"))
    assert tokens_of(draft, ours) == tokens_of(draft, greedy)


#: Rules and shapes that accept the whole draft where both models agree. A top-k draft is no sample, a greedy
#: draft neither; sample-match does not look at q; the best of several sequences is no sample either.
AGREE = [
    (name, shape)
    for name, shape in LOSSLESS
    if shape in ("chain", "iid", "pair", "without-replacement")
    and (name in ("token", "block", "greedy-block", "specinfer", "traversal", "spectr") or shape == "chain")
    and name not in ("greedy", "sample-match")
]


class Stubborn:
    """Coins that reject whatever is not certain, up to rounding."""

    def __init__(self, rng: Any, uniform: float):
        self.rng, self.uniform = rng, uniform

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        return h > self.uniform

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        return self.rng.draw(weights, purpose, index)


@pytest.mark.parametrize("name, shape", AGREE)
@settings(deadline=None, max_examples=8)
@given(seed=SEEDS, b=st.integers(1, 4), depth=st.integers(1, 4), vocab=st.integers(1, 200))
def test_equal_laws_accept_everything(name: str, shape: str, seed: int, b: int, depth: int, vocab: int) -> None:
    draft, p = random_draft(shape, seed, b, depth, vocab, torch.float32, equal=1.0)
    verdict = RULES[name]().verify(draft, p, Stubborn(shipped_rng(seed, range(b)), 1 - 1e-5))
    deepest = torch.where(draft.valid, draft.depth, 0).amax(1) if draft.width else draft.count
    assert verdict.length.tolist() == deepest.tolist()


@pytest.mark.parametrize("name, shape", [pair for pair in LOSSLESS if pair[1] in ("point-mass", "top-k")])
@settings(deadline=None, max_examples=8)
@given(seed=SEEDS, b=st.integers(1, 4), depth=st.integers(1, 4), vocab=st.integers(1, 12))
def test_a_one_hot_law_is_a_point_mass(name: str, shape: str, seed: int, b: int, depth: int, vocab: int) -> None:
    draft, p = random_draft(shape, seed, b, depth, vocab)
    one_hot = torch.zeros_like(p[:, : draft.width]).scatter_(2, draft.tokens[..., None], 1.0)
    spelt_out = Draft(draft.tokens, draft.parents, draft.valid, one_hot, drawn=draft.drawn, levels=draft.levels)
    verdicts = [RULES[name]().verify(d, p, shipped_rng(seed, range(b))) for d in (draft, spelt_out)]
    assert tokens_of(draft, verdicts[0]) == tokens_of(spelt_out, verdicts[1])


# -- compiled rules -------------------------------------------------------------------------------------


def fused_as_usual(name: str, shape: str, seeds: Sequence[int], vocab: int) -> int:
    """Check a fused rule against the rule itself, every draft in two rounds; returns how many shapes were compiled."""
    quick, rule = Fused(RULES[name]()), RULES[name]()
    for row in range(3):
        quick.begin(row)
        rule.begin(row)
    for seed, position in product(seeds, range(2)):
        draft, p = random_draft(shape, seed, 3, 3, vocab, torch.float32)
        verdicts = [either.verify(draft, p, shipped_rng(seed, range(3), position)) for either in (rule, quick)]
        assert tokens_of(draft, verdicts[1]) == tokens_of(draft, verdicts[0])
        for either, verdict in zip((rule, quick), verdicts, strict=True):
            either.observe(verdict.length.tolist(), draft.count.tolist())
    return quick.compiled


@pytest.mark.parametrize("name, shape", PAIRS)
def test_a_rule_is_a_function_of_tensors(name: str, shape: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(fused, "compile_step", lambda step, inputs: lambda tensors: step(*tensors))
    assert 0 < fused_as_usual(name, shape, range(12), 9) <= MOST_SHAPES


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")
def test_token_compiled_says_what_it_says() -> None:
    assert fused_as_usual("token", "chain", range(2), 300) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name, shape", PAIRS)
def test_a_rule_compiled_says_what_it_says(name: str, shape: str) -> None:
    assert fused_as_usual(name, shape, [3, 4], 2000) > 0


@pytest.mark.parametrize("name", ["token", "greedy-block", "specinfer"])
def test_the_way_of_cuda_traces_a_rule_whole(name: str, monkeypatch: Any) -> None:
    """`torch.compile` up to code for a device: the graph that it made, run as it is."""
    monkeypatch.setattr(fused, "compile_step", lambda step, inputs: fused.just_in_time(step))
    asked: list[Any] = []
    compile_ = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda step, **options: asked.append(options) or compile_(step, **options))
    assert fused_as_usual(name, "chain", range(2), 9) > 0
    assert asked and all(options["fullgraph"] for options in asked)


def test_what_cannot_be_compiled_runs_as_usual(monkeypatch: Any, caplog: Any) -> None:
    def failing(step: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here\nand much more")

    monkeypatch.setattr(fused, "compile_step", failing)
    assert fused_as_usual("token", "chain", range(3), 9) == 0
    assert [r.getMessage() for r in caplog.records] == [
        "crossdraft: verifier 'token' runs uncompiled: no compiler here"
    ]


def test_nothing_new_is_compiled_after_the_warm_up(monkeypatch: Any) -> None:
    monkeypatch.setattr(fused, "compile_step", lambda step, inputs: lambda tensors: step(*tensors))
    rule = Fused(RULES["token"]())
    rule.compiling = False
    draft, p = random_draft("chain", 1, 3, 3, 9)
    for _ in range(3):
        rule.verify(draft, p, shipped_rng(1, range(3)))
    assert rule.compiled == 0


def test_a_rule_that_keeps_its_state_to_itself_is_not_fused() -> None:
    class Private(RULES["token"]):  # type: ignore[misc]
        name = "private"
        traits = dataclasses.replace(RULES["token"].traits, stateful=True)

    assert not Fused.takes(Private)
    with pytest.raises(ValueError, match="'private' keeps state on the host"):
        Fused(Private())


# -- one draft sequence: every rule for several is a rule for one -----------------------------------------


class Coins:
    """The shipped numbers; coin ``index`` is row b's number ``column(index)[b]``. Remembers what was drawn from."""

    def __init__(self, seed: int, b: int, n: int, column: Callable[[int], Tensor] | None = None):
        self.rng = shipped_rng(seed, range(b))
        self.uniform = self.rng.uniform("accept", 0, n)
        self.column = column
        self.weights: dict[int, Tensor] = {}

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        if self.column is None:
            return self.uniform[:, index : index + h.shape[1]] < h
        assert h.shape[1] == 1
        return self.uniform.gather(1, self.column(index)[:, None]) < h

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        if purpose == "residual":
            self.weights[index] = weights / weights.sum(1, keepdim=True)
        return self.rng.draw(weights, purpose, index)


def one_sequence(seed: int, b: int, depth: int, vocab: int) -> tuple[list[Draft], Tensor]:
    """The same ragged draft as a chain and as K = 1 i.i.d. sequences, cut to equal width."""
    lm = RandomLM(seed, b, vocab, torch.float64)
    limit = torch.randint(0, depth + 1, (b,), generator=lm.generator)
    limit[0] = depth
    tokens, q = lm.sequences(1, depth)
    chain = Draft.chain(tokens[:, 0], limit, q)
    return [chain, Draft.iid(tokens, limit, q)], lm.target(chain)


one_sequence_sizes = dict(b=st.integers(1, 5), depth=st.integers(1, 5), vocab=st.integers(2, 9))


@pytest.mark.parametrize("name", ["specinfer", "greedy-draft-optimal", "spectr"])
@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, **one_sequence_sizes)
def test_of_one_sequence_these_are_token_verification(name: str, seed: int, b: int, depth: int, vocab: int) -> None:
    drafts, p = one_sequence(seed, b, depth, vocab)
    coins = Coins(seed, b, depth)
    token = RULES["token"]().verify(drafts[0], p, coins)
    for draft in drafts:
        if draft.drawn not in RULES[name].traits.drawn:
            continue
        other = Coins(seed, b, depth)
        verdict = RULES[name]().verify(draft, p, other)
        assert verdict.length.tolist() == token.length.tolist()
        if name == "spectr":  # one number a level: the law that tau's correction or bonus follows
            for row, tau in enumerate(token.length.tolist()):
                torch.testing.assert_close(other.weights[tau][row], coins.weights[0][row], atol=1e-9, rtol=1e-9)
        else:
            assert verdict.token.tolist() == token.token.tolist()


@pytest.mark.parametrize("name", ["traversal", "multipath-block"])
@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, **one_sequence_sizes)
def test_of_one_sequence_these_are_block_verification(name: str, seed: int, b: int, depth: int, vocab: int) -> None:
    drafts, p = one_sequence(seed, b, depth, vocab)
    count = drafts[0].count
    block = RULES["block"]().verify(drafts[0], p, Coins(seed, b, depth))

    def from_the_leaf(step: int) -> Tensor:
        return torch.where(count > step, count - 1 - step, step)

    def by_level(number: int) -> Tensor:
        """Number l (l + 1) / 2 is the coin of level l, 0 that of the whole path."""
        level = next(level for level in range(depth + 1) if level * (level + 1) // 2 == number)
        return torch.full_like(count, level - 1) if level else (count - 1).clamp(min=0)

    for draft in drafts:
        coins = Coins(seed, b, depth, from_the_leaf if name == "traversal" else by_level)
        verdict = RULES[name]().verify(draft, p, coins)
        assert verdict.length.tolist() == block.length.tolist()
        assert verdict.token.tolist() == block.token.tolist()


@pytest.mark.parametrize("size", [9, RADIX // 4 - 1, RADIX // 4, RADIX - 1, RADIX, RADIX + 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_order_of_multipath_block(size: int, dtype: torch.dtype) -> None:
    """Sorted by bits or not: ascending, equal ones by id; zeros, infinities and the smallest numbers included."""
    score = torch.rand(3, size, dtype=dtype, generator=torch.Generator().manual_seed(size)).pow(8).div(1e-3)
    score[0, ::3] = 0
    score[1, 1::4] = torch.inf
    score[1, 2::5] = torch.finfo(dtype).smallest_normal / 8
    score[2] = score[2].round()  # many ties
    assert ascending(score).tolist() == [sorted(range(size), key=row.__getitem__) for row in score.tolist()]


LEAVES_OUT = [(name, shape) for name, shape in PAIRS if hasattr(sys.modules[RULES[name].__module__], "none")]


@pytest.mark.parametrize("name, shape", LEAVES_OUT)
def test_what_is_left_out_changes_nothing(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU rules skip what no row needs; on a device they do not know. Same numbers, same tokens."""
    module, asked = sys.modules[RULES[name].__module__], []

    def never(rows: Tensor) -> bool:
        asked.append(bool(rows.any()))
        return False

    for seed in range(40):
        draft, p = random_draft(shape, seed, 1 + seed % 3, 4, 6)
        streams = range(draft.batch_size)
        with monkeypatch.context() as patch:
            patch.setattr(module, "none", never)
            everything = RULES[name]().verify(draft, p, shipped_rng(seed, streams))
        verdict = RULES[name]().verify(draft, p, shipped_rng(seed, streams))
        assert tokens_of(draft, verdict) == tokens_of(draft, everything)
    assert False in asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, n=st.integers(2, 8), spread=st.floats(0.1, 12), apart=st.floats(0, 4), vocab=st.integers(1, 300))
def test_rho_is_valid_and_hardly_too_large(
    dtype: torch.dtype, seed: int, n: int, spread: float, apart: float, vocab: int
) -> None:
    """p_acc <= rho beta, and no smaller rho that is valid accepts noticeably more (found by bisection)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocab, dtype=torch.float64, generator=generator) * spread
    moved = logits + apart * torch.randn(4, vocab, dtype=torch.float64, generator=generator)
    p, q = logits.softmax(1).to(dtype), moved.softmax(1).to(dtype)
    draws = torch.full((4,), n)
    rho = rho_star(p, q, draws)
    p, q = p.double(), q.double()

    def accepts(rho: Tensor) -> tuple[Tensor, Tensor]:
        beta = torch.minimum(q, p / rho[:, None]).sum(1)
        return 1 - (1 - beta).clamp(min=0) ** n, rho * beta

    eps = torch.finfo(dtype).eps
    p_acc, limit = accepts(rho)
    assert (p_acc <= limit + 32 * eps).all()
    low, high = torch.ones_like(rho), torch.full_like(rho, n)
    for _ in range(60):
        middle = (low + high) / 2
        valid = torch.le(*accepts(middle))
        low, high = torch.where(valid, low, middle), torch.where(valid, middle, high)
    assert (accepts(high)[0] - p_acc <= (1e-2 if dtype == torch.float32 else 1e-7)).all()


# -- no synchronisation with the host ---------------------------------------------------------------------


class NoMask(TorchDispatchMode):
    """Raises where entries are assigned by a mask, which a device turns into a list of unknown length."""

    PUTS = (torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self.PUTS and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise RuntimeError("a mask on the meta device has no entries")
        return func(*args, **(kwargs or {}))


def without_values(draft: Draft) -> Draft:
    """The draft on the meta device, where looking at a value, or at a shape that depends on values, raises."""
    tensors = {name: getattr(draft, name) for name in ("tokens", "parents", "valid", "q", "law", "sequences")}
    away = {name: None if tensor is None else tensor.to("meta") for name, tensor in tensors.items()}
    return Draft(**away, drawn=draft.drawn, levels=draft.levels)


def judge_without_values(verifier: Verifier, shape: str) -> None:
    for row in range(3):
        verifier.begin(row)
    for position, depth in enumerate((4, 4, 0)):
        draft, p = random_draft(shape, 4 + 3 * position, 3, depth, 9)
        rng = CounterRng(0).round(range(3), [position] * 3, torch.device("meta"))
        with NoMask():
            verdict = verifier.verify(without_values(draft), p.to("meta"), rng)
        assert verdict.length.shape == verdict.token.shape == (3,)
        assert verdict.length.device.type == verdict.token.device.type == "meta"
        verifier.observe([min(int(count), 1 + position) for count in draft.count], draft.count.tolist())


@pytest.mark.parametrize("name, shape", PAIRS)
def test_no_verifier_waits_for_the_device(name: str, shape: str) -> None:
    judge_without_values(RULES[name](), shape)


@pytest.mark.parametrize(
    "look",
    [
        lambda p: bool((p > 0.5).any()),
        lambda p: p.sum().item(),
        lambda p: int(p.argmax()),
        lambda p: float(p.max()),
        lambda p: [0] * 1000 and list(range(1000))[p.argmax()],
        lambda p: p.tolist(),
        lambda p: p.numpy(),
        lambda p: p.cpu(),
        lambda p: (p > 0.5).nonzero(),
        lambda p: torch.where(p > 0.5),
        lambda p: p[p > 0.5],
        lambda p: p.masked_select(p > 0.5),
        lambda p: p.clone().__setitem__(p > 0.5, p[0, 0, :1]),
        lambda p: p.unique(),
        lambda p: torch.equal(p, p),
        lambda p: p.repeat_interleave((p[0, 0] > 0).long(), -1),
    ],
    ids=range(16),
)
def test_a_verifier_that_waits_is_caught(look: Callable) -> None:
    class Waits(RULES["token"]):
        def verify(self, draft: Draft, p: Tensor, rng: Any) -> Verdict:
            look(p)
            return super().verify(draft, p, rng)

    with pytest.raises((RuntimeError, NotImplementedError, TypeError, ValueError)) as caught:
        judge_without_values(Waits(), "chain")
    assert "meta" in str(caught.value).lower(), caught.value


# -- merged sequences and visits, against naive ones ------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(data=st.data(), b=st.integers(1, 3), k=st.integers(1, 4), depth=st.integers(1, 4), vocab=st.integers(1, 3))
def test_equal_prefixes_are_one_node(data: st.DataObject, b: int, k: int, depth: int, vocab: int) -> None:
    cells = st.lists(st.integers(0, vocab - 1), min_size=b * k * depth, max_size=b * k * depth)
    tokens = torch.tensor(data.draw(cells)).view(b, k, depth)
    lengths = [data.draw(st.integers(0, depth)) for _ in range(b)]
    draft = Draft.iid(tokens, torch.tensor(lengths), torch.rand(b, 1 + (depth - 1) * k, vocab))
    if not any(lengths):
        assert draft.width == 0 and draft.q is None
        return
    widest = 0
    assert draft.law is not None and draft.sequences is not None
    for row in range(b):
        known: dict[tuple[int, ...], int] = {}
        through: dict[tuple[int, ...], int] = {}  # the first sequence with this prefix
        for level in range(lengths[row]):
            for j in range(k):
                prefix = tuple(tokens[row, j, : level + 1].tolist())
                through.setdefault(prefix, j)
                if prefix not in known:
                    node = known[prefix] = len(known)
                    assert draft.valid[row, node]
                    assert draft.tokens[row, node] == prefix[-1]
                    assert draft.parents[row, node] == (known[prefix[:-1]] if level else -1)
                    law = 1 + (level - 1) * k + through[prefix[:-1]] if level else 0
                    assert draft.law[row, node] == law
                assert draft.sequences[row, j, level] == known[prefix]
        assert draft.count[row] == len(known)
        assert (draft.sequences[row, :, lengths[row] :] == -1).all()
        widest = max(widest, len(known))
    assert draft.width == widest and draft.levels == depth


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, b=st.integers(1, 3), depth=st.integers(1, 3), vocab=st.integers(1, 5))
def test_later_children_of_merged_sequences_are_drawn_from_the_rest(seed: int, b: int, depth: int, vocab: int) -> None:
    """Elder siblings taken out and the rest renormalised; with copies every draw keeps the whole law."""
    draft, p = random_draft("iid", seed - seed % 3 + 2, b, depth, vocab)
    assume(draft.width)
    distinct, copies = Children(draft), Children(draft, with_copies=True)
    assert draft.q is not None and draft.law is not None and draft.sequences is not None
    for row in range(b):
        for node in range(int(draft.count[row])):
            q = draft.q[row, draft.law[row, node]].clone()
            elder = [j for j in range(node) if draft.parents[row, j] == draft.parents[row, node]]
            assert draft.elder[row, node].nonzero().flatten().tolist() == elder
            q[draft.tokens[row, elder]] = 0
            torch.testing.assert_close(distinct.law(node, p[:, 0])[row], q / q.sum())
    k, levels = draft.sequences.shape[1:]
    assert len(copies) == k * levels
    for entry in range(len(copies)):
        level, j = divmod(entry, k)
        for row in range(b):
            node = int(draft.sequences[row, j, level])
            assert copies.valid[row, entry] == (node >= 0)
            if node >= 0:
                assert copies.node[row, entry] == node
                torch.testing.assert_close(copies.law(entry, p[:, 0])[row], draft.q[row, draft.law[row, node]])


@st.composite
def families(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Parents of the nodes of a batch of random trees, and how many nodes of each row count."""
    b, n = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    parents = [[draw(st.integers(-1, i - 1)) for i in range(n)] for _ in range(b)]
    return parents, [draw(st.integers(0, n)) for _ in range(b)]


def as_draft(parents: list[list[int]], counts: list[int]) -> Draft:
    b, n = len(parents), len(parents[0])
    valid = torch.arange(n) < torch.tensor(counts)[:, None]
    family = torch.tensor(parents, dtype=torch.long).view(b, n)
    return Draft(torch.zeros_like(family), family, valid, drawn="deterministic")


@settings(deadline=None, max_examples=60)
@given(tree=families())
def test_a_visit_reports_a_node_after_its_children(tree: tuple[list[list[int]], list[int]]) -> None:
    parents, counts = tree
    visits = Traversal.leaves_first(as_draft(parents, counts)).tolist()
    for family, count, visit in zip(parents, counts, visits, strict=True):

        def below(node: int, family: list[int] = family[:count]) -> list[int]:
            children = [child for child, parent in enumerate(family) if parent == node]
            return [i for child in children for i in (*below(child, family), child)]

        assert visit[:count] == below(-1)
        assert sorted(visit) == list(range(len(family)))


@settings(deadline=None, max_examples=50)
@given(tree=families())
def test_children_youngest_first(tree: tuple[list[list[int]], list[int]]) -> None:
    """Siblings from the youngest to the eldest, parents still before their children."""
    parents, counts = tree
    draft = as_draft(parents, counts)
    children = Children(draft, youngest_first=True)
    for row, (family, count) in enumerate(zip(parents, counts, strict=True)):
        if not draft.width:
            assert len(children) == 0
            continue
        order = children.node[row, : int(children.valid[row].sum())].tolist()
        assert sorted(order) == list(range(count))
        for place, node in enumerate(order):
            assert family[node] == -1 or family[node] in order[:place]
            youngest_first = [i for i in order if family[i] == family[node]]
            assert youngest_first == sorted(youngest_first, reverse=True)
