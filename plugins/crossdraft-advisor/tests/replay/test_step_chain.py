"""The recursion over steps: against the certificate's exact expectations, against walking every way, at the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_advisor.replay.acceptance_formulas import survival
from crossdraft_advisor.replay.step_chain import StepAcceptance, expected_steps, tau_distribution
from crossdraft_advisor.replay.teacher_forcing.iid_chains import sums
from crossdraft_advisor.replay.teacher_forcing.scoring import DraftScores
from hypothesis import given
from hypothesis import strategies as st
from replay_fixtures import random_acceptance

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import certify
from crossdraft.framework.certificate.table_lm import Toy

GAMMA = 2


def draft_scores(toy: Toy, output: tuple[int, ...], depth: int, k: int) -> DraftScores:
    last = torch.tensor([toy.vocab_size, *output[:-1]])
    p, q = toy.target[last], toy.drafter[last]
    x = torch.tensor(output)
    log_p, log_q = (probs.gather(1, x[:, None])[:, 0].log().numpy() for probs in (p, q))
    t = np.arange(len(output))
    index = np.minimum(t[:, None] + np.arange(depth), len(output) - 1)
    return DraftScores(log_q[index], np.full(len(output), depth), log_p, sums(p, q, x, k))


def chance(toy: Toy, output: tuple[int, ...]) -> float:
    last = [toy.vocab_size, *output[:-1]]
    return float(np.prod([float(toy.target[a, b]) for a, b in zip(last, output, strict=True)]))


def tau_by_step(toy: Toy, rule: str, k: int, steps: int, gamma: int, survival_of: Callable = survival) -> list[float]:
    """E[tau] of each step, over all outputs long enough that none of them ends a draft."""
    result = np.zeros(steps)
    for output in itertools.product(range(toy.vocab_size), repeat=steps * (gamma + 1)):
        weight = chance(toy, output)
        if not weight:
            continue
        at_least = survival_of(rule, draft_scores(toy, output, gamma, k), [k])[k]
        probs = tau_distribution(at_least, [gamma])[:, 0]
        starts = np.zeros(len(output) + gamma + 2)
        starts[0] = 1
        for i in range(steps):
            result[i] += weight * float(starts[: len(output)] @ at_least.sum(1))
            after = np.zeros_like(starts)
            for t in np.flatnonzero(starts[: len(output)]):
                after[t + 1 : t + gamma + 2] += starts[t] * probs[t]
            starts = after
    return result.tolist()


@pytest.mark.parametrize(
    ("name", "rule", "draft", "k"),
    [
        ("T0", "token", "chain", 1),
        ("D6", "block", "chain", 1),
        ("T0", "sample-match", "chain", 1),
        ("T0", "specinfer", "iid-2", 2),
        ("T0", "spectr", "iid-2", 2),
        ("T0", "sample-match", "iid-2", 2),
        *(
            pytest.param(name, rule, draft, k, marks=pytest.mark.slow)
            for name, rule, draft, k in [
                ("D6", "token", "chain", 1),
                ("T0", "block", "chain", 1),
                ("D6", "sample-match", "chain", 1),
                ("D6", "specinfer", "iid-2", 2),
                ("D6", "spectr", "iid-2", 2),
                ("D6", "sample-match", "iid-2", 2),
                *((name, rule, "iid-3", 3) for name in ("T0", "D6") for rule in ("specinfer", "spectr")),
            ]
        ),
    ],
)
def test_as_certificate_enumerates(toys: Any, drafts: Any, name: str, rule: str, draft: str, k: int) -> None:
    """The real drafter, loop and rule over several steps, every decision enumerated."""
    toy = toys[name]
    gamma, steps = (1, 3) if name == "T0" else (GAMMA, 2) if k < 3 else (1, 2)
    real = certify(toy, drafts[draft], plugins.get("verifiers", rule), steps=steps, gamma=gamma, markov=True)
    assert tau_by_step(toy, rule, k, steps, gamma) == pytest.approx(real.expected_tau, abs=1e-9)


def test_another_rules_identity_is_found_out(toys: Any, drafts: Any) -> None:
    """Token's for block, R_i without its running minimum, SpecInfer's for SpecTr."""
    toy = toys["T0"]

    def no_minimum(rule: str, inputs: DraftScores, ks: Any) -> dict[int, np.ndarray]:
        t = np.arange(len(inputs.log_p))[:, None]
        log_r = inputs.log_q - np.concatenate([inputs.log_p, np.zeros(GAMMA)])[t + np.arange(GAMMA)]
        inside = t + np.arange(GAMMA) < len(inputs.log_p)
        return {1: np.where(inside, np.exp(np.minimum(np.cumsum(log_r, 1), 0)), 0)}

    real = certify(toy, drafts["chain"], plugins.get("verifiers", "block"), steps=2, gamma=GAMMA, markov=True)
    for wrong in (tau_by_step(toy, "token", 1, 2, GAMMA), tau_by_step(toy, "block", 1, 2, GAMMA, no_minimum)):
        assert max(abs(a - b) for a, b in zip(wrong, real.expected_tau, strict=True)) > 1e-3
    real = certify(toy, drafts["iid-2"], plugins.get("verifiers", "spectr"), steps=2, gamma=GAMMA, markov=True)
    wrong = tau_by_step(toy, "specinfer", 2, 2, GAMMA)
    assert max(abs(a - b) for a, b in zip(wrong, real.expected_tau, strict=True)) > 1e-4


def walked(one: StepAcceptance, gamma: int) -> dict[str, float]:
    """All ways of walking through a response, one after the other."""
    t, limit = len(one.survival), one.limit or 10**9
    sums = dict.fromkeys(("steps", "drafted", "rows", "counted", "emitted", "idle"), 0.0) | {"ways": 0.0}
    waiting = [(0, 1.0)]
    while waiting:
        at, weight = waiting.pop()
        if at >= t:
            sums["ways"] += weight
            continue
        deepest = min(gamma, limit - at - 1)
        nodes = min(int(one.lengths[at]), deepest)
        counts = limit - at - 1 >= gamma
        sums["steps"] += weight
        sums["drafted"] += weight * nodes
        sums["rows"] += weight * (nodes + 1)
        sums["counted"] += weight * counts
        sums["idle"] += weight * counts * (nodes == 0)
        at_least = [1.0, *one.survival[at][: max(min(deepest, t - at), 0)], 0.0]
        for tau in range(len(at_least) - 1):
            mass = weight * (at_least[tau] - at_least[tau + 1])
            emitted = min(tau + 1, t - at)
            sums["emitted"] += counts * mass * emitted
            if mass:
                waiting.append((at + emitted, mass))
    return sums


@given(
    st.lists(st.tuples(st.integers(1, 7), st.sampled_from([None, 0, 3])), min_size=1, max_size=4), st.integers(0, 99)
)
def test_every_way_through_response(responses: list[tuple[int, int | None]], seed: int) -> None:
    depth, gammas = 3, [1, 3]
    arguments = [
        random_acceptance(seed + i, t, depth, over if over is None else t + over)
        for i, (t, over) in enumerate(responses)
    ]
    result = expected_steps(arguments, gammas)
    for row, item in enumerate(arguments):
        for column, gamma in enumerate(gammas):
            expected = walked(item, gamma)
            assert expected.pop("ways") == pytest.approx(1)
            for key, value in expected.items():
                assert getattr(result, key)[row, column] == pytest.approx(value), key
            assert result.tokens[row, column] == len(item.survival)


def test_batching_does_not_change_result(monkeypatch: Any) -> None:
    arguments = [random_acceptance(i, 1 + 37 * i % 90, 4, None) for i in range(150)]
    batched = expected_steps(arguments, range(1, 5))
    for i in (0, 17, 149):
        separate = expected_steps([arguments[i]], range(1, 5))
        assert batched.steps[i] == pytest.approx(separate.steps[0])
        assert batched.accepted[i] == pytest.approx(separate.accepted[0])
    monkeypatch.setattr("crossdraft_advisor.replay.step_chain.BATCH", 7)
    assert expected_steps(arguments, range(1, 5)).steps == pytest.approx(batched.steps)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafter_that_is_target_has_gamma_and_one(rule: str) -> None:
    """Exactly, in every step that has room; the last one ends with the text."""
    t, depth = 50, 16
    log_p = np.log(np.random.default_rng(0).random(t))
    log_q = np.array([[log_p[min(a + j, t - 1)] for j in range(depth)] for a in range(t)])
    at_least = survival(rule, DraftScores(log_q, np.full(t, depth), log_p))[1]
    cut = expected_steps([StepAcceptance(at_least, np.full(t, depth), t)], range(1, depth + 1))
    ended = expected_steps([StepAcceptance(at_least, np.full(t, depth), None)], range(1, depth + 1))
    for gamma in range(1, depth + 1):
        assert cut.emitted[0, gamma - 1] / cut.counted[0, gamma - 1] == pytest.approx(gamma + 1)
        assert cut.counted[0, gamma - 1] == pytest.approx(t // (gamma + 1))
        assert ended.steps[0, gamma - 1] == pytest.approx(-(-t // (gamma + 1)))
        assert ended.emitted[0, gamma - 1] == pytest.approx(t)
