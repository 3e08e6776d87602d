"""Multi-sequence verifiers on one sequence equal the single-sequence ones; skipped computations change nothing."""

import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import PAIRS, RULES, SEEDS, RandomLM, random_draft, shipped_rng, tokens_of
from torch import Tensor
from verifier_traits import traits_of

from crossdraft.framework.contracts.draft import Draft
from crossdraft.verifiers.multipath_block import RADIX, ascending
from crossdraft.verifiers.spectr import rho_star


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
        if not traits_of(RULES[name]).accepts_kind(draft.kind):
            continue
        other = Coins(seed, b, depth)
        verdict = RULES[name]().verify(draft, p, other)
        assert verdict.length.tolist() == token.length.tolist()
        if name == "spectr":  # one number a level: the distribution that tau's correction or bonus follows
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
def test_order_of_multipath_block(size: int, dtype: torch.dtype) -> None:
    """Sorted by bits or not: ascending, equal ones by id; zeros, infinities and the smallest numbers included."""
    score = torch.rand(3, size, dtype=dtype, generator=torch.Generator().manual_seed(size)).pow(8).div(1e-3)
    score[0, ::3] = 0
    score[1, 1::4] = torch.inf
    score[1, 2::5] = torch.finfo(dtype).smallest_normal / 8
    score[2] = score[2].round()  # many ties
    assert ascending(score).tolist() == [sorted(range(size), key=row.__getitem__) for row in score.tolist()]


#: Of one sequence multi-path block does everything.
LEAVES_OUT = [
    (name, shape)
    for name, shape in PAIRS
    if hasattr(sys.modules[RULES[name].__module__], "none")
    and (name != "multipath-block" or shape not in ("chain", "point-mass"))
]


@pytest.mark.parametrize("name, shape", LEAVES_OUT)
def test_skipped_work_does_not_change_result(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU rules skip what no row needs; on a device they do not know. Same numbers, same tokens."""
    module, calls = sys.modules[RULES[name].__module__], []

    def never(rows: Tensor) -> bool:
        calls.append(bool(rows.any()))
        return False

    for seed in range(40):
        draft, p = random_draft(shape, seed, 1 + seed % 3, 4, 6)
        streams = range(draft.batch_size)
        with monkeypatch.context() as patch:
            patch.setattr(module, "none", never)
            everything = RULES[name]().verify(draft, p, shipped_rng(seed, streams))
        verdict = RULES[name]().verify(draft, p, shipped_rng(seed, streams))
        assert tokens_of(draft, verdict) == tokens_of(draft, everything)
    assert False in calls


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
