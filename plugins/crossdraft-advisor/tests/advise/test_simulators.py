"""Settings of simulators, played out as each of them reads its numbers."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor import Acceptance, Schedule
from crossdraft_advisor.engines.engine import Range, Settings
from engine_schemas import words

from crossdraft import UsageError
from crossdraft.framework import plugins
from crossdraft.framework.metrics.intervals import Estimate

MARGINAL = (0.8, 0.57, 0.37, 0.23)


def schedule(gamma: int = 4, **about: Any) -> Schedule:
    known = {"drafter": "mtp", "verifier": "token", "temperature": 1.0, "drafts": 100.0}
    marginal = MARGINAL if gamma <= 4 else tuple(0.8**i for i in range(1, gamma + 1))
    acceptance = Acceptance(marginal[:gamma], "here", refusal="", **(known | about))
    return Schedule(acceptance, (Range(1, 64, gamma),), {1: Estimate(1.5)})


def exported(name: str, request: Schedule) -> tuple[Any, Settings]:
    """Options as the simulator parses them, which refuses others, and the settings."""
    settings = plugins.get("engines", name)().export(request)
    parser = argparse.ArgumentParser(exit_on_error=False)
    if name == "aiconfigurator":
        parser.add_argument("--nextn", type=int)
        parser.add_argument("--nextn-accepted", type=float)
    elif name == "dynamo-mocker":
        parser.add_argument("--aic-nextn", type=int, choices=range(1, 6))
        parser.add_argument("--aic-nextn-accept-rates", type=lambda text: [float(rate) for rate in text.split(",")])
    else:
        parser.add_argument("--method", choices=("mtp", "eagle3", "dspark"))
        parser.add_argument("--num-speculative-tokens", type=int)
        parser.add_argument("--draft-model")
        parser.add_argument("--spec-decode-acceptance-length", type=float)
    return parser.parse_args(words(settings.text)), settings


@pytest.mark.parametrize("gamma", [1, 3, 4])
def test_aiconfigurator_reads_the_mean_without_bonus(gamma: int) -> None:
    options, settings = exported("aiconfigurator", schedule(gamma))
    assert options.nextn == gamma and 0 <= options.nextn_accepted <= gamma
    assert options.nextn_accepted == pytest.approx(sum(MARGINAL[:gamma]), abs=1e-3)
    assert not any("MTP layers" in remark for remark in settings.remarks)
    _, other = exported("aiconfigurator", schedule(gamma, drafter="eagle3"))
    assert any("not as eagle3" in remark for remark in other.remarks)


@pytest.mark.parametrize("gamma", [1, 3, 4])
def test_mocker_draws_the_measured_distribution(gamma: int) -> None:
    """A token is drawn only if all before it were accepted, as the mocker does."""
    options, _ = exported("dynamo-mocker", schedule(gamma))
    rates = np.array(options.aic_nextn_accept_rates)
    assert options.aic_nextn == len(rates) == gamma
    draws = np.random.default_rng(0).random((100_000, gamma)) < rates
    accepted = np.cumprod(draws, 1)
    assert accepted.mean(0) == pytest.approx(np.array(MARGINAL[:gamma]), abs=0.006)
    spread = schedule(gamma).acceptance.spread()
    assert accepted.sum(1).std() == pytest.approx(spread, abs=0.01)


def test_mocker_has_at_most_five_tokens() -> None:
    options, settings = exported("dynamo-mocker", schedule(6))
    assert options.aic_nextn_accept_rates == pytest.approx([0.8] * 5, rel=0.01)
    assert "the advice is 6" in settings.remarks[0]


def test_atom_forces_the_length_with_bonus() -> None:
    options, settings = exported("atom-synthetic", schedule())
    assert (options.method, options.num_speculative_tokens, options.draft_model) == ("mtp", 4, None)
    assert options.spec_decode_acceptance_length == pytest.approx(1 + sum(MARGINAL), abs=0.01)
    assert "accepts 1 tokens or, with probability 0.97, 2" in settings.remarks[1]
    options, _ = exported("atom-synthetic", schedule(drafter="eagle3", model="org/head"))
    assert (options.method, options.draft_model) == ("eagle3", "org/head")
    with pytest.raises(UsageError, match="require the draft model of eagle3"):
        exported("atom-synthetic", schedule(drafter="eagle3"))


@pytest.mark.parametrize("name", ["aiconfigurator", "dynamo-mocker", "atom-synthetic"])
def test_drafts_of_no_tokens_need_no_settings(name: str) -> None:
    request = Schedule(schedule().acceptance, (Range(1, 64, 0),), {})
    assert plugins.get("engines", name)().export(request).text == ""
