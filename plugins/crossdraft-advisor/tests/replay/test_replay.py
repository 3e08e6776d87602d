"""Candidates side by side along responses: sums by prompt, several sequences, drawn lengths, what is paired."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_advisor.engines.acceptance import Acceptance
from crossdraft_advisor.replay import replay as module
from crossdraft_advisor.replay.acceptance_formulas import survival
from crossdraft_advisor.replay.aggregate import PromptGroups, Tally, difference
from crossdraft_advisor.replay.replay import Candidate, replay, verifiers_for
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.replay.step_chain import StepAcceptance, expected_steps
from crossdraft_advisor.replay.teacher_forcing.iid_chains import sums
from crossdraft_advisor.replay.teacher_forcing.scoring import DraftScores, shifted_windows

from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ContractError, UsageError
from crossdraft.framework.metrics.cell_metrics import StepRecord, paired_difference

V, DEPTH = 5, 4


def responses(n: int) -> list[Response]:
    random = np.random.default_rng(0)
    return [
        Response(str(i % 7), "ab"[i % 7 % 2], [0], random.integers(0, V, 3 + i % 9).tolist(), ended=bool(i % 2))
        for i in range(n)
    ]


def probs(tokens: list[int], seed: int) -> torch.Tensor:
    """``[T, V]``: distributions of a model, conditioned on the last token only."""
    rows = torch.randn(V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).softmax(-1)
    return rows[torch.tensor([0, *tokens[:-1]])]


def forced_one(response: Response) -> DraftScores:
    p, q = probs(list(response.tokens), 1), probs(list(response.tokens), 2)
    result = sums(p, q, torch.tensor(response.tokens), 3)
    return DraftScores(
        shifted_windows(np.log(result.q), DEPTH), np.full(len(response.tokens), DEPTH), np.log(result.p), result
    )


def scores(texts: Iterable[Response]) -> Iterator[DraftScores]:
    return map(forced_one, texts)


def candidate(verifiers: dict[str, tuple[int, ...]], **options: Any) -> Candidate:
    return Candidate("it", (object, None), verifiers, (1, 2, DEPTH), options.pop("scores", scores), **options)


def test_sums_are_those_of_each_response(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "WINDOW", 5)
    texts = responses(14)
    result = replay(iter(texts), [candidate({"token": (1,), "block": (1,)}), candidate({"spectr": (1, 3)})])
    assert (result.responses, result.tokens) == (14, sum(len(item.tokens) for item in texts))
    for item in result.candidates:
        for (rule, k), tally in item.tallies.items():
            at_least = [survival(rule, forced_one(text), [k])[k] for text in texts]
            lengths = [np.full(len(text.tokens), DEPTH) for text in texts]
            arguments = [
                StepAcceptance(*values) for values in zip(at_least, lengths, [t.limit for t in texts], strict=True)
            ]
            whole = expected_steps(arguments, [1, 2, DEPTH])
            for column, gamma in enumerate((1, 2, DEPTH)):
                row = tally.row(gamma)
                assert row.steps == pytest.approx(whole.steps[:, column].sum())
                assert row.drafted == pytest.approx(k * whole.drafted[:, column].sum())
                assert row.target_rows == pytest.approx(row.drafted + row.steps)
                counted = whole.counted[:, column].sum()
                assert row.block_efficiency is not None
                assert row.block_efficiency.value == pytest.approx(whole.emitted[:, column].sum() / counted)
                assert row.marginal == pytest.approx(whole.accepted[:, column, :gamma].sum(0) / counted)
                assert np.prod(row.conditional) == pytest.approx(row.marginal[-1])
                parts = [tally.row(gamma, name) for name in tally.categories]
                assert sum(part.steps for part in parts) == pytest.approx(row.steps)
                assert sum(part.drafted for part in parts) == pytest.approx(row.drafted)
    both = result.candidates[1].tallies
    assert both["spectr", 3].row(2).steps < both["spectr", 1].row(2).steps
    assert both["spectr", 1].row(2).steps == pytest.approx(result.candidates[0].tallies["token", 1].row(2).steps)


def test_differences_are_paired_by_prompt() -> None:
    """Pairing as in a run; with certain acceptance, equal records."""
    texts = [Response(str(i // 2), "all", [0], [1] * (8 + i % 3), ended=True) for i in range(12)]

    def certain(period: int) -> Any:
        def scores_of(inputs: Iterable[Response]) -> Iterator[DraftScores]:
            for one in inputs:
                t = len(one.tokens)
                agrees = (np.arange(t)[:, None] + np.arange(DEPTH)) % period > 0
                yield DraftScores(np.where(agrees, 0.0, -np.inf), np.full(t, DEPTH), np.zeros(t))

        return scores_of

    result = replay(texts, [candidate({"token": (1,)}, scores=certain(period)) for period in (3, 4)])
    records: list[list[StepRecord]] = [[], []]
    for i, period in enumerate((3, 4)):
        for n, text in enumerate(texts):
            at = 0
            while at < len(text.tokens):
                tau = next(j for j in range(3) if j == 2 or at + j >= len(text.tokens) or (at + j) % period == 0)
                emitted = min(tau + 1, len(text.tokens) - at)
                records[i].append(StepRecord(int(text.id), text.id, "all", n % 2, 0, tau, emitted, 2, 2, 99))
                at += emitted
    expected = paired_difference(records[0], records[1])
    one, other = (c.tallies["token", 1] for c in result.candidates)
    assert expected is not None and expected.low is not None and expected.value != 0
    own = difference(one, 2, other, 2)
    assert own is not None
    assert (own.value, own.low, own.high) == pytest.approx((expected.value, expected.low, expected.high))


def test_acceptance_of_equal_probabilities_is_valid() -> None:
    """The first token is always accepted, the second and third together: their sums may differ by rounding only."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        tally, size = Tally(PromptGroups(), [3], by_prompt=True), 30
        at_least = np.repeat(draw.random((size, 1)), 3, 1)
        at_least[:, 0] = 1
        steps = expected_steps([StepAcceptance(at_least, np.full(size, 3), None)], [3])
        tally.add(steps, [tally.groups.number("all", "a")])
        acceptance = Acceptance.from_rows(tally.by_prompt(3).tolist(), "responses")
        assert acceptance.marginal == pytest.approx(tally.row(3).marginal)


def test_sampled_draft_lengths() -> None:
    texts = responses(5)
    usual = replay(texts, [candidate({"token": (1,)})]).candidates[0].tallies["token", 1].row(DEPTH)
    shorter = candidate({"token": (1,)}, lengths=lambda texts: (np.ones(len(item.tokens), dtype=int) for item in texts))
    drawn = replay(texts, [shorter]).candidates[0].tallies["token", 1].row(DEPTH)
    assert drawn.block_efficiency == usual.block_efficiency and drawn.drafted < usual.drafted


def test_drafter_that_gives_too_little_is_named() -> None:
    short = candidate({"token": (1,)}, scores=lambda texts: iter([forced_one(responses(1)[0])]))
    with pytest.raises(ContractError, match="'it' returned 1 drafts for 2 responses"):
        replay(responses(2), [short])
    with pytest.raises(UsageError, match="do not contain a response to replay"):
        replay([], [candidate({"token": (1,)})])


def test_compatible_verifiers() -> None:
    from crossdraft.framework.api.build import configured

    chain = configured("drafters", {"name": "draft-model", "model": "x"})
    iid = configured("drafters", {"name": "draft-model-iid", "model": "x", "K": 3})
    lookup = configured("drafters", "prompt-lookup")
    warm, cold = Sampling(), Sampling(temperature=0)
    assert verifiers_for("it", chain, [], [1], warm) == {"token": (1,), "block": (1,)}
    assert verifiers_for("it", chain, [], [1], cold) == {"greedy": (1,)}
    assert verifiers_for("it", lookup, [], [1], warm) == {"token": (1,)}
    assert verifiers_for("it", iid, [], [2, 3], warm) == dict.fromkeys(("specinfer", "spectr", "sample-match"), (2, 3))
    with pytest.raises(UsageError, match="accepts only: chain"):
        verifiers_for("it", iid, ["block"], [2], warm)
