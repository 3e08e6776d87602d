"""Does a serving engine do what was said of it? llama.cpp's server beside replay and prediction.

    python benchmarks/engine_check.py --server PATH/llama-server --model FILE.gguf [--limit 24] [--ngram 3] [--gamma 8]
    python benchmarks/engine_check.py --model FILE.gguf --plain-url URL --url URL --cost passes.csv --gamma 8

1. A server that does not draft answers the prompts, greedily, one at a time.
2. What passes of the model cost is measured through the backend of plugins/crossdraft-llamacpp, on as many threads, and
   kept in the form of ``--cost``; or it is read from a file of that form.
3. ``crossdraft replay`` says what n-gram drafting would have gained on these responses: ``prompt-lookup``, which is
   what ``crossdraft advise`` takes for it, and ``ngram-simple``, which drafts by the engine's own rule (below).
4. ``crossdraft advise --export llama.cpp`` says the flags. Without ``--gamma`` they are of the draft length that it
   chooses; with it of that one, whether it pays or not.
5. A server with these flags answers the same prompts; its counters (``/metrics``) are imported as ``advise`` imports
   them.

Printed side by side: tokens emitted per call of the target, share of drafted tokens that were accepted, tokens per
second, and the speed-up that was predicted from 2 and 3. With ``--url`` both servers are somebody's own: anything that
speaks ``/v1/completions`` and, for what the engine counted, ``/metrics``; texts are then tokenized again.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import torch
from tabulate import tabulate

from crossdraft import Drafter, DraftTraits, StrategyConfig, hookimpl, load_model
from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup
from crossdraft.framework.advise.acceptance import Acceptance
from crossdraft.framework.advise.engine import Range, Schedule
from crossdraft.framework.advise.engines.llama_cpp import LlamaCpp
from crossdraft.framework.advise.source import Source
from crossdraft.framework.cli.main import main as crossdraft
from crossdraft.framework.decoding.build import make_slots
from crossdraft.framework.models.chat import encode
from crossdraft.framework.plugins import manager
from crossdraft.framework.runs.prompts import load_prompts


class NgramSimple(Drafter):
    """llama.cpp's ``ngram-simple``: the latest earlier place of the last n tokens, and up to gamma tokens behind it.

    What it leaves out: texts of no more than n + gamma + 1 tokens, a place at the very beginning, the last token of the
    text, and drafts of fewer than n tokens.
    """

    name = "ngram-simple"

    class Config(StrategyConfig):
        gamma: int = 8
        n: int = 3

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits("chain", True, config.gamma)

    @classmethod
    def drafts_along(cls, config: Any, texts: Iterable[Any], depth: int) -> Iterator[np.ndarray]:
        for prompt, response in texts:
            whole = [*prompt, *response]
            rows = np.full((len(response), depth), -1)
            for t in range(len(response)):
                found = drafted(whole[: len(prompt) + t], config.n, min(config.gamma, depth))
                rows[t, : len(found)] = found
            yield rows

    def propose(self, sequences: Any, rng: Any) -> Any:
        raise NotImplementedError  # it is replayed, not run


def drafted(text: Sequence[int], n: int, gamma: int) -> list[int]:
    """What ``ngram-simple`` drafts behind ``text``."""
    held = len(text) - 1  # the engine looks among the tokens before the last
    if held <= n + gamma + 1:
        return []
    suffix = list(text[-n:])
    for place in range(held - n - 1, 0, -1):
        if list(text[place : place + n]) == suffix:
            found = list(text[place + n : min(place + n + gamma, held)])
            return found if len(found) >= n else []
    return []


class Registered:
    """The drafter above, as a plug-in of this process."""

    @hookimpl
    def crossdraft_register_drafters(self, register: Any) -> None:
        register("ngram-simple", NgramSimple, summary="llama.cpp's n-gram drafting")


@dataclass
class Answer:
    """One response: its tokens, and the seconds that decoding took, without those of the prompt where that is known."""

    tokens: list[int]
    finish: str
    seconds: float
    decoded: int


class Endpoint:
    """A server: ours, which tells token ids, or anybody's ``/v1/completions``."""

    def __init__(self, url: str, native: bool, tokenizer: Any, ends: Sequence[int]):
        self.url, self.native, self.tokenizer, self.ends = url.rstrip("/"), native, tokenizer, ends

    def answer(self, prompt: list[int], most: int) -> Answer:
        asked = {"prompt": prompt, "temperature": 0, "cache_prompt": False}
        begun = time.perf_counter()
        if self.native:
            said = self._post("/completion", asked | {"n_predict": most, "return_tokens": True})
            tokens, finish = said["tokens"], "stop" if said["stop_type"] == "eos" else "length"
        else:
            said = self._post("/v1/completions", asked | {"max_tokens": most})
            choice = said["choices"][0]
            tokens, finish = (
                self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"],
                choice["finish_reason"],
            )
            if finish == "stop" and (not tokens or tokens[-1] not in self.ends):
                tokens = [*tokens, self.ends[0]]
        wall = time.perf_counter() - begun
        timings = said.get("timings")
        if timings is None:
            return Answer(tokens, finish, wall, len(tokens))
        return Answer(tokens, finish, timings["predicted_ms"] / 1000, timings["predicted_n"])

    def metrics(self) -> str:
        with urlopen(f"{self.url}/metrics", timeout=60) as said:
            return said.read().decode()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(self.url + path, json.dumps(body).encode(), headers), timeout=600) as said:
            return json.loads(said.read())


@contextmanager
def served(args: argparse.Namespace, flags: Sequence[str], tokenizer: Any, ends: Sequence[int]) -> Iterator[Endpoint]:
    """A server of ours for as long as it is needed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [args.server, "--model", args.model, "--port", str(port), "--host", "127.0.0.1", "--metrics"]
    command += ["--parallel", "1", "--ctx-size", str(args.room), "--threads", str(args.threads), *flags]
    print(f"$ {shlex.join(command)}", file=sys.stderr)
    with args.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", True, tokenizer, ends)
        for _ in range(600):
            try:
                with urlopen(f"{endpoint.url}/health", timeout=5):
                    break
            except (URLError, OSError):
                if process.poll() is not None:
                    raise SystemExit(f"{args.server} ended with code {process.returncode}; see {args.log}") from None
                time.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        process.wait(30)


def passes(loaded: Any, widths: Sequence[int], context: int, repeats: int) -> list[tuple[int, float]]:
    """Median seconds of a pass over so many new tokens, all scored, behind ``context`` tokens."""
    draw = np.random.default_rng(0)
    lm: Any = make_slots(loaded, 1, context + max(widths) + 1)
    lm.begin(0, draw.integers(0, lm.vocab_size, context + 1).tolist())
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(repeats):
        for width in widths:
            tokens = torch.from_numpy(draw.integers(0, lm.vocab_size, (1, width)))
            begun = time.perf_counter()
            lm.grow(tokens)
            seconds[width].append(time.perf_counter() - begun)
            lm.keep([0])
    return [(width, median(taken[1:])) for width, taken in seconds.items()]


def told(*arguments: str) -> Any:
    """What a command of crossdraft prints as JSON."""
    out = StringIO()
    with redirect_stdout(out):
        code = crossdraft([*arguments, "--json"])
    if code:
        raise SystemExit(code)
    return json.loads(out.getvalue())


def speed(answers: list[Answer]) -> float:
    return sum(one.decoded for one in answers) / sum(one.seconds for one in answers)


def rounds_of(file: Path, cls: Any, config: Any) -> Iterator[tuple[int, int]]:
    """Drafted tokens and emitted ones of each call of the target, round after round along greedy responses."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    texts = [(line["prompt"], line["tokens"]) for line in lines]
    for (_, response), rows in zip(texts, cls.drafts_along(config, texts, config.gamma), strict=True):
        at = 0
        while at < len(response):
            # The engine, too, leaves room for the token that the target adds.
            draft = [token for token in rows[at].tolist() if token >= 0][: len(response) - at - 1]
            came = response[at : at + len(draft)]
            accepted = next((i for i, (a, b) in enumerate(zip(draft, came, strict=True)) if a != b), len(draft))
            yield len(draft), accepted + 1
            at += accepted + 1


def predicted(rounds: list[tuple[int, int]], curve: Mapping[int, float]) -> float:
    """The speed-up where a call costs what its own width costs: many rounds of a lookup have no draft."""
    return sum(emitted for _, emitted in rounds) * curve[1] / sum(curve[width + 1] for width, _ in rounds)


def replayed(file: Path, drafter: str, gamma: int) -> tuple[float, float, tuple[float, ...]]:
    """Tokens per call, share of drafted tokens accepted, and Pr(tau >= i)."""
    found = told("replay", str(file), "--drafter", drafter, "--verifier", "greedy", "--gamma", str(gamma),
                 "--temperature", "0")  # fmt: skip
    (row,) = [one for one in found["rows"] if one["gamma"] == gamma]
    drafts = row["drafted_per_round"]
    efficiency: float = row["block_efficiency_all_rounds"]
    return efficiency, (efficiency - 1) / drafts if drafts else float("nan"), tuple(row["acceptance_marginal"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--server", help="llama-server")
    parser.add_argument("--url", help="a server that drafts, instead")
    parser.add_argument("--plain-url", help="one that does not")
    parser.add_argument("--cost", type=Path, help="CSV of batch_size,width,context,seconds, instead of measuring")
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--ngram", type=int, default=3)
    parser.add_argument("--gamma", type=int)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("engine-check"))
    args = parser.parse_args()
    if not args.server and not (args.url and args.plain_url and args.gamma):
        parser.error("give --server, or --url, --plain-url and the --gamma that the drafting one was started with")
    args.out.mkdir(parents=True, exist_ok=True)
    args.log = args.out / "server.log"
    torch.set_num_threads(args.threads)
    manager().register(Registered(), "engine-check")

    loaded = load_model(args.model)
    texts = [prompt.turns[0] for prompt in load_prompts(args.prompts)][: args.limit]
    prompts = [encode(loaded.tokenizer, [text]) for text in texts]
    args.room = max(map(len, prompts)) + args.max_new_tokens + 64
    about = loaded.tokenizer, loaded.eos_token_ids

    @contextmanager
    def endpoint(url: str | None, flags: Sequence[str]) -> Iterator[Endpoint]:
        if args.server:
            with served(args, flags, *about) as found:
                yield found
        else:
            assert url
            yield Endpoint(url, False, *about)

    with endpoint(args.plain_url, ["--spec-type", "none"]) as server:
        server.answer(prompts[0], 8)  # warm
        plain = [server.answer(prompt, args.max_new_tokens) for prompt in prompts]
    # The engine's first token comes with the prompt's own pass, and drafting begins behind it.
    said = args.out / "said.jsonl"
    with said.open("w", encoding="utf-8") as out:
        for i, (prompt, one) in enumerate(zip(prompts, plain, strict=True)):
            if len(one.tokens) > 1:
                line = {
                    "id": str(i),
                    "prompt": [*prompt, one.tokens[0]],
                    "tokens": one.tokens[1:],
                    "finish": one.finish,
                }
                out.write(json.dumps(line | {"temperature": 0}) + "\n")

    deepest = args.gamma or 16
    if args.cost is None:
        args.cost = args.out / "passes.csv"
        with args.cost.open("w", newline="", encoding="utf-8") as out:
            table = csv.writer(out)
            table.writerow(["batch_size", "width", "context", "seconds"])
            for width, seconds in passes(loaded, range(1, deepest + 2), args.context, args.repeats):
                table.writerow([1, width, args.context, f"{seconds:.6f}"])
                print(f"pass over {width} tokens: {1000 * seconds:.2f} ms", file=sys.stderr)

    sizes = {"min_ngram": args.ngram, "max_ngram": args.ngram}
    lookup = json.dumps({"name": "prompt-lookup"} | sizes | ({"gamma": args.gamma} if args.gamma else {}))
    advised = told("advise", "--replay", str(said), "--drafter", lookup, "--verifier", "greedy", "--temperature", "0",
                   "--cost", str(args.cost), "--batch-size", "1", "--context", str(args.context),
                   "--export", "llama.cpp")  # fmt: skip
    best = advised["advice"][0]["best"]
    gamma = args.gamma or best["gamma"]
    print(f"advised: {'draft' if advised['advice'][0]['draft'] else 'do not draft'}, gamma {best['gamma']}, "
          f"speed-up {best['speed_up']['value']:.2f}", file=sys.stderr)  # fmt: skip

    rows: list[list[Any]] = []
    curve = {int(row["width"]): float(row["seconds"]) for row in csv.DictReader(args.cost.open(encoding="utf-8"))}
    for cls, options in ((PromptLookup, sizes), (NgramSimple, {"n": args.ngram})):
        drafter = {"name": cls.name, "gamma": gamma} | options
        efficiency, share, marginal = replayed(said, json.dumps(drafter), gamma)
        walked = list(rounds_of(said, cls, cls.Config(gamma=gamma, **options)))
        again = sum(emitted for _, emitted in walked) / len(walked)
        assert abs(again - efficiency) < 0.005 * efficiency, f"replay says {efficiency}, walking {again}"
        rows.append([f"replay of {cls.name}", efficiency, share, None, predicted(walked, curve)])
        if cls is PromptLookup:
            about_it = {"drafter": cls.name, "temperature": 0, "point_mass": True, "options": sizes}
            acceptance = Acceptance(marginal, str(said), **about_it)
    rows.insert(1, ["crossdraft advise", None, None, None, best["speed_up"]["value"]])
    settings = LlamaCpp().export(Schedule(acceptance, (Range(1, 1, gamma),), {}))
    for remark in settings.remarks:
        print(f"remark: {remark}", file=sys.stderr)

    with endpoint(args.url, shlex.split(settings.text.replace("\\\n", " "))) as server:
        server.answer(prompts[0], 8)
        before = server.metrics()
        drafting = [server.answer(prompt, args.max_new_tokens) for prompt in prompts]
        after = server.metrics()
    (args.out / "metrics.txt").write_text(after, encoding="utf-8")
    emitted = sum(one.decoded for one in drafting)
    (counted,) = LlamaCpp().read(Source(after, "metrics"), Source(before, "before"))
    assert counted.drafts is not None
    accepted = counted.drafts * sum(counted.marginal)
    called = emitted - len(prompts)  # the first token comes with the prompt's own pass
    efficiency = called / (called - accepted)
    share = accepted / (proposed(after) - proposed(before))
    rows.insert(0, ["engine, not drafting", 1.0, None, speed(plain), 1.0])
    rows.append(["engine, drafting", efficiency, share, speed(drafting), speed(drafting) / speed(plain)])
    same = sum(a.tokens == b.tokens for a, b in zip(plain, drafting, strict=True))
    print(f"{len(prompts)} prompts, {emitted} tokens, n = {args.ngram}, gamma = {gamma}, {args.threads} threads; "
          f"{same} responses are the same with and without drafting")  # fmt: skip
    print(tabulate(rows, ["", "tokens per call", "drafted tokens accepted", "tokens/s", "speed-up"], floatfmt=".3f"))


def proposed(scrape: str) -> float:
    """Drafted tokens, by the server's own counter; the importer reads those that were accepted."""
    (line,) = [x for x in scrape.splitlines() if x.startswith("llamacpp:spec_decode_num_draft_tokens_total ")]
    return float(line.split()[-1])


if __name__ == "__main__":
    main()
