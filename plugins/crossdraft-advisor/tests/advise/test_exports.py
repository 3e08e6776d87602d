"""Settings of engines: accepted by the engine's parser, with the meaning of the schedule."""

import json
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor import Acceptance, Engine, Schedule, Settings, Source
from crossdraft_advisor.engines.engine import Range
from crossdraft_advisor.engines.formats import acceptances_in
from engine_schemas import LlamaCpp, Sglang, trt, vllm
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import save_model

from crossdraft.framework import plugins
from crossdraft.framework.errors import ContractError, UsageError
from crossdraft.framework.metrics.intervals import Estimate

RATES = (0.8, 0.6, 0.5, 0.4, 0.3)
PARSERS: dict[str, Any] = {"vllm": vllm, "sglang": Sglang, "tensorrt-llm": trt, "llama.cpp": LlamaCpp}
FALLING = (Range(1, 8, 5), Range(9, 31, 2), Range(32, 64, 0))


def engine(name: str) -> Engine:
    return plugins.get("engines", name)()


def schedule(*ranges: Range, **about: Any) -> Schedule:
    known = {"drafter": "eagle3", "model": "org/head", "verifier": "token", "temperature": 1.0, "point_mass": False}
    ranges = ranges or (Range(1, 64, 3),)
    return Schedule(Acceptance(RATES, "here", **(known | about)), ranges, {r.low: Estimate(1.5) for r in ranges})


def drafts(name: str) -> list[str]:
    return sorted(engine(name).methods)


@pytest.mark.parametrize("name, drafter", [(name, drafter) for name in PARSERS for drafter in drafts(name)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_is_accepted(name: str, drafter: str, temperature: float) -> None:
    about = {"drafter": drafter, "temperature": temperature, "point_mass": True}
    if drafter in ("prompt-lookup", "mtp"):
        about["model"] = ""
    result = schedule(**about)
    assert engine(name).cannot(result.acceptance) is None
    assert [PARSERS[name](engine(name).export(result).text).gamma(b) for b in (1, 7, 64)] == [3, 3, 3]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Range, ...]:
    gammas = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
    ends = sorted(draw(st.sets(st.integers(1, 300), min_size=len(gammas), max_size=len(gammas))))
    starts = [1, *(end + 1 for end in ends[:-1])]
    return tuple(Range(*item) for item in zip(starts, ends, gammas, strict=True))


@settings(max_examples=30, deadline=None)
@given(schedules())
def test_schedules_mean_same_everywhere(ranges: tuple[Range, ...]) -> None:
    result = schedule(*ranges)
    for name in ("vllm", "sglang", "tensorrt-llm"):
        settings = engine(name).export(result)
        parsed = PARSERS[name](settings.text)
        if name == "tensorrt-llm" and len(ranges) > 1 and ranges[0].gamma < result.gamma:
            assert "must begin with its longest drafts" in settings.remarks[-1]
            assert parsed.gamma(ranges[0].high) == result.gamma
            ranges = (Range(1, ranges[0].high, result.gamma), *ranges[1:])
        for item in ranges:
            assert [parsed.gamma(b) for b in (item.low, item.high)] == [item.gamma] * 2, settings.text
        beyond = parsed.gamma(ranges[-1].high + 1)
        if len(ranges) > 1:
            note = next(remark for remark in settings.remarks if remark.startswith("beyond"))
            assert (f"gamma {beyond}" if beyond else "does not draft") in note


def test_vllm_settings() -> None:
    result = vllm(engine("vllm").export(schedule(*FALLING, verifier="block")).text)
    assert result.rejection_sample_method == "block" and result.draft_sample_method == "probabilistic"
    assert result.num_speculative_tokens_per_batch_size == [[1, 8, 5], [9, 31, 2], [32, 64, 0]]
    result = vllm(engine("vllm").export(schedule(point_mass=True)).text)
    assert (result.rejection_sample_method, result.draft_sample_method) == ("standard", "greedy")
    greedy = vllm(engine("vllm").export(schedule(temperature=0.0, verifier="block")).text)
    assert greedy.model_fields_set == {"method", "model", "num_speculative_tokens"}
    sizes = {"min_ngram": 2, "max_ngram": 5}
    result = vllm(
        engine("vllm").export(schedule(drafter="prompt-lookup", model="", point_mass=True, options=sizes)).text
    )
    assert (result.prompt_lookup_min, result.prompt_lookup_max) == (2, 5)


def test_vllm_on_cpus_and_its_runner_v1() -> None:
    """Model runner V1 ignores block verification and sampled drafts of Medusa, so pairs with them are not offered."""
    sampled, point_masses = schedule(verifier="block"), schedule(verifier="block", point_mass=True)
    (remark,) = engine("vllm").export(sampled).remarks
    assert "on CPUs" in remark and "--export vllm-cpu" in remark
    assert "V1 verifies token by token" in str(engine("vllm-cpu").cannot(sampled.acceptance))
    for plan in (point_masses, schedule(verifier="token"), schedule(verifier="block", temperature=0.0)):
        assert engine("vllm-cpu").cannot(plan.acceptance) is None
        assert engine("vllm-cpu").export(plan).text == engine("vllm").export(plan).text
        assert not engine("vllm-cpu").export(plan).remarks
    medusa = schedule(drafter="medusa", verifier="token")
    assert "vLLM's medusa drafts greedily" in str(engine("vllm").cannot(medusa.acceptance))
    assert "AssertionError" in engine("vllm-synthetic").export(sampled).remarks[-1]


@pytest.mark.parametrize("name", ["vllm", "transformers", "tensorrt-llm"])
@pytest.mark.parametrize("options, count", [({"match": "latest"}, 1), ({"max_ngram": 4}, 1), ({"match": "first"}, 0)])
def test_engines_that_copy_the_earliest_match(name: str, options: dict[str, Any], count: int) -> None:
    plan = schedule(drafter="prompt-lookup", model="", point_mass=True, options=options)
    remarks = engine(name).export(plan).remarks
    assert len(remarks) == count and all("copies the earliest match" in remark for remark in remarks)
    longer = schedule(drafter="prompt-lookup", model="", point_mass=True, options=options | {"min_ngram": 2})
    assert len(engine(name).export(longer).remarks) == count + (name != "vllm")


def test_n_grams_of_other_requests() -> None:
    plan = schedule(drafter="prompt-lookup", model="", point_mass=True, options={"match": "first"})
    assert trt(engine("tensorrt-llm").export(plan).text).is_public_pool is False
    assert "the texts of all requests" in engine("sglang").export(plan).remarks[-1]


def test_llama_cpps_own_n_gram_drafter() -> None:
    plan = schedule(drafter="ngram-simple", model="", point_mass=True, options={"n": 2})
    settings = engine("llama.cpp").export(plan)
    flags = LlamaCpp(settings.text).given
    assert (flags.spec_ngram_simple_size_n, flags.spec_ngram_simple_size_m) == (2, 3) and not settings.remarks


def test_settings_of_other_engines() -> None:
    assert Sglang(engine("sglang").export(schedule()).text).given.speculative_use_rejection_sampling
    assert not Sglang(engine("sglang").export(schedule(point_mass=True)).text).given.speculative_use_rejection_sampling
    assert "older releases reject" in " ".join(engine("sglang").export(schedule(*FALLING)).remarks)
    block = engine("sglang").export(schedule(verifier="block"))
    assert Sglang(block.text).given.speculative_use_block_verification and "CUDA or ROCm" in block.remarks[-1]
    assert "block" not in engine("sglang").export(schedule(verifier="block", temperature=0.0)).text
    for drafter in ("eagle3", "mtp", "draft-model"):
        assert trt(engine("tensorrt-llm").export(schedule(drafter=drafter)).text).use_rejection_sampling
    ngram = {"drafter": "prompt-lookup", "model": "", "point_mass": True, "options": {"min_ngram": 2, "max_ngram": 4}}
    settings = engine("llama.cpp").export(schedule(**ngram))
    flags = LlamaCpp(settings.text).given
    assert (flags.spec_ngram_simple_size_n, flags.spec_ngram_simple_size_m) == (4, 3)
    assert settings.remarks[0] == "it looks up suffixes of 4 tokens only, not of 2 to 4"
    assert "with 3 tokens after 4 it never drafts; use max_ngram: 3 or less" in settings.remarks[1]
    assert not engine("llama.cpp").export(schedule(**ngram | {"options": {"min_ngram": 3, "max_ngram": 3}})).remarks
    assert LlamaCpp(engine("llama.cpp").export(schedule(point_mass=True)).text).given.spec_draft_p_min == 0


@pytest.mark.parametrize("name", plugins.entries("engines"))
def test_not_drafting(name: str) -> None:
    off = schedule(Range(1, 64, 0))
    settings = engine(name).export(off)
    if name == "speculation-profile":
        assert json.loads(settings.text)["num_speculative_tokens"] == 5
    elif name == "golden-al":
        assert settings.text.endswith("    5: 3.60")
    else:
        assert settings.text in ("", "--spec-type none", "model.generate(**inputs)")
        assert settings.text or settings.remarks


@pytest.mark.parametrize(
    "name, about, message",
    [
        ("sglang", {"drafter": "draft-model", "verifier": "block"}, "its STANDALONE has no block verification"),
        ("sglang", {"drafter": "draft-model"}, "STANDALONE drafts greedily"),
        ("sglang", {"drafter": "medusa"}, "no drafter medusa"),
        ("sglang", {"drafter": "dflash"}, "its DFLASH is exported with greedy drafts only"),
        ("tensorrt-llm", {"verifier": "block"}, "no block verification"),
        ("tensorrt-llm", {"drafter": "prompt-lookup"}, "NGram drafts greedily"),
        ("llama.cpp", {}, "at temperature 1.0 llama.cpp drafts greedily"),
        ("transformers", {"drafter": "draft-model", "verifier": "block"}, "no block verification"),
        ("transformers", {}, "no drafter eagle3"),
        ("vllm", {"verifier": "specinfer"}, "no specinfer verification"),
        ("vllm", {"chain": False}, "does not support tree drafts"),
        ("vllm", {"options": {"policy": {"name": "confidence"}}}, "length policy confidence"),
        ("speculation-profile", {"verifier": "block"}, "no block verification"),
    ],
)
def test_unsupported_pairs(name: str, about: dict[str, Any], message: str) -> None:
    reason = engine(name).cannot(schedule(**about).acceptance)
    assert reason is not None and message in reason
    if "verifier" in about and name != "vllm" and name != "speculation-profile":
        assert engine(name).cannot(schedule(**about, temperature=0.0).acceptance) is None


@pytest.mark.parametrize(
    "about, message", [({"drafter": ""}, "give it as --drafter"), ({"model": ""}, "give it as --draft-path")]
)
@pytest.mark.parametrize("name", [*PARSERS, "transformers"])
def test_missing_facts(name: str, about: dict[str, Any], message: str) -> None:
    drafter = {"drafter": "draft-model"} if name == "transformers" else {}
    with pytest.raises(UsageError, match=message):
        engine(name).export(schedule(**(drafter | about)))


@pytest.mark.parametrize("writer, reader", [("vllm-synthetic", "vllm"), ("speculation-profile",) * 2])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda rates: rates[0] > 0))
def test_round_trips(writer: str, reader: str, conditional: list[float]) -> None:
    acceptance = Acceptance.from_conditional(conditional, "here", drafter="eagle3", model="org/head", temperature=1.0)
    text = engine(writer).export(Schedule(acceptance, (Range(1, 8, acceptance.gamma),), {1: Estimate(2.0)})).text
    text = text if reader != "vllm" else vllm(text).model_dump_json(exclude_none=True)
    (result,) = acceptances_in(Source(text, "again"))
    assert result.marginal == pytest.approx(acceptance.marginal, abs=1e-12)
    assert (result.drafter, result.model) == ("eagle3", "org/head")


def test_transformers_settings(tmp_path: Path, monkeypatch: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

    lengths: list[int] = []
    for kind in (AssistedCandidateGenerator, PromptLookupCandidateGenerator):
        ours = kind.get_candidates

        def spied(self: Any, ids: Any, *args: Any, _ours: Any = ours, **more: Any) -> Any:
            result = _ours(self, ids, *args, **more)
            lengths.append(result[0].shape[1] - ids.shape[1])
            return result

        monkeypatch.setattr(kind, "get_candidates", spied)
    name = save_model(tmp_path / "model", seed=1)
    model = AutoModelForCausalLM.from_pretrained(name)
    inputs = {"input_ids": torch.tensor([[5, 6, 5, 6, 5, 6, 5]]), "max_new_tokens": 24}
    names = {"model": model, "inputs": inputs, "AutoModelForCausalLM": AutoModelForCausalLM}
    exec(engine("transformers").export(schedule(drafter="draft-model", model=name, temperature=0.0)).text, dict(names))
    assert lengths[:4] == [3, 3, 3, 3]
    lengths.clear()
    lookup = schedule(drafter="prompt-lookup", model="", temperature=0.0)
    exec(engine("transformers").export(lookup).text, dict(names))
    assert lengths[0] == 3 and max(lengths) <= 3


class Theirs(Engine):
    name = "theirs"
    read_from = "Theirs 1.0"

    def export(self, schedule: Schedule) -> Settings:
        return Settings(f"--k {schedule.gamma}")


def test_engines_of_plug_ins(install: Any) -> None:
    install("engines", ("theirs", Theirs), ("odd", object()), ("nothing", type("Nothing", (), {})), ("wrong", Theirs))
    assert engine("theirs").export(schedule()).text == "--k 3"
    assert "no drafter eagle3; supported drafters: none" in str(engine("theirs").cannot(schedule().acceptance))
    for name, message in (
        ("odd", "crossdraft_advisor.Engine"),
        ("nothing", "crossdraft_advisor.Engine"),
        ("wrong", "must be 'wrong'"),
    ):
        with pytest.raises(ContractError, match=message):
            engine(name)
