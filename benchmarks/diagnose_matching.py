"""Confusion of ``crossdraft diagnose --replay .. --counters ..``: servers that misread a head on purpose.

    python benchmarks/diagnose_matching.py [--servers 100] [--responses 100] [--pool 240] [--steps 900] [--keep DIR]

A tiny target gets an EAGLE-3 head that is trained for it (`tiny_heads`). A server is crossdraft's own decoder with this
head, misread: each reading of the catalogue is written to a directory of its own and decodes the prompts of a pool at
temperature 0. Its counters are those of the steps of 100 responses of the pool. The diagnosis gets the sound head,
these counters, and the same responses (``own``) or as many others of the pool (``other``). Three servers have no
reading in the catalogue: a head of an earlier checkpoint, random weights, and a state that is not fed back.

An answer is ``right`` if it names the truth alone; ``equal`` if it names it beside others, all of which have the same
counters on the whole pool, up to 2 % of the drafts at each position; ``among`` if it names it beside others; otherwise
it is wrong. A server without a reading is answered rightly if no reading is named.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crossdraft_advisor.diagnosis.matching import CONFIGURED, SAME, match
from crossdraft_advisor.diagnosis.misconfigurations import misconfigurations
from crossdraft_advisor.diagnosis.trials import Trial, TrialResult, engine_misreadings, run_trials
from crossdraft_advisor.engines.acceptance import Acceptance
from crossdraft_advisor.engines.counter_definitions import DEFINITIONS
from crossdraft_advisor.replay.engine_counts import EngineCounts
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.replay.teacher_forcing.lazy_models import Target
from safetensors.torch import save_file
from tabulate import tabulate
from tiny_heads import LAYERS, TOKENS, prompts, save_head, save_target, texts_of, train_head

from crossdraft import generate, load_model
from crossdraft.drafters.heads.eagle3 import Eagle3Head
from crossdraft.framework.api.build import configured
from crossdraft.framework.contracts.misconfiguration import Misconfiguration
from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.models.checkpoint import load_checkpoint

#: Our decoder cuts drafts to the remaining tokens, as llama.cpp's server does.
GAMMA, DEFINITION = 4, DEFINITIONS["llama.cpp"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "batch_size": 100}
#: Name of the truth of a server without a reading.
UNKNOWN = "no reading"


@dataclass(frozen=True)
class Server:
    """A server that decodes with the heads at ``path``; ``truth``: the name of its reading."""

    truth: str
    path: str
    options: dict[str, Any]


def written(heads: Checkpoint, path: Path) -> str:
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in heads.tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(heads.config), encoding="utf-8")
    return str(path)


def servers(
    folder: Path, heads: Checkpoint, readings: Sequence[Misconfiguration], others: dict[str, str]
) -> Iterator[Server]:
    for number, reading in enumerate(readings):
        changed = heads if reading.change is None else reading.change(heads)
        path = written(changed, folder / f"reading-{number}")
        yield Server(reading.mistake or CONFIGURED, path, {"layers": LAYERS, **reading.options})
    for name, path in others.items():
        yield Server(f"{UNKNOWN}: {name}", path, {"layers": LAYERS})


def counts_of(target: Any, server: Server, starts: Sequence[Sequence[int]]) -> np.ndarray:
    """``[prompts, 1 + GAMMA]``: drafts, and those that accepted at least 1, .., GAMMA tokens."""
    drafter = {"name": "eagle3", "model": server.path, "gamma": GAMMA, **server.options}
    rows = []
    for response in generate(target, starts, drafter=drafter, verifier="greedy", max_new_tokens=TOKENS - 1, **GREEDY):
        steps = [step for step in response.steps if step.nodes]
        rows.append([len(steps), *(sum(step.tau >= i for step in steps) for i in range(1, GAMMA + 1))])
    return np.array(rows)


@contextmanager
def lost_state() -> Iterator[None]:
    """EAGLE-3 heads whose state is not fed back."""
    own = Eagle3Head.recurrent
    Eagle3Head.recurrent = lambda self, out: torch.zeros_like(out)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Eagle3Head.recurrent = own  # type: ignore[method-assign]


def part(result: TrialResult, rows: np.ndarray) -> TrialResult:
    """The result on some of the responses."""
    assert result.counts is not None
    counts = EngineCounts(DEFINITION, GAMMA)
    counts.by_response = [result.counts.by_response[i] for i in rows]
    total = np.sum(counts.by_response, 0)
    counts.drafts, counts.per_position = float(total[0]), total[1:]
    return replace(result, counts=counts)


def verdict(truth: str, named: Sequence[str], rates: Mapping[str, np.ndarray]) -> str:
    """The column of an answer, or the wrong hypothesis; ``rates``: of each reading on the whole pool."""
    if truth.startswith(UNKNOWN):
        return next((name for name in named if name in rates), "right")
    if truth not in named:
        return named[0]
    others = [name for name in named if name != truth]
    if not others:
        return "right"
    same = all(name in rates and np.abs(rates[name] - rates[truth]).max() < 2 * SAME for name in others)
    return "equal" if same else "among"


def measured(args: argparse.Namespace, folder: Path) -> tuple[list[TrialResult], dict[str, np.ndarray]]:
    """The replay of each reading on the pool, and the counts of each server."""
    start = time.perf_counter()

    def log(text: str) -> None:
        print(f"{time.perf_counter() - start:5.0f} s  {text}", file=sys.stderr, flush=True)

    if not (folder / "head").exists():
        fresh = load_model(save_target(folder / "target"), dtype="float32", device="cpu")
        trained = train_head(fresh, texts_of(fresh, 1024, 0, 1.0), args.steps, args.steps // 2)
        for head, path in zip(trained, ("stale", "head"), strict=True):
            save_head(head, folder / path)
        log("trained")
    target = load_model(str(folder / "target"), dtype="float32", device="cpu")
    starts = prompts(args.pool, 1)
    plain = generate(target, starts, max_new_tokens=TOKENS, **GREEDY)
    responses = [
        Response(str(i), "", prompt, response.tokens, maximum=TOKENS)
        for i, (prompt, response) in enumerate(zip(starts, plain, strict=True))
    ]
    after = [[*response.prompt, response.tokens[0]] for response in responses]  # the prefill of a server emits a token
    log(f"decoded {args.pool} responses")
    heads = load_checkpoint(str(folder / "head"))
    drafter = configured("drafters", {"name": "eagle3", "model": str(folder / "head"), "layers": LAYERS})
    greedy = Target(str(folder / "target"), Sampling(temperature=0), dtype="float32")
    readings = [Misconfiguration("", ""), *misconfigurations(*drafter, heads, greedy.loaded.model)]
    readings += engine_misreadings(drafter, greedy.sampling, heads)
    results = []
    for result in run_trials(drafter, [Trial(item, greedy, responses) for item in readings], GAMMA, DEFINITION):
        log(f"replayed {result.misconfiguration.mistake or CONFIGURED} {result.reason[:60]}")
        results.append(result)
    counts = {}
    random = heads.with_tensors(
        {key: torch.randn_like(t) / t.shape[-1] ** 0.5 for key, t in heads.tensors.items() if t.dim() == 2}
    )
    with tempfile.TemporaryDirectory() as directory:
        others = {
            "earlier checkpoint": str(folder / "stale"),
            "random weights": written(random, Path(directory) / "random"),
        }
        for server in servers(Path(directory), heads, [r.misconfiguration for r in results if r.counts], others):
            counts[server.truth] = counts_of(target, server, after)
            log(f"served {server.truth}: {counts[server.truth].sum(0).tolist()}")
        with lost_state():
            sound = Server(f"{UNKNOWN}: state not fed back", str(folder / "head"), {"layers": LAYERS})
            counts[sound.truth] = counts_of(target, sound, after)
    return [result for result in results if result.counts], counts


def table(args: argparse.Namespace, folder: Path) -> str:
    results, counts = kept(args, folder)
    by_name = {result.misconfiguration.mistake or CONFIGURED: result for result in results}
    rates = {name: counts[name].sum(0)[1:] / counts[name].sum(0)[0] for name in by_name}
    rows, sums = [], np.zeros((2, 4), int)
    for truth, counted in counts.items():
        row = [truth[:70], " ".join(f"{rate:.2f}" for rate in counted.sum(0)[1:] / counted.sum(0)[0])]
        for number, scenario in enumerate(args.replay or ("own", "other")):
            answers: Counter[str] = Counter()
            for seed in range(args.servers):
                order = np.random.default_rng(seed).permutation(args.pool)
                served, rest = order[: args.responses], order[args.responses : 2 * args.responses]
                acceptance = Acceptance.from_rows([counted[served].sum(0)], "server")
                replayed = [part(result, served if scenario == "own" else rest) for result in results]
                named = match(replayed, acceptance, others=scenario == "other").named()
                answers[verdict(truth, named, rates)] += 1
            columns = [answers.pop(name, 0) for name in ("right", "equal", "among")]
            sums[number] += [*columns, answers.total()]
            others = ", ".join(f"{name[:40]} {n}" for name, n in answers.most_common(3))
            row += [_joined(columns), others]
            print(f"{scenario}  {row}", file=sys.stderr, flush=True)
        rows.append(row)
    cells = [cell for line in sums[: (len(rows[0]) - 2) // 2].tolist() for cell in (_joined(line[:3]), line[3])]
    rows.append(["all", "", *cells])
    right = "right / equal / among"
    columns = ["server", "accepted"]
    columns += [cell for name in args.replay or ("own", "other") for cell in (f"{name}: {right}", "wrong")]
    return tabulate(rows, columns, tablefmt="github")


def _joined(numbers: Sequence[int]) -> str:
    return " / ".join(map(str, numbers))


def kept(args: argparse.Namespace, folder: Path) -> tuple[list[TrialResult], dict[str, np.ndarray]]:
    """`measured`, from the file of an earlier call if there is one."""
    file = folder / f"counts-{args.pool}.json"
    if not file.exists():
        results, counts = measured(args, folder)
        replayed = [(r.misconfiguration.mistake, np.array(r.counts.by_response).tolist()) for r in results if r.counts]
        served = {name: rows.tolist() for name, rows in counts.items()}
        file.write_text(json.dumps({"replayed": replayed, "served": served}), encoding="utf-8")
    read = json.loads(file.read_text(encoding="utf-8"))
    results = []
    for mistake, rows in read["replayed"]:
        counts = EngineCounts(DEFINITION, GAMMA, by_response=[np.array(row) for row in rows])
        whole = TrialResult(Misconfiguration(mistake, ""), GAMMA, counts=counts)
        results.append(part(whole, np.arange(len(rows))))
    return results, {name: np.array(rows) for name, rows in read["served"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=100)
    parser.add_argument("--responses", type=int, default=100)
    parser.add_argument("--pool", type=int, default=240)
    parser.add_argument("--steps", type=int, default=900, help="training steps of the head")
    parser.add_argument("--replay", action="append", choices=("own", "other"), help="one of the two (repeatable)")
    parser.add_argument("--keep", type=Path, help="directory for models and counts, which a second call reads")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(table(args, args.keep or Path(directory)))


if __name__ == "__main__":
    main()
