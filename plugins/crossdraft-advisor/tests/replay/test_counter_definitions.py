"""``crossdraft replay --as``: the counters that vLLM and llama.cpp recorded for the same responses, exactly."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor.advise.candidates import Candidate, imported
from crossdraft_advisor.engines.acceptance import Acceptance
from crossdraft_advisor.engines.counter_definitions import DEFINITIONS
from crossdraft_advisor.replay.candidates import candidates_of
from crossdraft_advisor.replay.engine_counts import EngineCounts
from crossdraft_advisor.replay.response import Response as RecordedResponse
from crossdraft_advisor.replay.teacher_forcing.model_free import score_model_free
from crossdraft_advisor.replay.teacher_forcing.scoring import mask_past_end

from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.drafter import Drafter
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.cost.curve import CostCurve, Point
from crossdraft.framework.plugins import manager

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures").glob("*.json"))
RECORDED = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in FIXTURES}


@pytest.fixture(autouse=True)
def llamacpp() -> Iterator[None]:
    """Register the drafter ``ngram-simple`` if its package is not installed."""
    import crossdraft_llamacpp

    plugin = None
    if not manager().is_registered(crossdraft_llamacpp):
        plugin = manager().register(crossdraft_llamacpp, "llamacpp in this process")
    yield
    if plugin:
        manager().unregister(crossdraft_llamacpp)


def write_responses(path: Path, fixture: dict[str, Any], continuation: bool = True) -> Path:
    common = {"max_tokens": fixture["max_tokens"], "temperature": 0}
    with path.open("w", encoding="utf-8") as file:
        for i, response in enumerate(fixture["responses"]):
            row = common | response | {"id": str(i)}
            if not continuation:
                del row["continuation"]
            file.write(json.dumps(row) + "\n")
    return path


def counters(capsys: Any, responses: Path, fixture: dict[str, Any], *more: str) -> dict[str, Any]:
    drafter = json.dumps(fixture["drafter"])
    options = ["--temperature", "0", "--as", fixture["engine"], "--json", *more]
    assert cli.main(["replay", str(responses), "--drafter", drafter, *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    return row["counters"]


def test_there_are_recordings_of_every_measured_definition() -> None:
    recorded = {fixture["engine"] for fixture in RECORDED.values()}
    assert recorded == {name for name, definition in DEFINITIONS.items() if definition.measured}
    assert len(RECORDED) == 5


@pytest.mark.parametrize("name", [name for name, fixture in RECORDED.items() if "model" not in fixture["drafter"]])
def test_replay_computes_the_counters_of_an_n_gram_drafter(name: str, tmp_path: Path, capsys: Any) -> None:
    fixture = RECORDED[name]
    counts = counters(capsys, write_responses(tmp_path / "responses.jsonl", fixture), fixture)
    assert {key: counts[key] for key in fixture["counters"]} == fixture["counters"]
    assert counts["unknown_past_end"] == 0


@pytest.mark.parametrize("name", [name for name, fixture in RECORDED.items() if "model" in fixture["drafter"]])
def test_counters_follow_from_the_agreement_of_drafts_and_text(name: str) -> None:
    fixture = RECORDED[name]
    gamma = fixture["drafter"]["gamma"]
    counts = EngineCounts(DEFINITIONS[fixture["engine"]], gamma)
    for response in fixture["responses"]:
        size = len(response["tokens"])
        rows = size + len(response["continuation"])
        agreement = np.array(response["agreement"] + [0] * (rows - size))
        survival = (agreement[:, None] >= np.arange(1, gamma + 1)).astype(float)
        counts.add(survival, np.full(rows, gamma), size, fixture["max_tokens"])
    counts = [counts.drafts, counts.draft_tokens, counts.accepted, counts.per_position.tolist()]
    assert counts == list(fixture["counters"].values())


@pytest.mark.engine
@pytest.mark.parametrize("name", [name for name, fixture in RECORDED.items() if "model" in fixture["drafter"]])
def test_replay_computes_the_counters_of_a_drafter_with_a_model(name: str, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("crossdraft_smollm2")
    fixture = RECORDED[name]
    responses = write_responses(tmp_path / "responses.jsonl", fixture)
    counts = counters(capsys, responses, fixture, "--target", fixture["target"], "--dtype", "float32")
    assert {key: counts[key] for key in fixture["counters"]} == fixture["counters"]


def test_tokens_past_the_end_are_bounded_without_a_continuation(tmp_path: Path, capsys: Any) -> None:
    fixture = RECORDED["vllm-ngram"]
    whole = fixture["counters"]
    counts = counters(capsys, write_responses(tmp_path / "responses.jsonl", fixture, continuation=False), fixture)
    assert counts["drafts"] == whole["drafts"] and counts["draft_tokens"] == whole["draft_tokens"]
    missing = whole["accepted_tokens"] - counts["accepted_tokens"]
    assert 0 < missing <= counts["unknown_past_end"]


def test_crossdrafts_own_numbers_do_not_depend_on_the_continuation(tmp_path: Path, capsys: Any) -> None:
    fixture = RECORDED["vllm-ngram"]
    rows = []
    for continuation in (True, False):
        responses = write_responses(tmp_path / "responses.jsonl", fixture, continuation)
        argv = ["replay", str(responses), "--drafter", json.dumps(fixture["drafter"]), "--as", "vllm", "--json"]
        assert cli.main(argv) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        del row["counters"]
        rows.append(row)
    assert rows[0] == rows[1]


@pytest.mark.parametrize("engine, drafts, tokens_per_step", [("sglang", 4, 6 / 4), ("tensorrt-llm", 3, 6 / 5)])
def test_definitions_read_from_source_code(engine: str, drafts: float, tokens_per_step: float) -> None:
    """Six tokens: the prefill's, then steps of one token, two, one without a draft, and one that ends the response.

    The last one accepts its end-of-sequence token and one past it.
    """
    survival = np.zeros((8, 2))
    survival[2, 0], survival[5] = 1, 1
    lengths = np.array([2, 2, 2, 2, 0, 2, 2, 2])
    counts = EngineCounts(DEFINITIONS[engine], 2)
    counts.add(survival, lengths, 6, None)
    accepted = 3 if DEFINITIONS[engine].accepted == "all" else 1
    assert (counts.drafts, counts.draft_tokens, counts.accepted) == (drafts, 6, accepted)
    assert counts.length == 1 + accepted / drafts
    assert counts.tokens_per_step == pytest.approx(tokens_per_step)


def test_expected_counts_are_those_of_simulated_steps() -> None:
    """Random acceptance: the mean over many simulated responses."""
    draw = np.random.default_rng(0)
    size, gamma = 5, 2
    survival = np.cumprod(draw.uniform(0.2, 0.9, (size + gamma, gamma)), axis=1)
    counts = EngineCounts(DEFINITIONS["vllm"], gamma)
    counts.add(survival, np.full(size + gamma, gamma), size, size)
    runs, drafts, accepted = 20_000, 0, np.zeros(gamma)
    for _ in range(runs):
        t = 1
        while t < size:
            tau = int((survival[t] > draw.uniform()).sum())
            drafts, t = drafts + 1, t + tau + 1
            accepted[:tau] += 1
    assert counts.drafts == pytest.approx(drafts / runs, rel=0.02)
    assert counts.per_position == pytest.approx(accepted / runs, rel=0.05)


def test_table_names_the_numbers_as_the_engine_does(tmp_path: Path, capsys: Any) -> None:
    """`prompt-lookup` copies the earliest match as vLLM does, unless its options set otherwise."""
    fixture = RECORDED["vllm-ngram"]
    responses = str(write_responses(tmp_path / "responses.jsonl", fixture, continuation=False))
    tables = {}
    for match in ("", ", match: first", ", match: latest"):
        drafter = f"{{name: prompt-lookup, gamma: 4{match}}}"
        assert cli.main(["replay", responses, "--drafter", drafter, "--as", "vllm"]) == 0
        tables[match] = capsys.readouterr().out
    assert "Mean acceptance length" in tables[""] and "as measured: of steps with a draft" in tables[""]
    assert "record the 'continuation'" in tables[""]
    assert tables[""] == tables[", match: first"] != tables[", match: latest"]
    drafter = ["--drafter", "{name: prompt-lookup, gamma: 4}", "--as", "vllm", "--csv"]
    assert cli.main(["replay", responses, *drafter]) == 0
    first, *_ = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert float(first["drafts"]) == fixture["counters"]["drafts"]


def test_unsupported_drafters_are_refused(tmp_path: Path, capsys: Any) -> None:
    responses = str(write_responses(tmp_path / "responses.jsonl", RECORDED["vllm-ngram"]))
    argv = ["replay", responses, "--drafter", "prompt-lookup", "--as", "vllm", "--policy", "oracle"]
    assert cli.main(argv) == 2
    assert "--as vllm and --policy cannot be combined" in capsys.readouterr().err
    assert cli.main([*argv[:-3], "tgi"]) == 2
    assert "there is no engine with known counters named 'tgi'" in capsys.readouterr().err


def test_ngram_simple_drafts_alike_in_a_step_and_in_a_replay() -> None:
    from crossdraft_llamacpp.ngram_simple import NgramSimple

    class Traced(NgramSimple):
        response_drafts = Drafter.response_drafts

    draw = np.random.default_rng(0)
    ids = [(draw.integers(3, 6, 12).tolist(), draw.integers(3, 6, 20).tolist()) for _ in range(5)]
    texts = [RecordedResponse(str(i), "all", *pair) for i, pair in enumerate(ids)]
    for n, gamma in ((1, 3), (2, 4), (3, 3)):
        config, sampling = NgramSimple.Config(n=n, gamma=gamma), Sampling(temperature=0)
        at_once, stepwise = (score_model_free(c, config, texts, gamma, sampling) for c in (NgramSimple, Traced))
        for one, other in zip(at_once, stepwise, strict=True):
            assert (one.lengths == other.lengths).all() and (mask_past_end(one.log_q) == other.log_q).all()
            assert other.lengths.any()


def test_lengths_that_a_drafter_refuses_are_not_advised() -> None:
    def candidate(drafter: str, **options: Any) -> Candidate:
        acceptance = Acceptance((0.6, 0.4, 0.3), "here", drafter=drafter, options=options)
        return imported([acceptance], CostCurve("", "", "", {}, (Point(1, 1, 1, 1.0, 1.0, 1.0),)), None, 100)[0]

    assert candidate("ngram-simple", n=2).gammas == candidate("an engine's", n=2).gammas == (3,)
    drafter = "{name: ngram-simple, n: 2}"
    (replayed,) = candidates_of([drafter], [], (1, 2, 4), sampling=Sampling(temperature=0), target="")
    assert replayed.gammas == (2, 4)
