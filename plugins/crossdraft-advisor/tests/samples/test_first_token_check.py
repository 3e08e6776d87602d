"""Distribution of the first token on a real model: valid verifiers pass, wrong ones and the control are rejected."""

from typing import Any

import pytest
import torch
from crossdraft_advisor.samples import first_token_check
from crossdraft_advisor.samples.first_token_check import (
    Case,
    Fit,
    PromptDistributions,
    check_counts,
    choose,
    first_token,
    goodness_of_fit,
    sample,
)
from scipy.stats import chisquare
from wrong_verifiers import AcceptsAll, Inverted, NoResidual

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft, Verdict
from crossdraft.framework.contracts.draft_kind import DETERMINISTIC
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.errors import ContractError

#: Two distributions over ten tokens; each has a token of probability 0 that the other has not, and both the last.
P = torch.tensor([0.30, 0.20, 0.15, 0.12, 0.08, 0.08, 0.05, 0.02, 0.0, 0.0], dtype=torch.float64)
Q = torch.tensor([0.10, 0.25, 0.30, 0.02, 0.08, 0.12, 0.00, 0.08, 0.05, 0.0], dtype=torch.float64)


def case(verifier: str | type, draft: str = "chain", gamma: int = 1) -> Case:
    (result,), _ = choose(["token"] if isinstance(verifier, type) else [verifier], [draft], gamma)
    return result if isinstance(verifier, str) else Case(result.draft, result.drafter, result.config, verifier)


def counted(*cases: Case, samples: int = 20_000, p: torch.Tensor = P, q: torch.Tensor = Q, **more: Any) -> list:
    result = sample(p, q, cases, samples, rng=CounterRng(5), **more)
    assert all(int(counts.sum()) == samples for counts in result)
    return [
        check_counts(item, counts, PromptDistributions("", 1, p, q)) for item, counts in zip(cases, result, strict=True)
    ]


# -- distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verifier, draft",
    [
        ("greedy-block", "chain"),
        pytest.param("token", "point-mass", marks=pytest.mark.slow),
        ("specinfer", "iid-2"),
        pytest.param("spectr", "iid-2", marks=pytest.mark.slow),
        pytest.param("multipath-block", "iid-2", marks=pytest.mark.slow),
        pytest.param("traversal", "iid-3", marks=pytest.mark.slow),
        ("sample-match", "tree-top-2-1"),
        pytest.param("specinfer", "tree-wor-2-1", marks=pytest.mark.slow),
        pytest.param("greedy-draft-optimal", "tree-greedy-2-1", marks=pytest.mark.slow),
    ],
)
def test_lossless_rules_pass_and_control_is_rejected(verifier: str, draft: str) -> None:
    (result,) = counted(case(verifier, draft))
    assert result.target.p_value > 1e-3
    assert result.target.sd < 3 * result.target.expected_sd
    assert result.control.p_value < 1e-12
    assert result.verdict == "yes" and not result.bad


@pytest.mark.slow
def test_hundred_thousand_samples() -> None:
    for result in counted(case("token"), case("block"), samples=100_000):
        assert result.target.p_value > 1e-3
        assert result.target.sd < 3 * result.target.expected_sd
        assert result.control.p_value == 0


@pytest.mark.parametrize("verifier, draft", [("block", "chain"), ("traversal", "iid-2"), ("spectr", "iid-3")])
def test_longer_drafts(verifier: str, draft: str) -> None:
    """Block verifiers use later tokens to decide the first: its distribution must be P_0 nevertheless."""
    (result,) = counted(case(verifier, draft, gamma=3))
    assert result.target.p_value > 1e-3


def test_one_batch_or_many(monkeypatch: Any) -> None:
    """Each sample has its own stream, so where batches end changes nothing."""
    cases = [case("token"), case("spectr", "iid-2")]
    at_once, in_parts = (sample(P, Q, cases, 5000, rng=CounterRng(1), batch=b) for b in (5000, 777))
    assert all(torch.equal(a, b) for a, b in zip(at_once, in_parts, strict=True))
    monkeypatch.setattr(first_token_check, "BATCH_BYTES_CPU", 1)  # smaller than a single row
    assert torch.equal(sample(P, Q, cases[:1], 20, rng=CounterRng(1))[0].sum(), torch.tensor(20))


def test_prompts_get_numbers_of_their_own() -> None:
    one, other, repeat = (
        sample(P, Q, [case("token")], 3000, rng=CounterRng(1), first_stream=first)[0] for first in (0, 3000, 0)
    )
    assert torch.equal(one, repeat)
    assert not torch.equal(one, other)


def test_impossible_tokens_have_no_effect() -> None:
    """Left out of the vocabulary or not, wherever they stand: the same samples."""
    place = torch.tensor([3, 5, 6, 7, 20, 21, 30, 33, 47, 49])
    p, q = (torch.zeros(60, dtype=torch.float64).scatter_(0, place, probs) for probs in (P, Q))
    for item in (case("token"), case("multipath-block", "iid-2"), case("specinfer", "tree-wor-2-1")):
        (dense,) = sample(P, Q, [item], 5000, rng=CounterRng(2))
        (sparse,) = sample(p, q, [item], 5000, rng=CounterRng(2))
        assert torch.equal(sparse[place], dense)
        assert int(sparse.sum()) == 5000


def test_rules_see_only_possible_tokens() -> None:
    widths = set()

    class Looks(plugins.get("verifiers", "token")):
        def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
            assert draft.q is not None
            widths.add((p.shape[2], draft.q.shape[2]))
            return super().verify(draft, p, rng)

    sample(P, Q, [case(Looks)], 10, rng=CounterRng(0))
    assert widths == {(9, 9)}


# -- what must be seen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [Inverted, NoResidual])
def test_wrong_rules_are_rejected(wrong: type) -> None:
    (result,) = counted(case(wrong))
    assert result.target.p_value < 1e-12
    assert result.verdict == "NO" and result.bad


def test_rule_that_parrots_drafter_is_seen_twice() -> None:
    (result,) = counted(case(AcceptsAll))
    assert result.target.p_value == 0  # it outputs a token that the target never outputs
    assert result.control.p_value > 1e-3
    assert result.verdict == "NO" and result.bad


def test_equal_distributions_are_inconclusive() -> None:
    (result,) = counted(case("token"), samples=2000, q=P)
    assert result.verdict == "unknown: the control is not rejected" and result.bad
    assert result.as_json()["target_kept"] is None


def test_invalid_tokens_are_errors() -> None:
    class Outside(AcceptsAll):
        def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
            return Verdict(torch.zeros_like(draft.count), torch.full_like(draft.count, p.shape[2]))

    with pytest.raises(ContractError, match="'accepts-all' emitted an invalid token"):
        sample(P, Q, [case(Outside)], 10, rng=CounterRng(0))


# -- pieces --------------------------------------------------------------------------------------------------


def test_first_token() -> None:
    chain = Draft.chain(torch.tensor([[4, 5], [6, 7]]), torch.tensor([2, 2]))
    zero_one = Verdict(torch.tensor([0, 1]), torch.tensor([8, 9]))
    assert first_token(chain, zero_one).tolist() == [8, 6]
    assert first_token(Draft.empty(2), zero_one).tolist() == [8, 9]
    children = torch.full((2, 2), -1)
    tree = Draft(chain.tokens, children, torch.ones(2, 2, dtype=torch.bool), kind=DETERMINISTIC)
    younger = Verdict(torch.tensor([1, 0]), torch.tensor([8, 9]), path=torch.tensor([[1, -1], [-1, -1]]))
    assert first_token(tree, younger).tolist() == [5, 9]


def test_chi_square_is_scipys() -> None:
    counts = torch.tensor([480, 310, 205, 3, 2])
    probs = torch.tensor([0.5, 0.3, 0.194, 0.0035, 0.0025])
    fit = goodness_of_fit(counts, probs)  # 3.5 + 2.5 are expected in the last two cells, which are pooled
    theirs = chisquare([480, 310, 205, 5], [500, 300, 194, 6])
    assert fit.chi_square == pytest.approx(theirs.statistic, rel=1e-5)
    assert fit.p_value == pytest.approx(theirs.pvalue, rel=1e-5)
    assert fit.degrees_of_freedom == 3
    off = torch.tensor([-0.02, 0.01, 0.011, -0.0005, -0.0005])
    assert fit.sd == pytest.approx(float(off.square().mean().sqrt()), rel=1e-5)
    assert fit.expected_sd == pytest.approx(float((probs * (1 - probs) / 1000).mean().sqrt()), rel=1e-5)


def test_many_cells() -> None:
    """The incomplete gamma function is right at the sizes a vocabulary has, far into the tail."""
    probs = torch.full((20_000,), 1 / 20_000, dtype=torch.float64)
    counts = torch.full((20_000,), 20).index_add(0, torch.arange(10_000), torch.tensor([1, -1]).repeat(5000) * 6)
    fit, theirs = goodness_of_fit(counts, probs), chisquare(counts.numpy())
    assert fit.chi_square == pytest.approx(18_000)
    assert fit.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    lopsided = counts + torch.arange(20_000) % 8
    assert goodness_of_fit(lopsided, probs).p_value == pytest.approx(chisquare(lopsided.numpy()).pvalue, rel=1e-6)


@pytest.mark.parametrize(
    "counts, probs, expected",
    [
        ([90, 10, 0], [0.9, 0.1, 0.0], (0.0, 1, 1.0)),  # an impossible token that never came
        ([90, 9, 1], [0.9, 0.1, 0.0], (float("inf"), 1, 0.0)),  # .. and one that came
        ([4, 0], [1.0, 0.0], (0.0, 0, 1.0)),  # a single cell tests nothing
        ([60, 40], [0.98, 0.02], (0.0, 0, 1.0)),  # two expected: they join the only other cell
    ],
)
def test_chi_square_at_edges(counts: list[int], probs: list[float], expected: tuple) -> None:
    fit = goodness_of_fit(torch.tensor(counts), torch.tensor(probs, dtype=torch.float64))
    assert (fit.chi_square, fit.degrees_of_freedom, fit.p_value) == pytest.approx(expected)


def test_infinity_is_not_valid_json() -> None:
    assert Fit(0.1, 0.1, float("inf"), 3, 0.0).as_json()["chi_square"] is None


def test_drafts_by_verifier() -> None:
    cases, skipped = choose(None, None, 1)
    drafts = {item.verifier.name: item.draft for item in cases}
    assert len(drafts) == len(cases), "one pair a verifier"
    some = {"token": "chain", "block": "chain", "spectr": "iid-2", "greedy-draft-optimal": "tree-greedy-2-1"}
    assert some.items() <= drafts.items()
    assert "greedy" not in drafts and not skipped
    cases, skipped = choose(["greedy"], None, 1)
    assert not cases and "needs temperature 0" in skipped[0]
    cases, skipped = choose(["token", "spectr"], ["chain", "iid-2"], 4)
    assert [(item.verifier.name, item.draft) for item in cases] == [
        ("token", "chain"),
        ("spectr", "chain"),
        ("spectr", "iid-2"),
    ]
    assert {item.config.gamma for item in cases} == {4}
    cases, skipped = choose(["token"], ["iid-2"], 1)
    assert not cases and "'token' accepts only: chain" in skipped[0]
