"""Recording of responses and speculative-decoding counters of vLLM or llama.cpp's server, as fixtures of the tests.

    python benchmarks/engine_counters.py --vllm /path/to/vllm-env/bin/python --out DIR
    python benchmarks/engine_counters.py --llama-server PATH --gguf TARGET.gguf --draft-gguf DRAFT.gguf --out ...

Each drafter serves the questions at temperature 0 in float32, 64 tokens each. A file holds the responses, the tokens
that the target would emit past their end (``continuation``), the counters, and for drafters with a model, their
agreement: at each token of a response, the number of drafted tokens that equal the text and its continuation, computed
by crossdraft. So `test_counter_definitions.py` needs neither the engine nor a model. The GGUF files are
converted from the directories of the models by llama.cpp's ``convert_hf_to_gguf.py --outtype f32``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from crossdraft_advisor import Source
from crossdraft_advisor.engines.counter_definitions import DEFINITIONS
from crossdraft_advisor.engines.engine_cell import EngineCell
from crossdraft_advisor.engines.prometheus import ACCEPTED, DRAFTED, DRAFTS, POSITIONS, totals_by_model
from crossdraft_advisor.replay.candidates import candidates_of
from crossdraft_advisor.replay.response import Response

from crossdraft import Sampling
from crossdraft.models import encode
from crossdraft.runs import CellConfig

TARGET, TOKENS = "smollm2-135m-instruct", 64
QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain how a bicycle works.",
    "List three uses of a hammer.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
]
#: The drafters of each engine.
DRAFT_MODEL = {"name": "draft-model", "model": "smollm2-draft-model", "gamma": 3}
DRAFTERS: dict[str, list[dict[str, Any]]] = {
    "vllm": [
        DRAFT_MODEL,
        {"name": "eagle3", "model": "smollm2-eagle3", "gamma": 2},
        {"name": "medusa", "model": "smollm2-medusa", "gamma": 5},
        {"name": "prompt-lookup", "match": "first", "min_ngram": 1, "max_ngram": 3, "gamma": 4},
    ],
    "llama.cpp": [DRAFT_MODEL, {"name": "ngram-simple", "n": 2, "gamma": 4}],
}
#: Path and key of each engine's version.
VERSIONS = {"vllm": ("/version", "version"), "llama.cpp": ("/props", "build_info")}


def agreement(responses: list[dict[str, Any]], drafter: dict[str, Any]) -> list[list[int]]:
    """At each token of a response, the number of drafted tokens that equal the text, from replay."""
    greedy = Sampling(temperature=0)
    (candidate,) = candidates_of(
        [json.dumps(drafter)], ["greedy"], [drafter["gamma"]], sampling=greedy, target=TARGET, dtype="float32"
    )
    texts = [
        Response(str(i), "", r["prompt"], r["tokens"] + r["continuation"], sampling=greedy)
        for i, r in enumerate(responses)
    ]
    scored = zip(responses, candidate.scores(texts), strict=True)
    return [
        [int((row > -0.5).cumprod().sum()) for row in scores.log_q[: len(response["tokens"])]]
        for response, scores in scored
    ]


def record(engine: dict[str, Any], drafter: dict[str, Any], logs: Path) -> dict[str, Any]:
    """Version, responses and counters of an engine's server."""
    settings = {"target": TARGET, "engine": engine, "dtype": "float32", "max_new_tokens": TOKENS, "batch_size": 1}
    settings |= {"sampling": {"temperature": 0}, "drafter": drafter, "verifier": "token"}
    config, name = CellConfig.model_validate(settings), engine["name"]
    target = EngineCell.load_target(config, trust_remote_code=False)
    with closing(EngineCell(config, target, 512, logs, lambda: None)) as cell:
        responses = []
        for question in QUESTIONS:
            prompt = encode(target.tokenizer, [question])
            served = cell.server.complete(prompt, TOKENS)
            responses.append({"prompt": prompt, "tokens": served.tokens, "finish_reason": served.finish_reason})
        (counts,) = totals_by_model(DEFINITIONS[name], Source(cell.server.scrape(), "metrics")).values()
        for response in responses:  # one token a request, because a request ends at an end-of-sequence token
            past: list[int] = []
            for _ in range(drafter["gamma"]):
                past += cell.server.complete(response["prompt"] + response["tokens"] + past, 1).tokens
            response["continuation"] = past
        path, key = VERSIONS[name]
        version = json.loads(cell.server.get(path)[1])[key]
    names = {"drafts": DRAFTS, "draft_tokens": DRAFTED, "accepted_tokens": ACCEPTED}
    counters: dict[str, Any] = {ours: int(counts[theirs][0].value) for ours, theirs in names.items()}
    counters["accepted_per_position"] = [int(counts[POSITIONS][i].value) for i in range(drafter["gamma"])]
    return {"version": version, "responses": responses, "counters": counters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="Python of vLLM's environment")
    parser.add_argument("--llama-server", help="llama-server")
    parser.add_argument("--gguf", default="", help="the target for llama-server")
    parser.add_argument("--draft-gguf", default="", help="the draft model for llama-server")
    parser.add_argument("--only", help="record one drafter only")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    engine: dict[str, Any] = {"name": "vllm", "python": args.vllm, "args": ["--enforce-eager"]}
    engine["env"] = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if not args.vllm:
        engine = {"name": "llama.cpp", "executable": args.llama_server, "args": ["--threads", "1"]}
        engine |= {"model": args.gguf, "draft_model": args.draft_gguf}
    for drafter in DRAFTERS[engine["name"]]:
        name = "ngram" if "model" not in drafter else drafter["name"]
        if args.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as directory:
            recorded = record(engine, drafter, Path(directory))
        fixture = {"engine": engine["name"], "version": recorded["version"], "target": TARGET, "drafter": drafter}
        fixture |= {"temperature": 0, "max_tokens": TOKENS, "counters": recorded["counters"]}
        if "model" in drafter:
            for response, row in zip(recorded["responses"], agreement(recorded["responses"], drafter), strict=True):
                response["agreement"] = row
        text = json.dumps(fixture, indent=1)[:-2] + ',\n "responses": [\n  '
        text += ",\n  ".join(json.dumps(response) for response in recorded["responses"]) + "\n ]\n}\n"
        file = args.out / f"{engine['name'].replace('.', '-')}-{name}.json"
        file.write_text(text, encoding="utf-8")
        print(file, json.dumps(recorded["counters"]))


if __name__ == "__main__":
    main()
