"""The generator is the published one, and nothing but its key changes a number."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from crossdraft.framework.contracts.rng import (
    PURPOSES,
    CounterRng,
    draw_each,
    first_accepted,
    inverse_cdf,
    philox4x32,
)
from crossdraft.framework.errors import UsageError

CPU = CPU = torch.device("cpu")
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    "counter, key, want",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]) -> None:
    """The known-answer vectors published with Random123, alone and inside a batch."""
    separate = philox4x32(np.array(counter, dtype=np.uint64), key)
    assert tuple(separate.tolist()) == want
    batch = philox4x32(np.array([[1, 2, 3, 4], counter, [0, 0, 0, 1]], dtype=np.uint64).T, key)
    assert tuple(batch[:, 1].tolist()) == want


def uniforms(seed: int, stream: list[int], position: list[int], purpose: str = "accept", n: int = 6) -> torch.Tensor:
    return CounterRng(seed).for_step(stream, position, CPU).uniform(purpose, 0, n)


def test_numbers_do_not_depend_on_batch_or_slot() -> None:
    batched = uniforms(7, [3, 1, 4], [10, 5, 9])
    assert torch.equal(uniforms(7, [4, 3], [9, 10]), batched[[2, 0]])
    assert torch.equal(uniforms(7, [1], [5]), batched[[1]])


def test_numbers_are_independent_of_earlier_draws() -> None:
    at_once = uniforms(7, [3], [10], n=40)
    piecewise = CounterRng(7).for_step([3], [10], CPU)
    piecewise.draw(torch.ones(1, 5), "draft", 0)
    assert torch.equal(piecewise.uniform("accept", 30, 10), at_once[:, 30:])
    assert torch.equal(piecewise.uniform("accept", 0, 1), at_once[:, :1])
    assert torch.equal(piecewise.uniform("accept", 1, 29), at_once[:, 1:30])


def test_every_part_of_key_matters() -> None:
    base = uniforms(7, [3], [10])
    others = [uniforms(seed, [3], [10]) for seed in (8, 7 + 2**32)]
    others += [uniforms(7, [4], [10]), uniforms(7, [3], [11])]
    others += [uniforms(7, [3], [10], purpose) for purpose in PURPOSES if purpose != "accept"]
    everything = torch.cat([base, *others]).flatten().tolist()
    assert len(set(everything)) == len(everything)
    assert torch.equal(uniforms(7, [3], [10]), base)


@pytest.mark.parametrize("seed", [2**64, 2**64 + 7, -(2**63) - 1])
def test_seeds_that_wrap_are_refused(seed: int) -> None:
    with pytest.raises(UsageError, match=f"the seed {seed} must be an integer of 64 bits"):
        CounterRng(seed)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1])
def test_any_integer_of_64_bits_is_seed(seed: int) -> None:
    result = uniforms(seed, [0], [0])
    assert ((result >= 0) & (result < 1)).all()


def test_number_is_used_once_step() -> None:
    rng = CounterRng(0).for_step([0], [0], CPU)
    rng.accept(torch.full((1, 4), 0.5))
    with pytest.raises(ValueError, match=r"\[3\] for 'accept' were already used this step"):
        rng.accept(torch.full((1, 4), 0.5), index=3)
    rng.accept(torch.full((1, 4), 0.5), index=4)
    rng.draw(torch.ones(1, 3), "draft", 0)  # another purpose has its own numbers
    with pytest.raises(ValueError, match="'draft'"):
        rng.draw(torch.ones(1, 3), "draft", 0)


def test_unknown_purpose_is_error() -> None:
    with pytest.raises(ValueError):
        CounterRng(0).for_step([0], [0], CPU).uniform("no-such-purpose", 0, 1)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_impossible_and_certain_coins(monkeypatch: pytest.MonkeyPatch, uniform: float) -> None:
    """Acceptance is strict: even the number 0 does not accept an event of probability 0."""
    rng = CounterRng(0).for_step([0], [0], CPU)
    monkeypatch.setattr(rng, "uniform", lambda purpose, index, n: torch.full((1, n), uniform, dtype=torch.float64))
    h = torch.tensor([[0.0, 1.0]])
    assert torch.equal(rng.accept(h), h == 1)


@pytest.mark.thorough
@pytest.mark.parametrize("varying", ["stream", "position"])
def test_uniformity(varying: str) -> None:
    """Chi-square of the high bits, of the low bits, and of neighbouring numbers."""
    n = 30_000
    running, fixed = list(range(n)), [17] * n
    u = (uniforms(0, running, fixed) if varying == "stream" else uniforms(0, fixed, running)).numpy()

    def cell(values: np.ndarray, cells: int) -> np.ndarray:
        return (values * cells).astype(int)

    looked_at = {
        "high bits": cell(u, 256),
        "low bits": cell(u * 2**40 % 1, 256),
        "pairs along the index": cell(u[:, 0], 16) * 16 + cell(u[:, 1], 16),
        f"pairs along the {varying}": cell(u[:-1, 2], 16) * 16 + cell(u[1:, 2], 16),
    }
    counts = {subject: np.bincount(cells.ravel(), minlength=256) for subject, cells in looked_at.items()}
    p = {subject: chisquare(count).pvalue for subject, count in counts.items()}
    assert min(p.values()) > 1e-4, p


def test_draws_follow_their_weights() -> None:
    n, weights = 100_000, torch.tensor([0.5, 0.0, 3.0, 1.5], dtype=torch.float64)
    result = CounterRng(5).for_step(range(n), [0] * n, CPU).draw(weights.expand(n, 4))
    counts = result.bincount(minlength=4)
    assert counts[1] == 0
    kept = weights > 0
    assert chisquare(counts[kept].numpy(), (weights[kept] / weights.sum() * n).numpy()).pvalue > 1e-4


edges = st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
weight = st.one_of(
    st.just(0.0),
    st.floats(min_value=0, max_value=1e6, allow_subnormal=True),
    st.sampled_from([5e-324, 1e-300, 1e-30, 1.0]),
)


@settings(deadline=None, max_examples=300)
@given(
    weights=st.lists(weight, min_size=1, max_size=40).filter(lambda w: sum(w) > 0),
    uniform=st.one_of(edges, st.floats(0, 1, exclude_max=True)),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
@example(weights=[1e-300, 0.0], uniform=1 - 2.0**-53, dtype=torch.float64)
def test_inverse_cdf_never_returns_token_of_weight_zero(
    weights: list[float], uniform: float, dtype: torch.dtype
) -> None:
    w = torch.tensor([weights], dtype=torch.float64).to(dtype)
    if w.double().sum() < 1e-300:
        return  # rounded away, or no normal number
    u = torch.tensor([uniform], dtype=torch.float64)
    index = inverse_cdf(w, u, u)
    assert w[0, index] > 0


@settings(deadline=None, max_examples=100)
@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), data=st.data())
def test_inverse_cdf_is_inverse_of_cdf(weights: list[int], data: st.DataObject) -> None:
    """With a uniform in the middle of one of sum(w) equal cells, the answer is known exactly."""
    cell = data.draw(st.integers(0, sum(weights) - 1))
    uniform = torch.tensor([(cell + 0.5) / sum(weights)], dtype=torch.float64)
    want = next(i for i in range(len(weights)) if sum(weights[: i + 1]) > cell)
    assert inverse_cdf(torch.tensor([weights]).float(), uniform, torch.zeros(1)).item() == want


@pytest.mark.parametrize("v", [255, 256, 257, 512, 700])
def test_inverse_cdf_finds_block_and_token_in_it(monkeypatch: pytest.MonkeyPatch, v: int) -> None:
    """Whole numbers, so that every running sum is exact: just inside both ends of every token's share."""
    monkeypatch.setattr("crossdraft.framework.contracts.rng.SMALL", 0)
    weights = torch.randint(0, 4, (v,), generator=torch.Generator().manual_seed(v))
    weights[-1] += 1
    tokens = weights.nonzero().squeeze(1)
    block = tokens // 256
    sums = torch.zeros(int(block[-1]) + 1).index_add_(0, torch.arange(v) // 256, weights.float()).double()
    before = (weights.cumsum(0) - weights)[tokens] - (sums.cumsum(0) - sums)[block]  # inside the block
    for shift in (1e-6, 1 - 1e-6):
        within = (before + shift * weights[tokens]) / sums[block]
        for edge in (1e-6, 1 - 1e-6):
            uniform = (sums.cumsum(0)[block] - (1 - edge) * sums[block]) / sums.sum()
            assert torch.equal(inverse_cdf(weights.float().expand(len(tokens), v), uniform, within), tokens)


def test_draws_use_distinct_numbers() -> None:
    """Two numbers a draw, neither of them one that another draw or coin of the step uses."""
    numbers = CounterRng(0).for_step([3], [5], torch.device("cpu"))
    weights = torch.rand(1, 5000, generator=torch.Generator().manual_seed(0))
    numbers.draw(weights)
    table = numbers.table(16)
    assert table.shape == (2 * len(PURPOSES), 1, 16) and len(table.unique()) == table.numel()
    own = table[PURPOSES.index("residual"), :, 0], table[len(PURPOSES) + PURPOSES.index("residual"), :, 0]
    repeat = CounterRng(0).for_step([3], [5], torch.device("cpu"))
    assert torch.equal(repeat.draw(weights), inverse_cdf(weights, *own))


@pytest.mark.parametrize("indices", [[0, 1, 2], [1, 4, 7], [5, 2, 9]])
@pytest.mark.parametrize("v", [9, 700, 5000])
def test_several_draws_at_once_are_same_draws(indices: list[int], v: int) -> None:
    weights = torch.rand(4, 3, v, generator=torch.Generator().manual_seed(v)) ** 9
    one, other, slow = (CounterRng(1).for_step(range(4), [3] * 4, CPU) for _ in range(3))
    drawn = draw_each(one, weights, "draft", indices)
    separate = [other.draw(column, "draft", index) for column, index in zip(weights.unbind(1), indices, strict=True)]
    assert torch.equal(drawn, torch.stack(separate, 1))
    assert torch.equal(drawn, draw_each(Plain(slow), weights, "draft", indices))
    with pytest.raises(ValueError, match="already used this step"):
        draw_each(one, weights, "draft", indices)


def test_one_of_two_draws_is_that_draw() -> None:
    weights = torch.rand(4, 5000, generator=torch.Generator().manual_seed(2)) ** 9
    which = torch.tensor([True, False, False, True])
    one, other = (CounterRng(1).for_step(range(4), [3] * 4, CPU) for _ in range(2))
    drawn = one.draw_either(which, weights, ("residual", 2), ("other", 0))
    assert torch.equal(drawn, torch.where(which, other.draw(weights, "residual", 2), other.draw(weights, "other", 0)))
    with pytest.raises(ValueError, match="already used this step"):
        one.draw(weights, "other", 0)


@pytest.mark.parametrize("before", [0, 3, 40])
def test_some_rows_have_numbers_of_whole_batch(before: int) -> None:
    whole = CounterRng(1).for_step(range(5), [3, 4, 5, 6, 7], CPU)
    for index in range(before):
        whole.uniform("draft", index, 1)
    part = whole.of_rows(slice(1, 3))
    assert torch.equal(part.uniform("accept", 5, 20), whole.uniform("accept", 5, 20)[1:3])
    if before:
        with pytest.raises(ValueError, match="already used this step"):
            part.uniform("draft", 0, 1)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 999), n=st.integers(0, 6), low=st.floats(0, 1))
def test_first_successful_coin(seed: int, n: int, low: float) -> None:
    h = torch.rand(5, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * low
    one, other, slow = (CounterRng(seed).for_step(range(5), [0] * 5, CPU) for _ in range(3))
    outputs = other.accept(h).tolist()
    want = [row.index(True) if True in row else n for row in outputs]
    assert first_accepted(one, h).tolist() == want == first_accepted(Plain(slow), h).tolist()


class Plain:
    """A random source with only the two required methods."""

    def __init__(self, rng: Any):
        self.accept, self.draw = rng.accept, rng.draw
