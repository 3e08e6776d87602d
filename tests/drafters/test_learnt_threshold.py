"""A threshold that is learnt from what was accepted, and a length that follows from the number of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from crossdraft.drafters.autoregressive.learnt_threshold import LearntThresholdLength, best_threshold
from crossdraft.drafters.draft_model.draft_model import DraftModelChain
from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import TOLERANCE, certify
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.contracts.drafter import DraftContext
from crossdraft.framework.contracts.sampling import Sampling


def policy(**options: Any) -> LearntThresholdLength:
    return LearntThresholdLength(**{"gamma": 4, "batch_size": 1, "start": 0.4, "window": 100, **options})


def step_of(length: LearntThresholdLength, probabilities: list[list[float]], taus: list[int]) -> None:
    """A step in which token i of each row had ``probabilities[row][i]``, most of them drafted."""
    expected = length.draft_lengths([4] * len(taus), len(taus))
    for column in zip(*probabilities, strict=True):
        q = torch.tensor([[p, 1 - p] for p in column], dtype=torch.float64)
        length.should_continue(q.log(), q, torch.zeros(len(taus), dtype=torch.long))
    length.observe(taus, expected)


def test_by_hand() -> None:
    """Accepted: 0.9, 0.8, 0.5, 0.45; rejected: 0.6, 0.55, 0.42. The best cut is at 0.45: tpr 1, fpr 2/3."""
    length = policy()
    step_of(length, [[0.9, 0.8, 0.6]], [2])  # the third was rejected
    assert length.threshold == 0.4, "three tokens are too few"
    step_of(length, [[0.5, 0.55, 0.9]], [1])  # tokens after the first rejection do not count: not the 0.9
    assert length.threshold == 0.4, "five are still too few"
    step_of(length, [[0.45, 0.42]], [1])
    assert length.threshold == 0.45
    for cut, want in ((0.9, 0 + 3 * 3 / 4), (0.5, 2 / 3 + 3 / 4), (0.45, 2 / 3), (0.42, 1.0)):
        accepted, rejected = np.array([0.9, 0.8, 0.5, 0.45]), np.array([0.6, 0.55, 0.42])
        assert (rejected >= cut).mean() + 3 * (accepted < cut).mean() == pytest.approx(want)
    length.reset()
    assert length.threshold == 0.4


def test_accepted_last_token_counts_only_as_accepted() -> None:
    """If a row's only token was accepted, no later token of the row is counted."""
    length = policy()
    step_of(length, [[0.3, 0.9], [0.8, 0.2]], [1, 2])
    assert list(length._judged) == [(0.3, True), (0.8, True), (0.2, True)]


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=2, max_size=40))
def test_best_threshold_is_best_of_all(outcomes: list[tuple[int, bool]]) -> None:
    probabilities, matches = np.array([p / 20 for p, _ in outcomes]), np.array([m for _, m in outcomes])
    if matches.all() or not matches.any():
        return

    def cost(cut: float) -> float:
        above = probabilities >= cut
        return (above & ~matches).sum() / (~matches).sum() + 3 * (1 - (above & matches).sum() / matches.sum())

    result = best_threshold(probabilities, matches)
    assert result in probabilities
    assert all(cost(result) <= cost(cut) + 1e-12 for cut in np.linspace(0, 1.01, 102))


@given(st.data())
def test_as_scikit_learn_has_it(data: Any) -> None:
    """The rule of transformers reads the curve of scikit-learn, if installed."""
    metrics = pytest.importorskip("sklearn.metrics")
    outcomes = data.draw(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=6, max_size=40))
    probabilities, matches = np.array([p / 20 for p, _ in outcomes]), np.array([m for _, m in outcomes])
    if matches.all() or not matches.any():
        return
    fpr, tpr, thresholds = metrics.roc_curve(matches, probabilities)
    costs = fpr + 3 * (1 - tpr)
    assert best_threshold(probabilities, matches) == pytest.approx(thresholds[np.argmin(costs)])


def test_only_last_tokens_count() -> None:
    length = policy(window=10)
    for _ in range(30):
        step_of(length, [[0.9, 0.1]], [1])
    assert len(length._judged) == 10


def build(**options: Any) -> Callable[[DraftContext, int], Any]:
    return lambda context, gamma: DraftModelChain(DraftModelChain.Config(model="toy", gamma=gamma, **options), context)


@pytest.mark.parametrize("toy, rule", [("T0", "token"), ("G2", "block")])
def test_lossless_while_it_learns(toys: dict[str, Toy], toy: str, rule: str, monkeypatch: Any) -> None:
    """By enumeration: the second step's threshold follows from what the first accepted."""
    from crossdraft.drafters.autoregressive import learnt_threshold

    monkeypatch.setattr(learnt_threshold, "ENOUGH", 1)
    options = build(policy={"name": "learnt-threshold", "threshold": 0.45})
    certificate = certify(toys[toy], options, plugins.get("verifiers", rule), steps=2, gamma=[2, 2])
    assert certificate.tv <= TOLERANCE and certificate.coverage.drafted


class Peeks(LearntThresholdLength):
    """Wrong on purpose: the token that made it stop is not kept."""

    keeps_last = False


def test_dropping_token_that_was_looked_at_is_caught(toys: dict[str, Toy], monkeypatch: Any) -> None:
    from crossdraft.drafters.autoregressive import learnt_threshold

    monkeypatch.setattr(learnt_threshold, "LearntThresholdLength", Peeks)
    options = build(policy={"name": "learnt-threshold", "threshold": 0.45})
    assert certify(toys["G2"], options, plugins.get("verifiers", "token"), steps=1, gamma=2).tv > 1e-3


def test_threshold_persists_across_prompts(tiny_model: Callable, decoder: Callable) -> None:
    loop = decoder(
        tiny_model("llama"), DraftModelChain, {"model": "noisy", "gamma": 5, "policy": "learnt-threshold"},
        plugins.get("verifiers", "token"), batch_size=2, drafting=tiny_model("llama", noise=0.05), temperature=1.0,
        max_new_tokens=20,
    )  # fmt: skip
    list(loop.run([[5], [7, 8, 9]]))
    threshold = loop.drafter.policy.threshold
    assert threshold != 0.4
    loop.start(0, [5, 6])
    assert loop.drafter.policy.threshold == threshold
    loop.abandon()
    loop.drafter.reset()
    assert loop.drafter.policy.threshold == 0.4


def test_remembers_depends_on_policy() -> None:
    for name, remembers, adapts in (
        ("static", False, False),
        ("confidence", False, False),
        ("heuristic", False, True),
        ("learnt-threshold", True, True),
        ({"name": "batch-size", "lengths": [[1, 2]]}, True, True),
    ):
        config = DraftModelChain.Config(model="m", policy=name)
        assert DraftModelChain.remembers(config) is remembers
        assert DraftModelChain.traits(config, Sampling()).adapts is adapts


# -- batch-size ----------------------------------------------------------------------------------------------


def test_length_depends_on_occupied_slots(tiny_model: Callable, decoder: Callable) -> None:
    """Three slots; prompts run out, so that two and then one sequence are left, and drafts grow longer."""
    events: list[tuple[int, int]] = []
    loop = decoder(
        tiny_model("llama"),
        DraftModelChain,
        {"model": "same", "gamma": 4, "policy": {"name": "batch-size", "lengths": [[1, 4], [2, 1], [3, 0]]}},
        plugins.get("verifiers", "greedy"),
        batch_size=3,
        drafting=tiny_model("llama", noise=0.05),
        on_step=lambda event: events.append((sum(p is not None for p in event.prompts), event.draft.width)),
    )
    for row, maximum in enumerate((3, 9, 30)):
        loop.start(row, [5 + row, 7], row, row, max_new_tokens=maximum)
    while loop.occupied:
        loop.step()
    assert {rows for rows, _ in events} == {1, 2, 3}
    maximum = {1: 4, 2: 1, 3: 0}
    assert all(width <= maximum[rows] for rows, width in events)
    assert all(any(width == maximum[rows] for n, width in events if n == rows) for rows in maximum)


def test_long_gap_without_drafts_is_fed_in_passes_that_fit(tiny_model: Callable, decoder: Callable) -> None:
    """A row that lacks 30 tokens drafts beside one that fills its slot; a slip in what is fed lowers acceptance."""
    policy = {"name": "batch-size", "lengths": [[1, 4], [3, 0]]}
    loop = decoder(
        tiny_model("llama"),
        DraftModelChain,
        {"model": "same", "gamma": 4, "policy": policy},
        plugins.get("verifiers", "greedy"),
        batch_size=3,
        max_length=96,
        drafting=tiny_model("llama", copy="drafting"),
    )
    for row, maximum in enumerate((60, 30, 30)):
        loop.start(row, [5 + row, 7], row, row, max_new_tokens=maximum)
    short = [response for _ in range(30) for response in loop.step()]
    loop.start(1, [3] * 70, 3, 1, max_new_tokens=20)
    long = [response for _ in range(6) for response in loop.step()]
    assert [response.index for response in (*short, *long)] == [1, 2, 3, 0]
    assert all(step.tau == step.nodes for response in long for step in response.steps)


def test_before_schedule_gamma_holds() -> None:
    policy = DraftModelChain.Config(model="m", gamma=6, policy={"name": "batch-size", "lengths": [[4, 2]]}).lengths(8)
    assert [policy.draft_lengths([9], rows) for rows in (1, 3, 4, 8)] == [[6], [6], [2], [2]]
    assert policy.draft_lengths([1], 1) == [1]


@pytest.mark.parametrize(
    "lengths, sentence",
    [
        ([], "do not ascend"),
        ([[2, 1], [1, 3]], r"sequences \[2, 1\], which do not ascend"),
        ([[1, 9]], r"lengths go up to 9, which is more than gamma \(5\)"),
        ([[0, 1]], "greater than or equal to 1"),
        ([[1, -1]], "greater than or equal to 0"),
        ([[1]], "Field required"),
        ([[1, True]], "valid integer"),
    ],
)
def test_invalid_schedule_is_refused(lengths: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        DraftModelChain.Config(model="m", policy={"name": "batch-size", "lengths": lengths})


def test_lossless_by_enumeration(toys: dict[str, Toy]) -> None:
    """One path at a time, because paths are not separate sequences."""
    options = build(policy={"name": "batch-size", "lengths": [[1, 1], [2, 2]]})
    for rule in ("token", "block"):
        assert certify(toys["T0"], options, plugins.get("verifiers", rule), steps=2, gamma=2).tv <= TOLERANCE
