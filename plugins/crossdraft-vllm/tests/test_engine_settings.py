"""Settings of vLLM with crossdraft inside, and the server that a recipe starts with them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from crossdraft_advisor import Acceptance, Schedule, ServedCell
from crossdraft_advisor.engines.engine import Range
from crossdraft_vllm.engine import VllmCrossdraft
from crossdraft_vllm.server import VllmCrossdraftServer, VllmOptions
from crossdraft_vllm.settings import VARIABLE, parse_settings

from crossdraft import Sampling
from crossdraft.framework.metrics.intervals import Estimate
from crossdraft.framework.plugins import manager

LOOKUP = Acceptance(
    (0.5, 0.25),
    "here",
    drafter="prompt-lookup",
    verifier="block",
    temperature=1.0,
    point_mass=True,
    options={"max_ngram": 2},
)
DRAFT_MODEL = Acceptance(
    (0.5, 0.25), "here", drafter="draft-model", verifier="block", temperature=1.0, point_mass=False, model="/draft"
)


def exported(acceptance):
    engine = VllmCrossdraft()
    assert engine.cannot(acceptance) is None
    words = shlex.split(engine.export(Schedule(acceptance, (Range(1, 4, 2),), {})).text.replace("\\\n", " "))
    assert words[0] == "export" and words[2] == "--speculative-config" and len(words) == 4
    variable, value = words[1].split("=", 1)
    assert variable == VARIABLE
    return words, parse_settings(value), json.loads(words[3])


def test_drafter_of_point_masses_is_a_custom_class():
    _, settings, config = exported(LOOKUP)
    assert settings.drafter[0].name == "prompt-lookup"
    assert (settings.drafter[1].gamma, settings.drafter[1].max_ngram) == (2, 2)
    assert settings.verifier is not None and settings.verifier.name == "block"
    assert config == {"method": "custom_class", "model": "crossdraft_vllm.Proposer", "num_speculative_tokens": 2}


def test_draft_model_stays_with_vllm_and_samples_its_drafts():
    _, settings, config = exported(DRAFT_MODEL)
    assert settings.drafter is None
    assert settings.verifier is not None and settings.verifier.name == "block"
    assert config["method"] == "draft_model" and config["draft_sample_method"] == "probabilistic"
    assert "rejection_sample_method" not in config  # vLLM would draft greedily


def test_only_drafters_of_vllm_have_a_length_per_batch_size():
    engine, slower = VllmCrossdraft(), {4: Estimate(0.5)}
    assert engine.scheduled(DRAFT_MODEL) and not engine.scheduled(LOOKUP)
    remark, _ = engine.export(Schedule(LOOKUP, (Range(1, 4, 2),), slower)).remarks
    assert remark == "at B = 4 drafting is slower than plain decoding and is not switched off"


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"verifier": "typical"}, "not lossless"),
        ({"verifier": "greedy-block"}, "keeps state between steps"),
        ({"drafter": "jacobi"}, "cannot draft inside an engine"),
        ({"drafter": "medusa", "point_mass": False}, "drafts greedily"),
    ],
)
def test_unsupported_pair_is_refused(change, reason):
    assert reason in VllmCrossdraft().cannot(replace(LOOKUP, options={}, **change))


@pytest.fixture
def combine() -> Iterator[str]:
    """The name of a drafter without the option gamma."""
    crossdraft_combine = pytest.importorskip("crossdraft_combine")
    installed = manager().is_registered(crossdraft_combine)
    if not installed:
        manager().register(crossdraft_combine, "test")
    yield "combine"
    if not installed:
        manager().unregister(crossdraft_combine)


def test_drafter_without_gamma_is_refused(combine):
    combined = replace(LOOKUP, drafter=combine, options={"drafters": ["prompt-lookup", "prompt-lookup"]})
    assert "has no option gamma" in str(VllmCrossdraft().cannot(combined))


def test_counters_end_with_drafts():
    engine = VllmCrossdraft()
    assert engine.counters_of("prompt-lookup").shortens and not engine.counters_of("draft-model").shortens
    assert engine.counters_of("prompt-lookup").drafter_options == {}


def test_server_sets_the_variable():
    words, _, _ = exported(LOOKUP)
    cell = ServedCell(Path("t"), "float32", Sampling(), 0, 2, 64, 2, words, (), None)
    server = VllmCrossdraftServer(VllmOptions(), cell, Path("logs"))
    assert server.environment()[VARIABLE] == words[1].split("=", 1)[1]
    command = server.command(1)
    assert command[-2:] == words[2:] and "export" not in command
    plain = VllmCrossdraftServer(VllmOptions(), replace(cell, flags=(), gamma=0), Path("logs"))
    assert VARIABLE not in plain.environment() and "--speculative-config" not in plain.command(1)
