"""Comparison of vLLM and replay on exported drafters: steps and accepted tokens of the same responses.

    python benchmarks/vllm_exports.py --vllm /path/to/vllm-env/bin/python [--tokens 64]

vLLM runs in an environment of its own (`vllm_process`). Each drafter of the SmolLM2 pack is exported by ``crossdraft
train export``, serves six prompts at temperature 0 in float32, and its responses are replayed. The first token of a
response comes from vLLM's prefill, so it belongs to the prompt of the replay.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate
from vllm_process import output_of, run_in_vllm

from crossdraft.framework.models.resolve import resolve

TARGET = "smollm2-135m-instruct"
DRAFTERS = {"draft-model": 3, "eagle3": 2, "medusa": 5}
QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain how a bicycle works.",
    "List three uses of a hammer.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
]

#: Runs in vLLM's environment; arguments: target, speculative config, questions, tokens, output file.
SERVE = """
import json, sys

def main(target, speculative, questions, tokens, out):
    from vllm import LLM, SamplingParams

    llm = LLM(target, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=4, seed=0,
              speculative_config=json.loads(speculative), disable_log_stats=False)
    tokenizer = llm.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=True,
                                      return_dict=False)
        for q in json.loads(questions)
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts],
                           SamplingParams(temperature=0, max_tokens=int(tokens)))
    counters = {m.name: getattr(m, "value", getattr(m, "values", None)) for m in llm.get_metrics()}
    responses = [(p, list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for p, o in zip(prompts, outputs)]
    with open(out, "w") as file:
        json.dump({"responses": responses, "drafts": counters["vllm:spec_decode_num_drafts"],
                   "accepted": counters["vllm:spec_decode_num_accepted_tokens_per_pos"]}, file)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def crossdraft(*args: str) -> str:
    """Standard output of a command; exits with its error."""
    done = subprocess.run([sys.executable, "-m", "crossdraft", *args], text=True, capture_output=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, type=Path, help="Python of vLLM's environment")
    parser.add_argument("--tokens", type=int, default=64, help="maximum tokens of a response")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        for kind, length in DRAFTERS.items():
            model, out = f"smollm2-{kind}", work / kind
            crossdraft("train", "export", kind, model, "--target", TARGET, "--dtype", "float32", "--out", str(out))
            method = kind.replace("-", "_")
            config = {"method": method, "model": str(out), "num_speculative_tokens": length}
            arguments = resolve(TARGET).path, json.dumps(config), json.dumps(QUESTIONS), args.tokens
            output_of(run_in_vllm(args.vllm, SERVE, *arguments, work / "served.json", work=work))
            served = json.loads((work / "served.json").read_text())
            responses = work / "responses.jsonl"
            with responses.open("w", encoding="utf-8") as file:
                for prompt, tokens, reason in served["responses"]:
                    line = {"prompt": [*prompt, tokens[0]], "tokens": tokens[1:], "finish_reason": reason}
                    file.write(json.dumps(line | {"temperature": 0}) + "\n")
            drafter = json.dumps({"name": kind, "model": model, "gamma": length})
            options = ["--target", TARGET, "--dtype", "float32", "--verifier", "greedy", "--temperature", "0", "--json"]
            (row,) = json.loads(crossdraft("replay", str(responses), "--drafter", drafter, *options))["rows"]
            accepted = round(row["steps"] * (row["block_efficiency_all_steps"] - 1))
            per_position = ", ".join(f"{count:.0f}" for count in served["accepted"])
            rows.append([kind, length, served["drafts"], row["steps"], per_position, sum(served["accepted"]), accepted])
    heads = ["drafter", "length", "steps, vLLM", "steps, replay", "accepted by position, vLLM", "sum", "sum, replay"]
    print(tabulate(rows, heads, tablefmt="github"))


if __name__ == "__main__":
    main()
