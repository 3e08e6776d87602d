"""Exported settings given to the engines themselves: vLLM's configuration and llama-server's arguments.

    export CROSSDRAFT_VLLM_PYTHON=/path/to/vllm-env/bin/python CROSSDRAFT_LLAMA_SERVER=/path/to/llama-server
    pytest -m engine plugins/crossdraft-advisor/tests/advise

vLLM runs on a CPU here. The models are those of plugins/crossdraft-smollm2.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor import Acceptance, Schedule, ServedCell, Source
from crossdraft_advisor.engines.engine import Range
from crossdraft_advisor.engines.engine_log import read_source
from crossdraft_advisor.engines.formats import acceptances_in

from crossdraft import Sampling, load_model, load_tokenizer
from crossdraft.framework import plugins
from crossdraft.framework.cli.main import main
from crossdraft.framework.metrics.intervals import Estimate
from crossdraft.framework.models.configs import LEFT_OUT
from crossdraft.framework.models.resolve import resolve
from crossdraft.framework.models.shared_embedding import save_sharing_embedding

pytestmark = pytest.mark.engine

FIXTURES = Path(__file__).parents[1] / "fixtures"
TARGET = "smollm2-135m-instruct"
RANGES = {"one length": (Range(1, 64, 3),), "schedule": (Range(1, 8, 3), Range(9, 32, 2), Range(33, 64, 0))}
RATES = (0.8, 0.6, 0.5)

#: Runs in vLLM's environment: one line of JSON for each configuration, in order.
PARSE = """
import json, sys

def main(target, configs):
    from vllm.engine.arg_utils import EngineArgs

    results = []
    for config in json.loads(configs):
        try:
            args = EngineArgs(model=target, dtype="float32", max_model_len=256, speculative_config=config)
            parsed = args.create_engine_config()
            spec = parsed.speculative_config
            results.append({"method": spec.method, "tokens": spec.num_speculative_tokens,
                            "schedule": spec.num_speculative_tokens_per_batch_size,
                            "rejection": spec.rejection_sample_method, "draft": spec.draft_sample_method,
                            "rates": spec.synthetic_acceptance_rates, "v2": parsed.use_v2_model_runner})
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    print("\\nRESULTS" + json.dumps(results))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""

SERVE = """
import json, sys

def main(target, speculative):
    from vllm import LLM, SamplingParams

    speculative = json.loads(speculative)
    llm = LLM(target, dtype="float32", enforce_eager=True, max_model_len=256, speculative_config=speculative)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    print("SERVED")

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def vllm(script: str, *arguments: str, directory: Path) -> str:
    """Run a script in vLLM's environment and return all of its output; its ``lib/libiomp5.so`` is preloaded."""
    python = os.environ.get("CROSSDRAFT_VLLM_PYTHON")
    if not python:
        pytest.skip("CROSSDRAFT_VLLM_PYTHON is not set")
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("PYTHONPATH", None)
    if (openmp := Path(python).absolute().parents[1] / "lib" / "libiomp5.so").exists():
        environment.setdefault("LD_PRELOAD", str(openmp))
    (directory / "script.py").write_text(script, encoding="utf-8")
    command = [python, str(directory / "script.py"), *arguments]
    done = subprocess.run(command, text=True, capture_output=True, env=environment)
    return done.stdout + done.stderr


def llama_server(*flags: str) -> str:
    server = os.environ.get("CROSSDRAFT_LLAMA_SERVER")
    if not server:
        pytest.skip("CROSSDRAFT_LLAMA_SERVER is not set")
    done = subprocess.run([server, "--model", "/nonexistent.gguf", *flags], text=True, capture_output=True, timeout=60)
    return done.stdout + done.stderr


def schedule(ranges: tuple[Range, ...], **attributes: Any) -> Schedule:
    return Schedule(Acceptance(RATES, "here", **attributes), ranges, {r.low: Estimate(1.5) for r in ranges})


def words(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", ""))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("crossdraft_smollm2")
    root = tmp_path_factory.mktemp("servable")
    for kind in ("draft-model", "eagle3", "medusa"):
        argv = ["train", "export", kind, f"smollm2-{kind}", "--target", TARGET, "--dtype", "float32"]
        assert main([*argv, "--out", str(root / kind)]) == 0
    return {kind: str(root / kind) for kind in ("draft-model", "eagle3", "medusa")}


def test_vllm_accepts_every_exported_configuration(models: dict[str, str], tmp_path: Path) -> None:
    cases, configs = [], []
    for name in ("vllm", "vllm-cpu", "vllm-synthetic"):
        engine = plugins.get("engines", name)()
        for drafter, model in (*models.items(), ("prompt-lookup", "")):
            for verifier, point_mass, temperature in (
                ("token", False, 1.0),
                ("block", False, 1.0),
                ("token", True, 0.0),
            ):
                point_mass = point_mass or drafter == "prompt-lookup"
                for ranges in RANGES.values():
                    about = {"drafter": drafter, "model": model, "verifier": verifier, "temperature": temperature}
                    plan = schedule(ranges, **about, point_mass=point_mass)
                    if engine.cannot(plan.acceptance) is None:
                        flag, value = words(engine.export(plan).text)
                        assert flag == "--speculative-config"
                        cases.append((name, drafter, ranges))
                        configs.append(json.loads(value))
    output = vllm(PARSE, str(resolve(TARGET).path), json.dumps(configs), directory=tmp_path)
    assert "RESULTS" in output, output[-3000:]
    results = json.loads(output.partition("\nRESULTS")[2].splitlines()[0])
    assert len(results) == len(cases) > 30
    for (name, drafter, ranges), config, parsed in zip(cases, configs, results, strict=True):
        assert "error" not in parsed, (config, parsed)
        assert (parsed["method"], parsed["tokens"]) == (config["method"], 3)
        assert (parsed["schedule"] is not None) == (len(ranges) > 1)
        assert parsed["rejection"] == config.get("rejection_sample_method", "standard")
        assert (parsed["rates"] is not None) == (name == "vllm-synthetic")
        if drafter == "medusa":
            assert not parsed["v2"] and parsed["rejection"] != "block"
        if name == "vllm-cpu":
            assert parsed["rejection"] == "standard"


@pytest.mark.parametrize("drafter", sorted(plugins.get("engines", "llama.cpp").methods))
@pytest.mark.parametrize("gamma", [0, 3])
def test_llama_server_accepts_every_exported_flag(drafter: str, gamma: int) -> None:
    about = {"drafter": drafter, "model": "" if drafter in ("prompt-lookup", "ngram-simple") else "/nonexistent.gguf"}
    plan = schedule((Range(1, 64, gamma),), **about, verifier="token", temperature=1.0, point_mass=True)
    output = llama_server(*words(plugins.get("engines", "llama.cpp")().export(plan).text))
    assert "failed to load model" in output and "error while handling" not in output, output[-2000:]
    assert "invalid argument" not in output


def test_llama_server_refuses_an_unknown_flag() -> None:
    assert "invalid argument: --spec-nothing" in llama_server("--spec-nothing", "3")
    assert "failed to load model" not in llama_server("--spec-type", "nothing")


def test_vllm_refuses_a_draft_model_without_its_embedding(models: dict[str, str], tmp_path: Path) -> None:
    target = load_model(TARGET, dtype="float32", device="cpu")
    draft_model = load_model("smollm2-draft-model", dtype="float32", device="cpu", share_with=target)
    save_sharing_embedding(draft_model.model, tmp_path / "compact", embedding_of=TARGET)
    for name, model in (("compact", str(tmp_path / "compact")), ("servable", models["draft-model"])):
        config = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
        output = vllm(SERVE, str(resolve(TARGET).path), json.dumps(config), directory=tmp_path)
        assert ("SERVED" in output) == (name == "servable"), output[-3000:]
        assert (LEFT_OUT in output) == (name == "compact")


def test_log_and_counters_of_llama_server_are_read(tmp_path: Path) -> None:
    """Needs ``CROSSDRAFT_GGUF``, SmolLM2 in this format; n-gram drafts for two of the recorded prompts."""
    program, gguf = os.environ.get("CROSSDRAFT_LLAMA_SERVER"), os.environ.get("CROSSDRAFT_GGUF")
    if not program or not gguf:
        pytest.skip("CROSSDRAFT_LLAMA_SERVER or CROSSDRAFT_GGUF is not set")
    from crossdraft_llamacpp.server import LlamaServer

    flags = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "4"]
    options = LlamaServer.Config(executable=program, model=gguf, args=["-lv", "4", "--threads", "1"])
    tokenizer = load_tokenizer(TARGET)
    cell = ServedCell(
        *(Path(gguf), "auto", Sampling(temperature=0), 0, 1, 256, 4, flags),
        end_tokens=tokenizer.eos_token_ids,
        tokenizer=tokenizer.tokenizer,
    )
    recorded = json.loads((FIXTURES / "llama-cpp-ngram.json").read_text(encoding="utf-8"))
    prompts = [response["prompt"] for response in recorded["responses"] if response["finish_reason"] == "length"]
    server = LlamaServer(options, cell, tmp_path)
    server.start()
    try:
        for prompt in prompts:
            server.complete(prompt, 64)
        scrape = server.scrape()
    finally:
        server.stop()
    (counted,) = acceptances_in(Source(scrape, "metrics"))
    (logged,) = acceptances_in(read_source(str(server.log)))
    # The log has the steps without a draft, too; both have the tokens accepted at each position.
    accepted = [[rate * acceptance.drafts for rate in acceptance.marginal] for acceptance in (counted, logged)]
    assert accepted[0] == pytest.approx(accepted[1], abs=0.1)
    assert counted.drafts < logged.drafts
