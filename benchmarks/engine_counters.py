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
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from crossdraft_advisor.engines.engine_log import Source
from crossdraft_advisor.engines.prometheus import samples
from crossdraft_advisor.replay.candidates import candidates_of
from crossdraft_advisor.replay.response import Response
from llamacpp_server import served
from transformers import AutoTokenizer
from vllm_process import crossdraft, output_of, run_in_vllm

from crossdraft import Sampling
from crossdraft.models import resolve

TARGET, TOKENS = "smollm2-135m-instruct", 64
QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain how a bicycle works.",
    "List three uses of a hammer.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
]
#: The drafters of each engine: as in recipes, and the engine's own name.
VLLM: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "draft-model": ({"name": "draft-model", "model": "smollm2-draft-model", "gamma": 3}, {"method": "draft_model"}),
    "eagle3": ({"name": "eagle3", "model": "smollm2-eagle3", "gamma": 2}, {"method": "eagle3"}),
    "medusa": ({"name": "medusa", "model": "smollm2-medusa", "gamma": 5}, {"method": "medusa"}),
    "ngram": (
        {"name": "prompt-lookup", "match": "first", "min_ngram": 1, "max_ngram": 3, "gamma": 4},
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    ),
}
LLAMA_CPP: dict[str, tuple[dict[str, Any], list[str]]] = {
    "draft-model": (VLLM["draft-model"][0], ["--spec-type", "draft-simple", "--spec-draft-p-min", "0"]),
    "ngram": (
        {"name": "ngram-simple", "n": 2, "gamma": 4},
        ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "4"],
    ),
}

#: Runs in vLLM's environment; arguments: target, speculative config, prompts, tokens, output file.
SERVE = """
import json, sys

def main(target, speculative, prompts, tokens, out):
    import vllm
    from vllm import LLM, SamplingParams

    speculative = json.loads(speculative)
    llm = LLM(target, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4, seed=0,
              speculative_config=speculative, disable_log_stats=False)
    prompts = json.loads(prompts)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts],
                           SamplingParams(temperature=0, max_tokens=int(tokens)))
    counters = {m.name: getattr(m, "value", getattr(m, "values", None)) for m in llm.get_metrics()}
    whole = [(p, list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for p, o in zip(prompts, outputs)]
    past = SamplingParams(temperature=0, max_tokens=speculative["num_speculative_tokens"], ignore_eos=True)
    after = llm.generate([{"prompt_token_ids": [*p, *t]} for p, t, _ in whole], past)
    responses = [{"prompt": p, "tokens": t, "finish_reason": r, "continuation": list(o.outputs[0].token_ids)}
                 for (p, t, r), o in zip(whole, after)]
    prefix = "vllm:spec_decode_num_"
    names = {"drafts": "drafts", "draft_tokens": "draft_tokens", "accepted_tokens": "accepted_tokens",
             "accepted_per_position": "accepted_tokens_per_pos"}
    with open(out, "w") as file:
        json.dump({"version": vllm.__version__, "responses": responses,
                   "counters": {ours: counters[prefix + theirs] for ours, theirs in names.items()}}, file)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(resolve(TARGET).path)
    texts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [
        tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=True, return_dict=False)
        for text in texts
    ]


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


def record_vllm(python: Path, drafter: dict[str, Any], method: dict[str, Any], work: Path) -> dict[str, Any]:
    config = method | {"num_speculative_tokens": drafter["gamma"]}
    if "model" in drafter:
        model = work / drafter["name"]
        options = ["--target", TARGET, "--dtype", "float32", "--out", str(model)]
        crossdraft("train", "export", drafter["name"], drafter["model"], *options)
        config["model"] = str(model)
    arguments = resolve(TARGET).path, json.dumps(config), json.dumps(prompts()), TOKENS, work / "served.json"
    output_of(run_in_vllm(python, SERVE, *arguments, work=work))
    return json.loads((work / "served.json").read_text())


def record_llama_cpp(args: argparse.Namespace, drafter: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    gamma = drafter["gamma"]
    flags = [*flags, "--spec-draft-n-max", str(gamma)]
    if "model" in drafter:
        flags += ["--model-draft", args.draft_gguf]
    args.model, args.server, args.room, args.threads = args.gguf, args.llama_server, 512, 1
    responses = []
    with served(args, flags) as server:
        for prompt in prompts():
            tokens, reason = server.answer(prompt, TOKENS)
            responses.append({"prompt": prompt, "tokens": tokens, "finish_reason": reason})
        scrape = Source(server.metrics(), "metrics")
        for response in responses:  # one token a request, because a request ends at an end-of-sequence token
            past: list[int] = []
            for _ in range(gamma):
                past += server.answer(response["prompt"] + response["tokens"] + past, 1)[0]
            response["continuation"] = past
    stem = "llamacpp:spec_decode_num_"
    names = {"drafts": "drafts", "draft_tokens": "draft_tokens", "accepted_tokens": "accepted_tokens"}
    series = samples(scrape, {f"{stem}{name}_total" for name in (*names, "accepted_tokens_per_pos")})
    counters: dict[str, Any] = {ours: int(series[f"{stem}{name}_total", ()].value) for ours, name in names.items()}
    counters["accepted_per_position"] = [
        int(series[f"{stem}accepted_tokens_per_pos_total", (("position", str(i)),)].value) for i in range(gamma)
    ]
    version = subprocess.run([args.llama_server, "--version"], text=True, capture_output=True).stderr
    return {"version": version.splitlines()[0], "responses": responses, "counters": counters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="Python of vLLM's environment")
    parser.add_argument("--llama-server", help="llama-server")
    parser.add_argument("--gguf", help="the target for llama-server")
    parser.add_argument("--draft-gguf", help="the draft model for llama-server")
    parser.add_argument("--only", help="record one drafter only")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    engine = "vllm" if args.vllm else "llama.cpp"
    settings: dict[str, Any] = VLLM if args.vllm else LLAMA_CPP
    for name, (drafter, setting) in settings.items():
        if args.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as directory:
            args.log = Path(directory) / "server.log"
            if args.vllm:
                recorded = record_vllm(args.vllm, drafter, setting, Path(directory))
            else:
                recorded = record_llama_cpp(args, drafter, setting)
        fixture = {"engine": engine, "version": recorded["version"], "target": TARGET, "drafter": drafter}
        fixture |= {"temperature": 0, "max_tokens": TOKENS, "counters": recorded["counters"]}
        if "model" in drafter:
            for response, row in zip(recorded["responses"], agreement(recorded["responses"], drafter), strict=True):
                response["agreement"] = row
        text = json.dumps(fixture, indent=1)[:-2] + ',\n "responses": [\n  '
        text += ",\n  ".join(json.dumps(response) for response in recorded["responses"]) + "\n ]\n}\n"
        file = args.out / f"{engine.replace('.', '-')}-{name}.json"
        file.write_text(text, encoding="utf-8")
        print(file, json.dumps(recorded["counters"]))


if __name__ == "__main__":
    main()
