"""Tests in a real vLLM, with the model smollm2-135m-instruct in the cache.

    VLLM/bin/python -m pytest --noconftest -c /dev/null plugins/crossdraft-vllm/tests/test_engine.py

They run in vLLM's environment, with crossdraft, crossdraft-smollm2, crossdraft-vllm and pytest installed beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed in this environment"),
]

SERVE = """
import json, sys
from crossdraft.framework.models.resolve import resolve

def main():
    from vllm import LLM, SamplingParams
    llm = LLM(str(resolve("smollm2-135m-instruct").path), dtype="float32", enforce_eager=True, max_model_len=256,
              max_num_seqs=2, speculative_config=json.loads(sys.argv[1]), disable_log_stats=False)
    results = []
    for sampling in json.loads(sys.argv[2]):
        outputs = llm.generate(["The sea is the sea is", "One two three one", "A b c a b"], SamplingParams(**sampling))
        results.append([list(output.outputs[0].token_ids) for output in outputs])
    accepted = [m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
    print("RESULT", json.dumps([results, sum(accepted)]))

if __name__ == "__main__":
    main()
"""
CUSTOM = {"method": "custom_class", "model": "crossdraft_vllm.Proposer", "num_speculative_tokens": 3}
GREEDY = {"temperature": 0, "max_tokens": 12}


def start(directory, speculative, samplings, strategies=None) -> tuple[subprocess.CompletedProcess, list]:
    script = directory / "serve.py"
    script.write_text(SERVE, encoding="utf-8")
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("CROSSDRAFT_VLLM", None)
    if strategies is not None:
        environment["CROSSDRAFT_VLLM"] = json.dumps(strategies)
    command = [sys.executable, str(script), json.dumps(speculative), json.dumps(samplings)]
    done = subprocess.run(command, text=True, capture_output=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return done, json.loads(lines[-1].removeprefix("RESULT ")) if lines else []


def test_this_vllm_can_be_patched():
    from crossdraft_vllm import plugin

    assert plugin._checked_sampler().rejection_sample


def test_greedy_text_is_unchanged_and_top_k_survives(tmp_path):
    top_k = {"temperature": 1, "max_tokens": 12, "top_k": 5, "seed": 1}
    drafter = {"name": "prompt-lookup", "gamma": 3}
    _, (plain, _) = start(tmp_path, None, [GREEDY])
    _, (texts, accepted) = start(tmp_path, CUSTOM, [GREEDY, top_k], {"drafter": drafter, "verifier": "block"})
    assert texts[0] == plain[0]
    assert accepted > 0
    assert all(texts[1])


@pytest.mark.parametrize(
    "strategies, speculative, message",
    [
        ({"drafter": "prompt-lokup"}, CUSTOM, "prompt-lokup"),
        ({"drafter": {"name": "prompt-lookup", "gamma": 4}}, CUSTOM, "num_speculative_tokens is 3"),
        ({"verifier": "block"}, CUSTOM, "has no drafter"),
        ({"drafter": "prompt-lookup"}, {"method": "ngram", "num_speculative_tokens": 3}, "the speculative method is"),
    ],
)
def test_wrong_settings_are_refused_at_start_up(tmp_path, strategies, speculative, message):
    done, result = start(tmp_path, speculative, [GREEDY], strategies)
    assert done.returncode and not result
    assert message in done.stdout + done.stderr
