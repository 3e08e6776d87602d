"""crossdraft's strategies inside vLLM, compared with replay, with the certificate and with vLLM's own rule.

    python benchmarks/in_vllm.py greedy --vllm /path/to/vllm-env/bin/python --out DIR
    python benchmarks/in_vllm.py drafters --vllm /path/to/vllm-env/bin/python --out DIR
    python benchmarks/in_vllm.py sampled --vllm /path/to/vllm-env/bin/python --out DIR
    python benchmarks/in_vllm.py certify --vllm /path/to/vllm-env/bin/python --out DIR

vLLM runs in an environment of its own (`vllm_process`), with crossdraft and plugins/crossdraft-vllm beside it. All
runs use SmolLM2-135M-Instruct in float32; DIR keeps the responses, and a second call reuses them.

greedy: 32 prompts at temperature 0. The text with ``prompt-lookup`` is that without speculation; tau of each step is
that of replay; ``recorded-responses`` is the upper bound.
sampled: temperature 1, a draft model with sampled drafts: block efficiency of ``block``, ``token`` and vLLM's own rule
on the same prompts, and that of replay on the responses, which are tested by ``crossdraft certify-samples``.
certify: the same test of many sequences of twelve tokens after four prompts, also without the plug-in.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from tabulate import tabulate
from vllm_process import output_of, run_in_vllm

from crossdraft import load_prompts, load_tokenizer
from crossdraft.framework.models.resolve import resolve

TARGET = "smollm2-135m-instruct"
DRAFT_MODEL = "smollm2-draft-model"
#: Combined with ``suffix``.
RETRIEVAL = ("ngram-cache", "prompt-lookup")
SHORT = ("multi_turn", "translation", "qa", "math_reasoning")

#: Runs in vLLM's environment; arguments: job and output files. A response is recorded with the tokens of each step.
SERVE = """
import json, sys

def main(job, out):
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    job = json.load(open(job))
    llm = LLM(job["target"], dtype="float32", enforce_eager=True, max_model_len=1536, max_num_seqs=job["rows"], seed=0,
              speculative_config=job["speculative"], disable_log_stats=False)
    tokenizer, engine = llm.get_tokenizer(), llm.llm_engine
    responses = {}
    for number, question in enumerate(job["questions"]):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                               tokenize=True, return_dict=False)
        for copy in range(job["copies"]):
            key = f"{number}-{copy}"
            responses[key] = {"question": number, "prompt": prompt, "steps": [], "finish_reason": None}
            sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, **job["sampling"])
            engine.add_request(key, {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            response = responses[output.request_id]
            if tokens := list(output.outputs[0].token_ids):
                response["steps"].append(tokens)
            response["finish_reason"] = output.outputs[0].finish_reason
    counters = {m.name: getattr(m, "value", getattr(m, "values", None)) for m in llm.get_metrics()}
    counters = {name: value for name, value in counters.items() if "spec_decode" in name}
    with open(out, "w") as file:
        json.dump({"responses": list(responses.values()), "counters": counters}, file)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def crossdraft(*args: str, codes: tuple[int, ...] = (0,)) -> str:
    """Standard output of a command; exits with its error."""
    done = subprocess.run([sys.executable, "-m", "crossdraft", *args], text=True, capture_output=True)
    if done.returncode not in codes:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


class Engine:
    """Runs of vLLM, kept in a directory."""

    def __init__(self, python: Path, work: Path):
        self.python, self.work = python, work
        work.mkdir(parents=True, exist_ok=True)

    def run(
        self,
        name: str,
        questions: list[str],
        sampling: dict[str, Any],
        copies: int = 1,
        rows: int = 8,
        **strategies: Any,
    ) -> dict[str, Any]:
        """Responses and counters of a run; ``strategies``: CROSSDRAFT_VLLM and ``speculative``, vLLM's config."""
        out = self.work / f"{name}.json"
        if not out.exists():
            speculative, plugins = strategies.pop("speculative", None), strategies.pop("plugins", None)
            job = {"target": str(resolve(TARGET).path), "questions": questions, "sampling": sampling, "copies": copies}
            job |= {"rows": rows, "speculative": speculative}
            (self.work / "job.json").write_text(json.dumps(job), encoding="utf-8")
            variables = {"CROSSDRAFT_VLLM": json.dumps(strategies)} if strategies else {}
            variables |= {"VLLM_PLUGINS": plugins} if plugins is not None else {}
            done = run_in_vllm(self.python, SERVE, self.work / "job.json", out, work=self.work, **variables)
            (self.work / f"{name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
            output_of(done)
        return json.loads(out.read_text())

    def replay(self, name: str, responses: list[dict[str, Any]], temperature: float, *options: str) -> dict[str, Any]:
        """The row of ``crossdraft replay`` for responses; the first token of each comes from vLLM's prefill."""
        path = self.work / f"{name}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for response in responses:
                first, *rest = tokens_of(response)
                if rest:
                    line = {"prompt": [*response["prompt"], first], "tokens": rest, "temperature": temperature}
                    line |= {"finish_reason": response["finish_reason"], "id": f"{response['question']}"}
                    file.write(json.dumps(line) + "\n")
        options = (*options, "--json", "--out", str(path.with_suffix(".parquet")), "--force")
        (row,) = json.loads(crossdraft("replay", str(path), *options))["rows"]
        return row

    def verdict(self, name: str, responses: list[dict[str, Any]]) -> str:
        """Deciding line of ``crossdraft certify-samples`` for responses at temperature 1."""
        lines: dict[int, dict[str, Any]] = {}
        for response in responses:
            line = lines.setdefault(response["question"], {"prefix": response["prompt"], "samples": []})
            line["samples"].append(tokens_of(response))
        path = self.work / f"{name}-draws.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines.values()), encoding="utf-8")
        options = [str(path), "--model", TARGET, "--deviation", "0.05", "--dtype", "float32"]
        output = crossdraft("certify-samples", *options, codes=(0, 1, 3)).splitlines()
        return next(line for line in output if line.startswith(("yes:", "no:", "too few")))


def tokens_of(response: dict[str, Any]) -> list[int]:
    return [token for step in response["steps"] for token in step]


def block_efficiency(responses: list[dict[str, Any]]) -> np.ndarray:
    """``[questions, 2]``: tokens and steps after the first token; last steps, which may be cut, are left out."""
    sums = np.zeros((1 + max(r["question"] for r in responses), 2))
    for response in responses:
        steps = [len(step) for step in response["steps"][1:-1]]
        sums[response["question"]] += sum(steps), len(steps)
    return sums


def interval(*runs: np.ndarray) -> tuple[float, float, float]:
    """Block efficiency of the first run, minus that of the second if there is one: value and a 95 % interval.

    Resamples questions, the same ones in both runs.
    """
    rng = np.random.default_rng(0)
    picks = rng.integers(len(runs[0]), size=(10_000, len(runs[0])))

    def value(index: np.ndarray) -> np.ndarray:
        ratios = [run[index].sum(-2) for run in runs]
        ratios = [sums[..., 0] / sums[..., 1] for sums in ratios]
        return ratios[0] if len(ratios) == 1 else ratios[0] - ratios[1]

    low, high = np.quantile(value(picks), [0.025, 0.975])
    return float(value(np.arange(len(runs[0])))), float(low), float(high)


def custom(gamma: int) -> dict[str, Any]:
    return {"method": "custom_class", "model": "crossdraft_vllm.Proposer", "num_speculative_tokens": gamma}


def greedy(engine: Engine, gamma: int) -> None:
    questions = [prompt.turns[0] for prompt in load_prompts("builtin", limit=32)]
    sampling = {"temperature": 0, "max_tokens": 64}
    plain = engine.run("plain", questions, sampling)["responses"]
    drafter = {"name": "prompt-lookup", "gamma": gamma}
    lookup = engine.run("lookup", questions, sampling, drafter=drafter, speculative=custom(gamma))
    recorded = engine.work / "recorded.jsonl"
    recorded.write_text(
        "".join(json.dumps({"prompt": r["prompt"], "tokens": tokens_of(r)}) + "\n" for r in plain), encoding="utf-8"
    )
    oracle = {"name": "recorded-responses", "responses": str(recorded), "gamma": gamma}
    bound = engine.run("oracle", questions, sampling, drafter=oracle, speculative=custom(gamma))
    for name, run in (("prompt-lookup", lookup), ("recorded-responses", bound)):
        same = sum(tokens_of(a) == tokens_of(b) for a, b in zip(plain, run["responses"], strict=True))
        value = interval(block_efficiency(run["responses"]))
        print(f"{name}: {same} of {len(plain)} texts unchanged; block efficiency {value[0]:.3f}")

    responses = lookup["responses"]
    options = ("--drafter", json.dumps(drafter), "--verifier", "greedy")
    row = engine.replay("lookup", responses, 0, *options)
    table = parquet.read_table(engine.work / "lookup.parquet").to_pydict()
    taus: dict[int, list[int]] = {}
    for response, survival in zip(table["response"], table["survival"], strict=True):
        taus.setdefault(response, []).append(round(sum(survival)))
    equal, steps = 0, 0
    for number, response in enumerate(r for r in responses if len(tokens_of(r)) > 1):
        position = 0
        for step in response["steps"][1:]:
            left = len(taus[number]) - position
            equal += len(step) - 1 == min(taus[number][position], left - 1)
            position, steps = position + len(step), steps + 1
    print(f"steps: vLLM {steps}, replay {row['steps']:.0f}; tau equal in {equal}")
    accepted = lookup["counters"]["vllm:spec_decode_num_accepted_tokens"]
    print(f"accepted: vLLM {accepted}, replay {row['steps'] * (row['block_efficiency_all_steps'] - 1):.0f}")


def drafters(engine: Engine, gamma: int) -> None:
    questions = [prompt.turns[0] for prompt in load_prompts("builtin", limit=32)]
    sampling = {"temperature": 0, "max_tokens": 64}
    plain = engine.run("plain", questions, sampling)["responses"]
    corpus, datastore = engine.work / "ids.jsonl", engine.work / "datastore"
    if not datastore.exists():
        tokenizer = load_tokenizer(TARGET).tokenizer
        lines = [json.dumps({"text": tokenizer.decode(tokens_of(response))}) + "\n" for response in plain]
        corpus.write_text("".join(lines), encoding="utf-8")
        build = ["build", "--tokenizer", TARGET, "--corpus", str(corpus), "--out", str(datastore)]
        subprocess.run([sys.executable, "-m", "crossdraft_rest", *build], check=True, stdout=subprocess.DEVNULL)
    suffix = {"name": "suffix", "gamma": gamma}
    configs = {
        "suffix": suffix,
        "ngram-cache": {"name": "ngram-cache", "gamma": gamma},
        "rest": {"name": "rest", "datastore": str(datastore), "gamma": gamma, "tree": False},
        "combine": {"name": "combine", "drafters": [suffix, *({"name": n, "gamma": gamma} for n in RETRIEVAL)]},
    }
    for name, drafter in configs.items():
        run = engine.run(name, questions, sampling, drafter=drafter, speculative=custom(gamma))
        same = sum(tokens_of(a) == tokens_of(b) for a, b in zip(plain, run["responses"], strict=True))
        value = interval(block_efficiency(run["responses"]))
        print(f"{name}: {same} of {len(plain)} texts unchanged; block efficiency {value[0]:.3f}")


def draft_model(engine: Engine, gamma: int) -> dict[str, Any]:
    """Speculative config of the exported draft model with sampled drafts."""
    path = engine.work / DRAFT_MODEL
    if not path.exists():
        crossdraft(
            "train", "export", "draft-model", DRAFT_MODEL, "--target", TARGET, "--dtype", "float32", "--out", str(path)
        )
    config = {"method": "draft_model", "model": str(path), "num_speculative_tokens": gamma}
    return config | {"draft_sample_method": "probabilistic"}


def sampled(engine: Engine, gamma: int, copies: int) -> None:
    questions = [prompt.turns[0] for prompt in load_prompts("builtin", categories=SHORT)]
    sampling = {"temperature": 1, "max_tokens": 64}
    speculative, runs, rows = draft_model(engine, gamma), {}, []
    drafter = json.dumps({"name": "draft-model", "model": DRAFT_MODEL, "gamma": gamma})
    for rule in ("block", "token", "vLLM"):
        strategies = {} if rule == "vLLM" else {"verifier": rule}
        run = engine.run(f"sampled-{rule}", questions, sampling, copies, 32, speculative=speculative, **strategies)
        responses, counters = run["responses"], run["counters"]
        runs[rule] = block_efficiency(responses)
        own = interval(runs[rule])
        drafts = counters["vllm:spec_decode_num_drafts"]
        counted = 1 + counters["vllm:spec_decode_num_accepted_tokens"] / drafts
        options = ("--target", TARGET, "--dtype", "float32", "--drafter", drafter)
        options += ("--verifier", "token" if rule == "vLLM" else rule)
        replay = engine.replay(f"sampled-{rule}", responses, 1, *options)["block_efficiency"]
        print(f"{rule}: {engine.verdict(f'sampled-{rule}', responses)}")
        predicted = f"{replay['value']:.3f} [{replay['low']:.3f}, {replay['high']:.3f}]"
        rows.append([rule, drafts, f"{counted:.3f}", "{:.3f} [{:.3f}, {:.3f}]".format(*own), predicted])
    heads = ["rule", "steps", "BE, counters", "BE, steps", "BE, replay of the responses"]
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))
    for rule in ("token", "vLLM"):
        print(f"block - {rule}, by steps: " + "{:+.3f} [{:+.3f}, {:+.3f}]".format(*interval(runs["block"], runs[rule])))

    everything = engine.work / "sampled.jsonl"
    parts = [engine.work / f"sampled-{rule}.jsonl" for rule in runs]
    everything.write_text("".join(part.read_text(encoding="utf-8") for part in parts), encoding="utf-8")
    options = ("--target", TARGET, "--dtype", "float32", "--drafter", drafter, "--verifier", "token", "--verifier")
    *_, last = json.loads(crossdraft("replay", str(everything), *options, "block", "--json"))["rows"]
    difference = last["differences"]["verifier"]
    value = "{value:+.3f} [{low:+.3f}, {high:+.3f}]".format(**difference["block_efficiency"])
    print(f"{last['verifier']} - {difference['from']}, by replay of all responses: {value}")


def certify(engine: Engine, gamma: int, copies: int) -> None:
    questions = [prompt.turns[0] for prompt in load_prompts("builtin", categories=("qa",), limit=4)]
    sampling = {"temperature": 1, "max_tokens": 12}
    model, copy = draft_model(engine, gamma), {"name": "prompt-lookup", "gamma": gamma}
    runs: dict[str, dict[str, Any]] = {
        "block, draft model": {"verifier": "block", "speculative": model},
        "token, draft model": {"verifier": "token", "speculative": model},
        "block, prompt-lookup": {"verifier": "block", "drafter": copy, "speculative": custom(gamma)},
        "vLLM's rule without the plug-in, draft model": {"speculative": model, "plugins": ""},
        "vLLM's rule, mended, draft model": {"speculative": model},
    }
    for label, strategies in runs.items():
        name = "certify-" + label.replace(", ", "-").replace(" ", "-").replace("'", "")
        run = engine.run(name, questions, sampling, copies, 64, **strategies)
        accepted = run["counters"]["vllm:spec_decode_num_accepted_tokens"]
        print(f"{label} ({run['counters']['vllm:spec_decode_num_drafts']} drafts, {accepted} tokens accepted)")
        print(engine.verdict(name, run["responses"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("greedy", "drafters", "sampled", "certify"))
    parser.add_argument("--vllm", required=True, type=Path, help="Python of vLLM's environment")
    parser.add_argument("--out", required=True, type=Path, help="directory of the responses")
    parser.add_argument("--gamma", type=int, default=4, help="draft length")
    parser.add_argument("--copies", type=int, help="responses per prompt (sampled: 2; certify: 48)")
    args = parser.parse_args()
    engine = Engine(args.vllm, args.out)
    if args.study == "greedy":
        greedy(engine, args.gamma)
    elif args.study == "drafters":
        drafters(engine, args.gamma)
    elif args.study == "sampled":
        sampled(engine, args.gamma, args.copies or 2)
    else:
        certify(engine, args.gamma, args.copies or 48)


if __name__ == "__main__":
    main()
