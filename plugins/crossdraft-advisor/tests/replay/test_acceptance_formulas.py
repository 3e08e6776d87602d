"""Every identity against enumeration of all drafts and decisions in exact arithmetic; wrong ones are found out."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import exact_steps as exact
import numpy as np
import pytest
from crossdraft_advisor.replay import acceptance_formulas
from crossdraft_advisor.replay.acceptance_formulas import survival
from crossdraft_advisor.replay.teacher_forcing.iid_chains import ChainSums, sums
from crossdraft_advisor.replay.teacher_forcing.scoring import DraftScores

from crossdraft.framework.errors import NumericalError, UsageError

CLOSE = 1e-12


def draft_scores(p: exact.Model, q: exact.Model, output: tuple[int, ...], k: int = 1) -> DraftScores:
    """Scores of an output whose first steps draft all but its last token."""
    t, logs = len(output), np.full((len(output), len(output)), -np.inf)
    distributions = [[probs(output[:i]) for i in range(t)] for probs in (p, q)]
    for at in range(t):
        for j in range(t - at):  # the drafter looks at the prefix alone
            chance = q(output[: at + j])[output[at + j]]
            logs[at, j] = math.log(chance) if chance else -math.inf
    log_p = np.array([math.log(probs[x]) for probs, x in zip(distributions[0], output, strict=True)])
    rows = [np.array(probs, dtype=float) for probs in distributions]
    return DraftScores(logs, np.full(t, t), log_p, sums(*rows, np.array(output), k))


def pairs(count: int, v: int) -> list[tuple[exact.Model, exact.Model]]:
    results = []
    for seed in range(count):
        p, q = exact.random_model(2 * seed, v), exact.random_model(2 * seed + 1, v)
        results.append((p, exact.mixed(p, q) if seed % 3 == 2 else q))
    return results


def outputs(p: exact.Model, v: int, gamma: int) -> list[tuple[int, ...]]:
    return [o for o in exact.strings(v, gamma + 1) if exact.chance(p, o)]


SIZES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2)]
LARGE = [pytest.param(*size, marks=pytest.mark.slow) for size in [(2, 4), (3, 3)]]


@pytest.mark.parametrize(("v", "gamma"), [*SIZES, *LARGE])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_one_sequence(rule: str, v: int, gamma: int) -> None:
    for p, q in pairs(3, v):
        joint = getattr(exact, rule)(p, q, v, gamma)
        assert sum(joint.values()) == 1
        for output in outputs(p, v, gamma):
            expected = [float(x) for x in exact.given_output(joint, p, output)]
            result = survival(rule, draft_scores(p, q, output))[1][0, :gamma]
            assert result == pytest.approx(expected, abs=CLOSE)


def test_point_mass_is_accepted_as_far_as_it_agrees() -> None:
    """Whatever the rule is."""
    v, gamma = 3, 3
    p = exact.random_model(0, v)
    for draft in list(exact.strings(v, gamma))[::4]:
        joint = exact.point_mass(p, draft, v)
        for output in outputs(p, v, gamma)[::5]:
            expected = [float(x) for x in exact.given_output(joint, p, output)]
            assert expected == [float(draft[:i] == output[:i]) for i in range(1, gamma + 1)]
            logs = np.full((gamma + 1, gamma), -np.inf)
            logs[0] = [0.0 if a == b else -np.inf for a, b in zip(draft, output, strict=False)]
            inputs = DraftScores(logs, np.full(gamma + 1, gamma), draft_scores(p, p, output).log_p)
            for rule in acceptance_formulas.VERIFIERS:
                assert survival(rule, inputs)[1][0].tolist() == expected
            shortcut = acceptance_formulas.point_mass_survival([inputs])
            assert shortcut is not None and shortcut[0][0].tolist() == expected


SEQUENCES = [(2, 1, 3), (2, 2, 2), (3, 1, 2)]
MANY = [pytest.param(*size, marks=pytest.mark.slow) for size in [(2, 1, 4), (2, 2, 3), (2, 3, 2), (3, 1, 3), (3, 2, 2)]]
#: Slack of SpecTr's rho in exact arithmetic over the minimum, large enough that the residual may emit the token of a
#: rejected sequence, which then continues.
SLACK = Fraction(1, 8)
RULES: dict[str, Callable] = {
    "specinfer": exact.specinfer,
    "sample-match": exact.sample_match,
    "spectr": exact.spectr(SLACK),
}


@pytest.mark.parametrize(("v", "gamma", "k"), [*SEQUENCES, *MANY])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_several_sequences_at_every_k_from_one_pass(rule: str, v: int, gamma: int, k: int) -> None:
    ks = range(1, k + 1)
    for p, q in pairs(3, v):
        joints = {item: exact.many(p, q, v, gamma, item, RULES[rule]) for item in ks}
        assert all(sum(joint.values()) == 1 for joint in joints.values())
        for output in outputs(p, v, gamma):
            inputs = draft_scores(p, q, output, k)
            if rule == "spectr":  # with the very rho of the enumeration, which is rational
                inputs = DraftScores(
                    inputs.log_q, inputs.lengths, inputs.log_p, _with_rho(inputs.sums, p, q, output, k)
                )
            result = survival(rule, inputs, ks)
            for item in ks:
                expected = [float(x) for x in exact.given_output(joints[item], p, output)]
                assert result[item][0, :gamma] == pytest.approx(expected, abs=CLOSE)


def _with_rho(sums: ChainSums | None, p: exact.Model, q: exact.Model, output: tuple[int, ...], k: int) -> ChainSums:
    assert sums is not None
    rho, beta = np.empty_like(sums.rho), np.empty_like(sums.beta)
    for t in range(len(output)):
        a, b = p(output[:t]), q(output[:t])
        for s in range(1, k + 1):
            r = exact.valid_rho(a, b, s, SLACK) if s > 1 else Fraction(1)
            rho[t, s - 1], beta[t, s - 1] = r, sum(min(x / r, y) for x, y in zip(a, b, strict=True))
    assert np.all(sums.rho <= rho + 1e-9) and np.all(rho - sums.rho <= float(SLACK) + 1e-9)
    return ChainSums(sums.p, sums.q, sums.c, rho, beta)


@pytest.mark.parametrize(
    "wrong",
    [
        acceptance_formulas.token,  # token's identity for block verification
        lambda log_r: np.exp(np.minimum(np.cumsum(log_r, -1), 0)),  # R_i without the running minimum
    ],
)
def test_wrong_identity_of_block_verification_is_found_out(wrong: Callable) -> None:
    worst = 0.0
    for p, q in pairs(3, 2):
        joint = exact.block(p, q, 2, 3)
        for output in outputs(p, 2, 3):
            expected = np.array([float(x) for x in exact.given_output(joint, p, output)])
            inputs = draft_scores(p, q, output)
            result = wrong(inputs.log_q[0, :3] - inputs.log_p[:3])
            worst = max(worst, float(np.abs(result - expected).max()))
    assert worst > 1e-4


def test_block_accepts_no_less_than_token() -> None:
    logs = np.random.default_rng(0).normal(size=(1000, 16))
    assert np.all(acceptance_formulas.block(logs) >= acceptance_formulas.token(logs) - 1e-15)


def test_unsupported_formulas_raise() -> None:
    inputs = DraftScores(np.full((2, 2), -0.5), np.full(2, 2), np.zeros(2))
    with pytest.raises(UsageError, match=r"'traversal' cannot be replayed.*measure it with crossdraft run"):
        survival("traversal", inputs)
    with pytest.raises(UsageError, match="verifies one sequence, not 2"):
        survival("block", inputs, [2])
    with pytest.raises(UsageError, match=r"needs `DraftScores.sums`"):
        survival("spectr", inputs, [2])


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 0.5])
def test_invalid_logarithms_raise(bad: float) -> None:
    with pytest.raises(NumericalError, match="log P of response token 1"):
        survival("token", DraftScores(np.zeros((2, 2)), np.full(2, 2), np.array([0.0, bad])))
    if bad != -np.inf:
        logs = np.zeros((2, 2))
        logs[0, 1] = bad
        with pytest.raises(NumericalError, match="log Q of drafted token 2 after response token 0"):
            survival("token", DraftScores(logs, np.full(2, 2), np.zeros(2)))
