"""Measurements of a serving engine, llama.cpp's server, compared with replay and prediction.

    python benchmarks/engine_check.py --server PATH/llama-server --model FILE.gguf [--limit 24] [--ngram 3] [--gamma 8]
    python benchmarks/engine_check.py --server ... --model FILE.gguf --draft-model DRAFT.gguf --drafter MODEL --gamma 4
    python benchmarks/engine_check.py --model FILE.gguf --plain-url URL --url URL --cost passes.csv --gamma 8

1. A server that does not draft answers the prompts, greedily, one at a time.
2. What passes of the model cost is measured through the backend of plugins/crossdraft-llamacpp, on as many threads, and
   kept in the form of ``--cost``; or it is read from a file of that form.
3. ``crossdraft replay`` says what n-gram drafting would have gained on these responses: ``prompt-lookup``, which is
   what ``crossdraft advise`` takes for it, and ``ngram-simple`` of plugins/crossdraft-llamacpp, which drafts as the
   engine does. With ``--draft-model`` what ``draft-model`` would have with ``--drafter``: the same weights as
   crossdraft loads them.
4. ``crossdraft advise --export llama.cpp`` says the flags. Without ``--gamma`` they are of the draft length that it
   chooses; with it of that one, whether it pays or not.
5. A server with these flags answers the same prompts; its counters (``/metrics``) are imported as ``advise`` imports
   them.

Printed side by side: tokens emitted per call of the target, share of drafted tokens that were accepted, tokens per
second, the speed-up that was predicted from 2 and 3, and Pr(tau >= i) of a draft by position, replayed with 95 % over
prompts, and counted. With ``--url`` both servers are somebody's own: anything that
speaks ``/v1/completions`` and, for what the engine counted, ``/metrics``; texts are then tokenized again.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from crossdraft_llamacpp.ngram_simple import NgramSimple
from llamacpp_server import Answer, Endpoint, served
from tabulate import tabulate

from crossdraft import load_model
from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup
from crossdraft.framework.api.build import make_slots
from crossdraft.framework.cli.main import main as crossdraft
from crossdraft.framework.cli.replay.candidates import candidates_of
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engines.acceptance import Acceptance
from crossdraft.framework.engines.builtin.llama_cpp import LlamaCpp
from crossdraft.framework.engines.engine import Range, Schedule
from crossdraft.framework.engines.engine_log import Source
from crossdraft.framework.metrics.intervals import estimate
from crossdraft.framework.models.chat import encode
from crossdraft.framework.recipe.prompts import load_prompts
from crossdraft.framework.replay.replay import replay
from crossdraft.framework.replay.responses import Reader
from crossdraft.framework.report.table_utils import estimate_text


def passes(loaded: Any, widths: Sequence[int], context: int, repeats: int) -> list[tuple[int, float]]:
    """Median seconds of a pass over so many new tokens, all scored, behind ``context`` tokens."""
    draw = np.random.default_rng(0)
    lm: Any = make_slots(loaded, 1, context + max(widths) + 1)
    lm.start(0, draw.integers(0, lm.vocab_size, context + 1).tolist())
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(repeats):
        for width in widths:
            tokens = torch.from_numpy(draw.integers(0, lm.vocab_size, (1, width)))
            start = time.perf_counter()
            lm.forward(tokens)
            seconds[width].append(time.perf_counter() - start)
            lm.commit([0])
    return [(width, median(taken[1:])) for width, taken in seconds.items()]


def write_passes(file: Path, loaded: Any, widths: Sequence[int], args: argparse.Namespace) -> None:
    """A table for ``--cost``."""
    with file.open("w", newline="", encoding="utf-8") as out:
        table = csv.writer(out)
        table.writerow(["batch_size", "width", "context", "seconds"])
        for width, seconds in passes(loaded, widths, args.context, args.repeats):
            table.writerow([1, width, args.context, f"{seconds:.6f}"])
            print(f"pass over {width} tokens: {1000 * seconds:.2f} ms", file=sys.stderr)


def report(*arguments: str) -> Any:
    """JSON output of a crossdraft command."""
    out = StringIO()
    with redirect_stdout(out):
        code = crossdraft([*arguments, "--json"])
    if code:
        raise SystemExit(code)
    return json.loads(out.getvalue())


def speed(answers: list[Answer]) -> float:
    return sum(one.decoded for one in answers) / sum(one.seconds for one in answers)


def steps_of(file: Path, cls: Any, config: Any) -> Iterator[tuple[int, int, int]]:
    """Number of the response, drafted and emitted tokens of each call of the target, along greedy responses."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    texts = [(line["prompt"], line["tokens"]) for line in lines]
    along = zip(texts, cls.response_drafts(config, texts, config.gamma), strict=True)
    for number, ((_, response), rows) in enumerate(along):
        at = 0
        while at < len(response):
            # The engine, too, leaves room for the token that the target adds.
            draft = [token for token in rows[at].tolist() if token >= 0][: len(response) - at - 1]
            came = response[at : at + len(draft)]
            accepted = next((i for i, (a, b) in enumerate(zip(draft, came, strict=True)) if a != b), len(draft))
            yield number, len(draft), accepted + 1
            at += accepted + 1


def counted_of(steps: list[tuple[int, int, int]], gamma: int) -> np.ndarray:
    """``[responses, 1 + gamma]``: drafts of a response, and how many of them had tau >= 1 .. gamma."""
    sums = np.zeros((1 + max(number for number, _, _ in steps), 1 + gamma))
    for number, drafted, emitted in steps:
        sums[number, : emitted if drafted else 0] += 1
    return sums


def model_drafts(file: Path, drafter: str, gamma: int, target: str) -> np.ndarray:
    """The same of a drafter with a model, of the steps in which a whole draft had room."""
    greedy = Sampling(temperature=0)
    candidates = candidates_of([drafter], ["greedy"], [gamma], sampling=greedy, target=target)
    found = replay(Reader(target=target, sampling=greedy).read([str(file)]), candidates, by_prompt=True)
    (tally,) = found.candidates[0].tallies.values()
    return tally.by_prompt(gamma)


def by_position(replayed: np.ndarray, counted: Acceptance) -> list[list[Any]]:
    """A line a position: Pr(tau >= i) of a draft as replayed with its interval, as counted, whether that is inside."""
    lines = []
    for i, rate in enumerate(counted.marginal[: replayed.shape[1] - 1], start=1):
        one = estimate(lambda s: s[..., 1] / s[..., 0], replayed[:, [0, i]], least=0.0, most=1.0)
        inside = one.low is None or one.high is None or one.low <= rate <= one.high
        lines.append([i, estimate_text(one), f"{rate:.3f}", "yes" if inside else "no"])
    return lines


def predicted(steps: list[tuple[int, int, int]], curve: Mapping[int, float]) -> float:
    """The speed-up where a call costs what its own width costs: many steps of a lookup have no draft."""
    return sum(emitted for *_, emitted in steps) * curve[1] / sum(curve[width + 1] for _, width, _ in steps)


def replayed(file: Path, drafter: str, gamma: int, *more: str) -> tuple[float, float, tuple[float, ...]]:
    """Tokens per call, share of drafted tokens accepted, and Pr(tau >= i)."""
    found = report("replay", str(file), "--drafter", drafter, "--verifier", "greedy", "--gamma", str(gamma),
                 "--temperature", "0", *more)  # fmt: skip
    (row,) = [one for one in found["rows"] if one["gamma"] == gamma]
    drafts = row["drafted_per_step"]
    efficiency: float = row["block_efficiency_all_steps"]
    return efficiency, (efficiency - 1) / drafts if drafts else float("nan"), tuple(row["acceptance_marginal"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--server", help="llama-server")
    parser.add_argument("--draft-model", help="GGUF file of a draft model, in place of n-grams")
    parser.add_argument("--drafter", default="smollm2-draft-model", help="the same model, as crossdraft loads it")
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
    output = args.out / "responses.jsonl"
    with output.open("w", encoding="utf-8") as out:
        for i, (prompt, one) in enumerate(zip(prompts, plain, strict=True)):
            if len(one.tokens) > 1:
                line = {
                    "id": str(i),
                    "prompt": [*prompt, one.tokens[0]],
                    "tokens": one.tokens[1:],
                    "finish_reason": one.finish_reason,
                }
                out.write(json.dumps(line | {"temperature": 0}) + "\n")

    deepest = args.gamma or 16
    if args.cost is None:
        args.cost = args.out / "passes.csv"
        write_passes(args.cost, loaded, range(1, deepest + 2), args)

    sizes = {"min_ngram": args.ngram, "max_ngram": args.ngram}
    about_drafter = (
        {"name": "draft-model", "model": args.drafter} if args.draft_model else {"name": "prompt-lookup"} | sizes
    )
    drafter = json.dumps(about_drafter | ({"gamma": args.gamma} if args.gamma else {}))
    more: list[str] = []
    if args.draft_model:
        draft_cost = args.out / "draft-passes.csv"
        write_passes(draft_cost, load_model(args.draft_model), (1, 2), args)
        more = ["--draft-cost", str(draft_cost), "--draft-path", args.draft_model, "--target", args.model]
    advised = report("advise", "--replay", str(output), "--drafter", drafter, "--verifier", "greedy",
                   "--temperature", "0", "--cost", str(args.cost), "--batch-size", "1", "--context", str(args.context),
                   "--export", "llama.cpp", *more)  # fmt: skip
    best = advised["advice"][0]["best"]
    gamma = args.gamma or best["gamma"]
    print(f"advised: {'draft' if advised['advice'][0]['draft'] else 'do not draft'}, gamma {best['gamma']}, "
          f"speed-up {best['speed_up']['value']:.2f}", file=sys.stderr)  # fmt: skip

    rows: list[list[Any]] = []
    curve = {int(row["width"]): float(row["seconds"]) for row in csv.DictReader(args.cost.open(encoding="utf-8"))}
    if args.draft_model:
        efficiency, share, marginal = replayed(output, drafter, gamma, "--target", args.model)
        rows.append([f"replay of draft-model with {args.drafter}", efficiency, share, None, None])
        about_it = {"drafter": "draft-model", "temperature": 0, "point_mass": True, "model": args.draft_model}
        acceptance = Acceptance(marginal, str(output), **about_it)
        positions = model_drafts(output, drafter, gamma, args.model)
    for cls, options in () if args.draft_model else ((PromptLookup, sizes), (NgramSimple, {"n": args.ngram})):
        drafter = {"name": cls.name, "gamma": gamma} | options
        efficiency, share, marginal = replayed(output, json.dumps(drafter), gamma)
        walked = list(steps_of(output, cls, cls.Config(gamma=gamma, **options)))
        again = sum(emitted for *_, emitted in walked) / len(walked)
        assert abs(again - efficiency) < 0.005 * efficiency, f"replay says {efficiency}, walking {again}"
        rows.append([f"replay of {cls.name}", efficiency, share, None, predicted(walked, curve)])
        positions = counted_of(walked, gamma)  # in the end the engine's own rule's
        if cls is PromptLookup:
            about_it = {"drafter": cls.name, "temperature": 0, "point_mass": True, "options": sizes}
            acceptance = Acceptance(marginal, str(output), **about_it)
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
    print()
    heads = ["i", "Pr(tau >= i), replay", "counted", "inside"]
    print(tabulate(by_position(positions, counted), heads, disable_numparse=True))


def proposed(scrape: str) -> float:
    """Drafted tokens, by the server's own counter; the importer reads those that were accepted."""
    (line,) = [x for x in scrape.splitlines() if x.startswith("llamacpp:spec_decode_num_draft_tokens_total ")]
    return float(line.split()[-1])


if __name__ == "__main__":
    main()
