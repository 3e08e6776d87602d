"""``crossdraft diagnose --counters .. --target ..``: the reading that gives what a server counted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor.diagnosis.hypothesis import not_excluded
from crossdraft_advisor.diagnosis.matching import CONFIGURED, OTHER, UNLISTED, _interval, _outside, match
from crossdraft_advisor.diagnosis.readings import with_continuations
from crossdraft_advisor.diagnosis.report import limits, matched_text
from crossdraft_advisor.diagnosis.signatures import counts_of
from crossdraft_advisor.diagnosis.text_fit import TextFit, in_dtype_of_responses
from crossdraft_advisor.diagnosis.trials import TrialResult
from crossdraft_advisor.engines.acceptance import Acceptance
from crossdraft_advisor.engines.counter_definitions import DEFINITIONS
from crossdraft_advisor.replay.engine_counts import EngineCounts
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.replay.teacher_forcing.lazy_models import Target
from scrapes import scrape, scrape_rates
from tiny_models import argmax_text, save_model

from crossdraft import generate, load_model
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.misconfiguration import Misconfiguration
from crossdraft.framework.contracts.sampling import Sampling

RATES = {"": [0.61, 0.4, 0.25], "a": [0.027, 0.002, 0.0], "b": [0.5, 0.2, 0.05]}


def result(mistake: str, rates: list[float], responses: int = 100) -> TrialResult:
    """A trial whose responses have ten drafts each."""
    counts = EngineCounts(DEFINITIONS["vllm"], len(rates))
    draws = np.random.default_rng(len(mistake)).binomial(10, rates[0], responses)
    for first in draws:
        row = np.array([10.0, *(first * rate / rates[0] for rate in rates)])
        counts.by_response.append(row)
    total = np.sum(counts.by_response, 0)
    counts.drafts, counts.per_position = float(total[0]), total[1:]
    return TrialResult(Misconfiguration(mistake, f"undo {mistake}"), len(rates), counts=counts)


def counted(rates: list[float], drafts: int = 800) -> Acceptance:
    return Acceptance.from_rows([(drafts, *(round(drafts * rate) for rate in rates))], "scrape.txt")


@pytest.mark.parametrize("mistake", RATES)
def test_reading_of_server_is_named(mistake: str) -> None:
    results = [result(name, rates) for name, rates in RATES.items()]
    matched = match(results, counted(RATES[mistake]))
    best = matched.assessments[0]
    assert best.hypothesis.name == (mistake or CONFIGURED)
    estimate = matched.expected(best.hypothesis.name, 1)
    assert estimate.low is not None and estimate.high is not None
    assert estimate.low < RATES[mistake][0] < estimate.high


def test_none_fits_is_an_answer() -> None:
    results = [result(name, rates) for name, rates in RATES.items()]
    best = match(results, counted([0.8, 0.75, 0.74], 5000)).assessments[0]
    assert best.hypothesis.name == UNLISTED and best.share > 0.9
    best = match(results, counted([0.7, 0.02, 0.0], 5000)).assessments[0]
    assert best.hypothesis.name == "the first position only"


def exact(mistake: str, accepted: list[float]) -> TrialResult:
    """A trial of 30 responses with 50 drafts of one token each, of which the numbers in ``accepted`` were accepted."""
    counts = EngineCounts(DEFINITIONS["vllm"], 1)
    counts.by_response = [np.array([50.0, accepted[i % len(accepted)]]) for i in range(30)]
    total = np.sum(counts.by_response, 0)
    counts.drafts, counts.per_position = float(total[0]), total[1:]
    return TrialResult(Misconfiguration(mistake, ""), 1, counts=counts)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("accepted", [[0.0], [5.0, *[0.0] * 29]])
@pytest.mark.parametrize("own", [True, False])
def test_rates_near_zero_have_intervals(accepted: list[float], own: bool) -> None:
    matched = match([exact("", accepted), exact("a", [40.0])], counted([0.0], 500), own=own)
    interval = matched.expected(CONFIGURED, 1)
    assert interval.value == pytest.approx(sum(accepted) / 50 / len(accepted))
    assert interval.low is not None and interval.high is not None
    assert 0 <= interval.low <= interval.value < interval.high < 0.1


def test_greedy_counts_of_the_replayed_responses_are_exact() -> None:
    """Readings that differ by 4 % of the drafts are distinguished on the counted responses, and not on others."""
    results = [exact("", [10, 14, 21]), exact("a", [12, 16, 23])]
    (drafts, accepted) = np.sum(results[1].counts.by_response, 0)  # type: ignore[union-attr]
    source = Acceptance.from_rows([(drafts, accepted)], "scrape.txt")
    own, other = match(results, source), match(results, source, own=False)
    assert own.own and own.named()[0] == "a" and CONFIGURED not in own.named()
    assert not own.unexplained and not other.unexplained
    third = match(results, Acceptance.from_rows([(drafts, accepted - 18)], "scrape.txt"))
    assert third.own and third.unexplained and third.named() == [UNLISTED]
    assert not other.own and set(other.named()) >= {CONFIGURED, "a"}
    results[0].counts.random = True  # type: ignore[union-attr]
    assert match(results, source).assessments[0].share < own.assessments[0].share


def test_other_responses_name_what_they_do_not_distinguish() -> None:
    """A prior is not evidence: a reading with nearly the likelihood of the drafter as configured is named beside it."""
    results = [result(name, [0.3 + shift, 0.1]) for name, shift in (("", 0.0), ("near", 0.01), ("far", -0.2))]
    results += [result(f"lost {i}", [0.01, 0.0]) for i in range(20)]  # the prior of `CONFIGURED` is that of all of them
    matched = match(results, counted([0.31, 0.1], 1000), own=False)
    assert set(matched.named()) == {CONFIGURED, "near"} and matched.named()[0] == CONFIGURED


def test_stated_responses_leave_no_other_explanation() -> None:
    """Counts that no reading gives exactly are those of something else, if the responses are the counted ones."""
    results = [exact("", [10, 14, 21]), exact("a", [2, 3, 4])]
    source = Acceptance.from_rows([(1500, 395)], "scrape.txt")
    assert match(results, source, own=False).named()[0] == CONFIGURED
    for accepted in (395, 432):
        stated = match(results, Acceptance.from_rows([(1500, accepted)], "scrape.txt"), own=True)
        assert stated.own and stated.unexplained and stated.named() == [UNLISTED]


def clustered(mistake: str, rate: float, seed: int, responses: int = 60) -> TrialResult:
    """A trial of responses with rates of their own."""
    counts, rng = EngineCounts(DEFINITIONS["vllm"], 3), np.random.default_rng(seed)
    levels = rng.normal(math.log(rate / (1 - rate)), 0.8, responses)
    passed = rng.random((responses, 12, 3)) < 1 / (1 + np.exp(-levels))[:, None, None]
    accepted = np.cumprod(passed, 2).sum(1)
    counts.by_response = list(np.column_stack([np.full(responses, 12.0), accepted]))
    total = np.sum(counts.by_response, 0)
    counts.drafts, counts.per_position = float(total[0]), total[1:]
    return TrialResult(Misconfiguration(mistake, ""), 3, counts=counts)


def server(result: TrialResult) -> Acceptance:
    assert result.counts is not None
    return Acceptance.from_rows([(result.counts.drafts, *result.counts.per_position)], "scrape.txt")


def test_true_reading_fails_its_test_as_often_as_stated() -> None:
    """Counters and replay are of other responses, whose rates differ; the level of the test is 1 %."""
    failed = 0
    for seed in range(1000):
        theirs = counts_of(server(clustered("", 0.6, 1000 + seed)))
        failed += bool(_outside(theirs, _interval(clustered("", 0.6, 5000 + seed), theirs, OTHER)))
    assert 0 < failed <= 20  # Pr = 0.002 for a level of 1 %


def test_causes_outside_of_the_list_are_not_named_as_one_inside() -> None:
    """Faults of any size, also with the acceptance of a reading: the share of a reading stays below 60 %."""
    rates = {"": 0.7, "a": 0.45, "b": 0.3, "c": 0.1}
    shares, unexplained = [], 0
    for seed, rate in enumerate(np.linspace(0.02, 0.62, 31)):
        results = [clustered(name, own, 10 * seed + i) for i, (name, own) in enumerate(rates.items())]
        matched = match(results, server(clustered("", float(rate), 5000 + seed)), own=False)
        shares.append(max(item.share for item in matched.assessments if item.hypothesis.name in "abc"))
        unexplained += matched.unexplained
        assert UNLISTED in matched.named() or matched.assessments[0].hypothesis.name not in rates
    assert sum(share > 0.6 for share in shares) <= 3 and unexplained >= 5


@pytest.mark.parametrize("own", [True, False])
def test_sentence_does_not_contradict_its_interval(own: bool) -> None:
    """A reading that is named lies inside of its interval at all positions, whatever was counted."""
    results = [clustered(name, rate, i) for i, (name, rate) in enumerate({"": 0.6, "a": 0.55, "b": 0.4}.items())]
    named = 0
    for rate in np.linspace(0.3, 0.7, 41):
        counts = counted([rate, rate**2, rate**3], 700)
        matched = match(results, counts, own=own)
        for name in matched.named():
            for position in (1, 2, 3) if name in matched.results else ():
                interval = matched.expected(name, position)
                assert interval.low is not None and interval.high is not None
                assert interval.low - 1e-9 <= counts.marginal[position - 1] <= interval.high + 1e-9
                named += 1
        text = matched_text(matched)
        assert ("None of the 3 readings" in text) == (not set(matched.named()) & set(matched.results))
    assert named if not own else True


def test_ruled_out_readings_are_not_listed() -> None:
    """The same counters, but other prompts, for which the target does not generate the responses."""
    results = [
        replace(exact("", [10, 14]), texts=TextFit(-3.0, 1.0)),
        replace(exact("a", [10, 14]), texts=TextFit(-442.0, 0.93)),
        replace(exact("b", [10, 14]), texts=TextFit(-900.0, 0.2)),
    ]
    matched = match(results, Acceptance.from_rows([(1500, 360)], "scrape.txt"))
    assert matched.named() == [CONFIGURED]
    foreign = [replace(item, texts=TextFit(-900.0, 0.2)) for item in results]
    assert match(foreign, Acceptance.from_rows([(1500, 360)], "scrape.txt")).unexplained


def test_number_of_responses_that_decide() -> None:
    near, far = ([exact("", [30]), exact("a", [30 + by])] for by in (0.25, 5))
    source = Acceptance.from_rows([(1500, 30 * 30)], "scrape.txt")
    matched = match(near, source)
    assert set(matched.named()) == {CONFIGURED, "a"} and (matched.responses_to_decide() or 0) > 100
    assert match(far, source).named() == [CONFIGURED]
    assert match([exact("", [30]), exact("a", [30])], source).responses_to_decide() is None


def test_texts_are_evidence_for_the_prompts() -> None:
    """Counts do not distinguish the prompts; the responses are what the target gives for those of ``a``."""
    fits = {"": TextFit(-900.0, 0.2), "a": TextFit(-3.0, 1.0), "b": TextFit(-900.0, 0.2)}
    results = [replace(exact(name, [10, 14]), texts=fit) for name, fit in fits.items()]
    source = Acceptance.from_rows([(1500, 360)], "scrape.txt")
    assert match(results, source).assessments[0].hypothesis.name == "a"
    assert fits["b"].foreign and not fits["a"].foreign


def test_notes_why_the_truth_may_be_missing() -> None:
    """Responses of another target at temperature 0 and above, and a drafter without known misreadings."""
    sound, foreign = exact("", [30]), TextFit(-900.0, 0.2)
    for fit, measure in ((foreign, "only 20 %"), (TextFit(-900.0, None, 12.0), "12 standard errors below")):
        (note,) = limits([replace(sound, texts=fit), exact("a", [20])], "the-target", "eagle3")
        assert "the responses are not those of the-target" in note and measure in note
    (note,) = limits([replace(sound, texts=TextFit(-1.0, 1.0))], "the-target", "my-drafter")
    assert "no misreading of drafter 'my-drafter' is known" in note


def test_counts_with_equal_acceptance_name_both_readings() -> None:
    results = [exact("", [10, 14, 21]), exact("a", [2, 3, 4]), exact("b", [2, 3, 4])]
    source = Acceptance.from_rows([tuple(np.sum(results[1].counts.by_response, 0))], "scrape.txt")  # type: ignore[union-attr]
    assert {item.name for item in not_excluded(match(results, source).assessments)} >= {"a", "b"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> dict[str, str]:
    """A target with sampled responses, and a draft model that is nearly the target."""
    root = tmp_path_factory.mktemp("served")
    target = save_model(root / "target", seed=3)
    model = load_model(target, dtype="float32", device="cpu")
    draft = load_model(save_model(root / "near", seed=3), dtype="float32", device="cpu").model
    draft.lm_head.weight.data *= 0.7
    draft.save_pretrained(root / "near")
    prompts = [[5 + i, 6, 7] for i in range(24)]
    texts = generate(model, prompts, max_new_tokens=32, temperature=1.0, seed=1, batch_size=24)
    rows = [
        {"id": str(i), "prompt": p, "tokens": r.tokens, "finish_reason": "length", "temperature": 1.0}
        for i, (p, r) in enumerate(zip(prompts, texts, strict=True))
    ]
    (root / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"target": target, "near": str(root / "near"), "source": str(root / "responses.jsonl")}


@pytest.mark.parametrize("temperature", ["null", "0"])
def test_command_names_how_the_server_drafts(
    temperature: str, served: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    """The server drafts as configured, or greedily although the draft model is to be sampled."""
    pair = ["--target", served["target"], "--dtype", "float32", "--device", "cpu"]
    drafter = f"{{name: draft-model, model: {served['near']}, gamma: 2, temperature: TEMPERATURE}}"
    server = drafter.replace("TEMPERATURE", temperature)
    argv = ["replay", served["source"], "--drafter", server, "--verifier", "token", "--as", "vllm", "--json", *pair]
    assert cli.main(argv) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    counts = row["counters"]
    file = scrape(tmp_path / "scrape.txt", counts["drafts"], counts["accepted_per_position"])
    argv = ["diagnose", *pair, "--drafter", drafter.replace("TEMPERATURE", "null"), "--replay", served["source"]]
    argv += ["--counters", file, "--as", "vllm"]
    assert cli.main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    name = CONFIGURED if temperature == "null" else "the engine drafts greedily"
    assert report["own_responses"] and report["hypotheses"][0]["name"] == name
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    if temperature == "null":
        assert "what the files define" in out
    else:
        assert "what this drafter gives if the engine drafts greedily" in out and "as configured it would be" in out
    assert "None of the" not in out and "about 0 " not in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--counters", "FILE"], "--counters with a target requires --as"),
        (["--counters", "FILE", "--as", "lmdeploy"], "--counters with a target requires --as"),
        (["--as", "vllm"], "--as requires --counters"),
        (["--counters", "FILE", "--counters", "FILE", "--as", "vllm"], "takes one source"),
    ],
)
def test_unclear_requests_are_refused(
    more: list[str], message: str, served: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    file = scrape_rates(tmp_path / "a.txt", [0.5, 0.2])
    argv = ["--target", served["target"], "--drafter", f"{{name: draft-model, model: {served['near']}}}"]
    assert cli.main(["diagnose", *argv, *[word.replace("FILE", file) for word in more]]) == 2
    assert message in capsys.readouterr().err


def test_dtype_of_the_server_is_that_in_which_the_target_generates_the_responses(tmp_path: Path) -> None:
    """The server computes in float32, where the default is bfloat16; or in bfloat16, too."""
    name = save_model(tmp_path / "target", seed=3, hidden=32, heads=(2, 1))
    prompts = [[5 + i % 30, 6, 7 + i // 30] for i in range(60)]
    default = Target(name, Sampling(temperature=0), dtype="bfloat16", device="cpu")
    for dtype in ("float32", "bfloat16"):
        model = load_model(name, dtype=dtype, device="cpu")
        texts = generate(model, prompts, max_new_tokens=40, temperature=0.0, ignore_eos=True, batch_size=30)
        responses = [Response(str(i), "", p, r.tokens) for i, (p, r) in enumerate(zip(prompts, texts, strict=True))]
        chosen, reasons = in_dtype_of_responses(name, default, responses, {"device": "cpu"})
        assert str(chosen.loaded.model.dtype) == f"torch.{dtype}"
        assert [reason.startswith("the server computes in float32") for reason in reasons] == [True] * (
            dtype == "float32"
        )


def test_greedy_responses_are_continued_past_their_end(tmp_path: Path) -> None:
    """An engine counts drafts there; the target's own tokens are what they are verified against."""
    target = Target(save_model(tmp_path / "target"), Sampling(temperature=0), dtype="float32", device="cpu")
    context = target.loaded.context_length
    assert context is not None
    text = argmax_text(target.loaded.model, [5, 6, 7], 12)
    short, recorded = Response("a", "", text[:3], text[3:9]), Response("b", "", text[:3], text[3:9], continuation=[4])
    long = Response("c", "", text[:3], [5] * (context - 5))
    continued = with_continuations([short, recorded, long], target, 3)
    assert [list(response.continuation) for response in continued] == [text[9:12], [4], []]
