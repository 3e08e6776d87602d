"""Policies of lengths from one replay of the longest drafts: what the drafter's own policy does, and what runs show."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor.replay import step_chain as length_policies
from crossdraft_advisor.replay.acceptance_formulas import survival
from crossdraft_advisor.replay.step_chain import StepAcceptance, confident, heuristic
from crossdraft_advisor.replay.step_chain import expected_steps as steps_of
from crossdraft_advisor.replay.teacher_forcing.scoring import sample_drafts
from replay_fixtures import Run, configured, making, run, score_drafter

from crossdraft import Drafter
from crossdraft.drafters.autoregressive import policies
from crossdraft.framework.contracts.sampling import Sampling

V, G = 11, 5
PROMPTS = [[5, 6, 7, 5, 6], [9, 8], [3], [1, 2, 1, 2, 1, 2, 3], [4, 0, 10]]
WARM = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def models(tiny_model: Callable) -> tuple[Any, Any]:
    return tuple(tiny_model("llama", vocab_size=V, noise=noise, copy="lengths") for noise in (0.0, 0.3))  # type: ignore[return-value]


def draft_model(**options: Any) -> tuple[Any, Any]:
    return configured("draft-model", model="small", gamma=G, **options)


def unlike(measured: np.ndarray, expected: np.ndarray) -> float:
    """Mean difference in standard errors."""
    off = measured - expected
    return abs(off.mean() / (off.std(ddof=1) / len(off) ** 0.5))


@pytest.mark.parametrize(
    ("temperature", "stop"),
    [
        (0.0, "after"),
        (1.0, "before"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [(0.0, "before"), (1.0, "after")]),
    ],
)
def test_grid_of_thresholds_from_one_replay(
    models: tuple[Any, Any], temperature: float, stop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(temperature=temperature)
    make = making(models[0], sampling, models[1])
    texts = run(make, configured("none"), "token", PROMPTS, new=6).responses
    static = list(score_drafter(draft_model(), texts, make, depth=G, tops=True))
    sizes = set()
    for threshold in (0.3, 0.8):
        policy = {"name": "confidence", "stop": stop, "threshold": threshold}
        results = [list(score_drafter(draft_model(policy=policy), texts, make, depth=G))]
        with monkeypatch.context() as patched:
            patched.setattr(draft_model()[0], "text_distribution", Drafter.text_distribution)
            results.append(list(score_drafter(draft_model(policy=policy), texts, make, depth=G)))
        for longest, *others in zip(static, *results, strict=True):
            assert longest.log_top is not None
            own = confident(longest.log_q if temperature else longest.log_top, threshold)
            if stop == "before":
                own = (np.exp(longest.log_top) >= threshold).cumprod(1).sum(1)
            cells = np.where(np.arange(G) < own[:, None], longest.log_q, -np.inf)
            for item in others:
                # Behind a token that the drafter would not draft, lengths of a text mean nothing.
                assert np.array_equal(np.isneginf(cells), np.isneginf(item.log_q))
                assert np.allclose(np.exp(cells), np.exp(item.log_q), atol=2e-4)
            sizes |= set(own.tolist())
    assert len(sizes) >= 3


@pytest.mark.slow
def test_thresholds_against_run(models: tuple[Any, Any]) -> None:
    """Rounds, and drafted tokens: the latter from drafts of the drafter's own, at another seed."""
    policy = {"name": "confidence", "threshold": 0.2}
    make, drafter = making(models[0], WARM, models[1]), draft_model(policy=policy)
    measured = run(make, drafter, "block", PROMPTS * 14, new=8, rows=70, validate="never")
    static = list(score_drafter(draft_model(), measured.responses, make, depth=G, rows=70, tops=True))
    drawn = list(sample_drafts(draft_model(), measured.responses, make, depth=G, rows=70, seed=5))
    accepted, on_path = [], []
    for longest, own in zip(static, drawn, strict=True):
        assert longest.log_top is not None and own.log_top is not None
        cut = replace(longest, lengths=confident(longest.log_q, 0.2))
        free = confident(own.log_q, 0.2)
        accepted.append(StepAcceptance(survival("block", cut)[1], free, 8))
        on_path.append(replace(accepted[-1], lengths=cut.lengths))
    result = steps_of(accepted, [G])
    assert unlike(measured.counts(), result.steps[:, 0]) < 3
    assert unlike(measured.nodes(), result.drafted[:, 0]) < 3
    # Lengths along the text alone: a draft that leaves it is another one.
    assert unlike(measured.nodes(), steps_of(on_path, [G]).drafted[:, 0]) > 3


def test_heuristic_against_run(models: tuple[Any, Any]) -> None:
    make, drafter = making(models[0], WARM, models[1]), draft_model(policy={"name": "heuristic", "start_length": 2})
    measured: Run = run(make, drafter, "token", PROMPTS * 14, new=12, rows=70, validate="never")
    accepted = [
        StepAcceptance(survival("token", item)[1], item.lengths, 12)
        for item in score_drafter(draft_model(), measured.responses, make, depth=G, rows=70)
    ]
    result = heuristic(accepted, G, 2)
    assert unlike(measured.counts(), result.steps[:, 0]) < 3 and unlike(measured.nodes(), result.drafted[:, 0]) < 3
    for other in (heuristic(accepted, G, 5), steps_of(accepted, [3])):
        assert unlike(measured.nodes(), other.drafted[:, 0]) > 3


@pytest.mark.parametrize("whole", [True, False])
def test_heuristic_is_policys_own(whole: bool) -> None:
    """A drafter that is always right, or never: the lengths are those of `HeuristicLength`, step by step."""
    assert (length_policies.MORE, length_policies.FEWER) == (policies.MORE, policies.FEWER)
    n, gamma = 40, 7
    own, at, drafts = policies.HeuristicLength(gamma, 1, 3), 0, []
    own.start(0)
    while at < n:
        (expected,) = own.draft_lengths([n - 1 - at], 1)
        drafts.append(expected)
        tau = expected if whole else 0
        at += tau + 1
        own.observe([tau], [expected])
    one = StepAcceptance(np.full((n, gamma), float(whole)), np.full(n, gamma), n)
    result = heuristic([one], gamma, 3)
    assert (result.steps[0, 0], result.drafted[0, 0]) == (len(drafts), sum(drafts))
    assert result.accepted[0, 0].sum() == pytest.approx(result.emitted[0, 0] - result.counted[0, 0])


def test_heuristic_that_never_changes_is_static() -> None:
    rng = np.random.default_rng(1)
    responses = [
        StepAcceptance(np.sort(rng.random((n, 1)), 1)[:, ::-1], np.ones(n, dtype=np.int64), limit)
        for n, limit in ((7, 9), (5, 5), (6, None))
    ]
    expected_own, plain = heuristic(responses, 1, 1), steps_of(responses, [1])
    for name in vars(plain):
        assert getattr(expected_own, name) == pytest.approx(getattr(plain, name))


def test_first_unsure_token() -> None:
    q = np.log([[0.9, 0.2, 0.9], [0.9, 0.9, 0.9], [0.1, 0.9, 0.9]])
    assert confident(q, 0.5).tolist() == [2, 3, 1]
