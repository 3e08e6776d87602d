"""Confusion of ``crossdraft diagnose --replay .. --counters ..``: servers that misread a drafter on purpose.

    python benchmarks/diagnose_matching.py [--drafter NAME ..] [--temperature 0] [--servers 100] [--keep DIR]

A tiny target gets a drafter of each kind (`tiny_drafters`). A server is crossdraft's own decoder that computes what a
reading of the catalogue describes: its heads or draft model are written to a directory of its own, or its prompts are
changed. It decodes the prompts of a pool; its counters are those of the steps of 100 responses. The diagnosis gets the
sound drafter, these counters, and the same responses (``own``) or as many others of the pool (``other``). Above
temperature 0, and with other prompts, each server has responses of its own. Further servers compute what no reading
describes: an earlier checkpoint that the diagnosis is not given, random weights.

An answer is right if it names the truth, ``alone`` or in a ``set`` of readings that the counters do not distinguish;
the table has the mean size of these sets. A healthy server must be called "as configured" before any other reading. A
server without a reading is answered rightly if no reading fits (``alone``) or each has at most 60 % (``set``); those of
``--unlisted`` are marked if they were held out while the diagnosis was written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crossdraft_advisor.diagnosis.matching import CONFIGURED, match
from crossdraft_advisor.diagnosis.readings import READINGS, Setup, readings
from crossdraft_advisor.diagnosis.text_fit import TextFit
from crossdraft_advisor.diagnosis.trials import Trial, TrialResult, run_trials
from crossdraft_advisor.engines.acceptance import Acceptance
from crossdraft_advisor.engines.counter_definitions import DEFINITIONS
from crossdraft_advisor.replay.engine_counts import EngineCounts
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.replay.teacher_forcing.lazy_models import Target
from tabulate import tabulate
from tiny_drafters import KINDS, Kind, save_chat_target
from tiny_heads import TOKENS, texts_of, written
from unlisted_faults import FAULTS

from crossdraft import CrossdraftError, Misconfiguration, Sampling, generate, load_model
from crossdraft.models import configured, load_checkpoint

#: Our decoder cuts drafts to the remaining tokens, as llama.cpp's server does.
GAMMA, DEFINITION = 4, DEFINITIONS["llama.cpp"]
#: Prefixes of the truth of a server without a reading, and of the reading of an earlier checkpoint.
UNKNOWN, LOADED = "no reading: ", "the server has loaded "
#: Share from which on a reading is the answer to a fault that no reading describes.
CLEAR = 0.6
#: Readings of which servers are made above temperature 0, where each needs replays of its own.
SAMPLED = (CONFIGURED, "the engine drafts")
#: Readings of prompts with which servers of heads are made, for the same reason.
PROMPTED = ("prompts begin with a BOS", "prompts are in the chat template")


@dataclass(frozen=True)
class Case:
    """A server: its counts ``[pool, 1 + GAMMA]``, and the number of the replays of its responses."""

    truth: str
    counts: list[list[int]]
    replays: int


@dataclass(frozen=True)
class Replayed:
    """Counts of a reading on the pool, and the fit of the responses to its prompts."""

    mistake: str
    counts: list[list[float]]
    random: bool
    log_likelihood: float
    share: float | None
    errors: float

    def part(self, rows: np.ndarray) -> TrialResult:
        """The result on some of the responses."""
        counts = EngineCounts(DEFINITION, GAMMA, random=self.random, responses=len(rows))
        counts.by_response = [np.array(self.counts[i]) for i in rows]
        total = np.sum(counts.by_response, 0)
        counts.drafts, counts.per_position = float(total[0]), total[1:]
        texts = TextFit(self.log_likelihood * len(rows) / len(self.counts), self.share, self.errors)
        return TrialResult(Misconfiguration(self.mistake, ""), GAMMA, counts=counts, texts=texts)


class Servers:
    """Servers of one kind of drafter at one temperature."""

    def __init__(self, folder: Path, kind: Kind, temperature: float, pool: int):
        self.folder, self.kind, self.temperature = folder, kind, temperature
        self.sampling: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, "batch_size": 120}
        if not (folder / "target").exists():
            save_chat_target(folder / "target")
        self.model = load_model(str(folder / "target"), dtype="float32", device="cpu")
        if not (folder / kind.name / "head").exists():
            (folder / kind.name).mkdir()
            writers = kind.make(
                self.model, torch.tensor(texts_of(self.model, 1024, 0, 1.0)), kind.steps, kind.steps // 2
            )
            for name, write in zip(("stale", "head"), writers, strict=True):
                write(folder / kind.name / name)
        self.head, self.stale = (str(folder / kind.name / name) for name in ("head", "stale"))
        self.starts = kind.prompts(pool, 1)
        options = {"name": kind.name, "model": self.head, "gamma": GAMMA, **kind.options}
        self.drafter = configured("drafters", options)
        self.target = Target(str(folder / "target"), Sampling(temperature=temperature), dtype="float32")
        self.heads = None if kind.name == "draft-model" else load_checkpoint(self.head)

    def trials(self, responses: Sequence[Response]) -> list[Trial]:
        setup = Setup(self.drafter, self.heads, self.target, responses, (self.stale,))
        return list(readings(setup, READINGS))

    def replays(self, responses: Sequence[Response]) -> list[Replayed]:
        results = []
        for result in run_trials(self.drafter, self.trials(responses), GAMMA, DEFINITION):
            counts, texts = result.counts, result.texts
            if counts is not None and texts is not None:
                rows = np.array(counts.by_response).tolist()
                results.append(Replayed(result.misconfiguration.mistake, rows, counts.random, **asdict(texts)))
        return results

    def served(self, trial: Trial, folder: Path) -> tuple[list[Response], np.ndarray]:
        """Responses and counts of a server that computes as in a trial."""
        cls, config = trial.drafter or self.drafter
        cls = type(cls.__name__, (cls,), {"emitted": 1})
        options = config.model_dump(exclude_unset=True) | dict(trial.misconfiguration.options)
        if trial.misconfiguration.change is not None:
            assert self.heads is not None
            options["model"] = written(trial.misconfiguration.change(self.heads), folder)
        elif trial.target.draft_model_change is not None:
            model = deepcopy(load_model(self.head, dtype="float32", device="cpu").model)
            with torch.no_grad():
                trial.target.draft_model_change(model)
            model.save_pretrained(folder)
            self.model.tokenizer.save_pretrained(folder)
            options["model"] = str(folder)
        return self.decoded((cls, cls.Config(**options)), [list(response.prompt) for response in trial.responses])

    def decoded(self, drafter: Any, starts: Sequence[list[int]]) -> tuple[list[Response], np.ndarray]:
        first = generate(self.model, starts, max_new_tokens=1, **self.sampling)  # the prefill of a server emits a token
        after = [[*start, *response.tokens] for start, response in zip(starts, first, strict=True)]
        verifier = "token" if self.temperature else "greedy"
        options = {"drafter": drafter, "verifier": verifier, "max_new_tokens": TOKENS - 1, "seed": 1}
        responses, counts = [], []
        for i, result in enumerate(generate(self.model, after, **options, **self.sampling)):
            steps = [step for step in result.steps if step.nodes]
            counts.append([len(steps), *(sum(step.tau >= k for step in steps) for k in range(1, GAMMA + 1))])
            tokens = [after[i][-1], *result.tokens]
            responses.append(Response(str(i), "", self.starts[i], tokens, maximum=TOKENS))
        return responses, np.array(counts)

    def unlisted(self) -> Iterator[tuple[str, list[Response], np.ndarray]]:
        """Truth, responses and counts of each server with a fault that no reading describes."""
        for fault in FAULTS:
            starts = [fault.prompt(start) for start in self.starts] if fault.prompt else self.starts
            with tempfile.TemporaryDirectory() as folder:  # of its own: models are cached by their name
                copy = shutil.copytree(self.head, Path(folder) / "model")
                cls, config = self.drafter
                faulty = fault.drafter(cls), cls.Config(**config.model_dump(exclude_unset=True) | {"model": str(copy)})
                yield f"{UNKNOWN}{fault.name}", *self.decoded(faulty, starts)
        yield self.earlier()

    def earlier(self) -> tuple[str, list[Response], np.ndarray]:
        """A server with a checkpoint that the diagnosis is not given."""
        cls, config = self.drafter
        stale = cls.Config(**config.model_dump(exclude_unset=True) | {"model": self.stale})
        return f"{UNKNOWN}an earlier checkpoint", *self.decoded((cls, stale), self.starts)

    def all(self) -> Iterator[tuple[str, list[Response], np.ndarray]]:
        """Truth, responses and counts of each server."""
        plain, _ = self.decoded(self.drafter, self.starts)
        for trial in self.trials(plain):
            truth = trial.misconfiguration.mistake or CONFIGURED
            chosen = SAMPLED if self.temperature else PROMPTED if trial.responses is not plain else ()
            if chosen and not truth.startswith(chosen) and (self.temperature or self.heads is not None):
                continue
            with tempfile.TemporaryDirectory() as folder, suppress(CrossdraftError):  # heads that do not load
                yield truth, *self.served(trial, Path(folder) / "model")
        if self.temperature:
            return
        yield self.earlier()
        if self.heads is not None:
            cls, config = self.drafter
            noise = {k: torch.randn_like(t) / t.shape[-1] ** 0.5 for k, t in self.heads.tensors.items() if t.dim() == 2}
            with tempfile.TemporaryDirectory() as folder:
                path = written(self.heads.with_tensors(noise), Path(folder) / "model")
                random = cls.Config(**config.model_dump(exclude_unset=True) | {"model": path})
                yield f"{UNKNOWN}random weights", *self.decoded((cls, random), self.starts)


def measured(
    servers: Servers, served: Iterator[tuple[str, list[Response], np.ndarray]], log: Any
) -> tuple[list[Case], list[list[Replayed]]]:
    """All servers, and the replays of their responses, which several may share."""
    cases, sets, replays = [], {}, []
    for truth, responses, counts in served:
        key = str([response.tokens for response in responses])
        if key not in sets:
            sets[key] = len(replays)
            replays.append(servers.replays(responses))
        cases.append(Case(truth, counts.tolist(), sets[key]))
        log(f"{truth}: {counts.sum(0).tolist()}, replays {sets[key]}")
    return cases, replays


def kept(args: argparse.Namespace, folder: Path, kind: Kind) -> tuple[list[Case], list[list[Replayed]]]:
    """`measured`, from the file of an earlier call if there is one."""
    start = time.perf_counter()

    def log(text: str) -> None:
        print(f"{time.perf_counter() - start:5.0f} s  {kind.name}  {text}", file=sys.stderr, flush=True)

    part = "-unlisted" if args.unlisted else ""
    file = folder / f"{kind.name}-{args.temperature:g}-{args.pool}{part}.json"
    if not file.exists():
        servers = Servers(folder, kind, args.temperature, args.pool)
        cases, replays = measured(servers, servers.unlisted() if args.unlisted else servers.all(), log)
        content = {"cases": list(map(asdict, cases)), "replays": [list(map(asdict, items)) for items in replays]}
        file.write_text(json.dumps(content), encoding="utf-8")
    read = json.loads(file.read_text(encoding="utf-8"))
    return [Case(**case) for case in read["cases"]], [[Replayed(**one) for one in items] for items in read["replays"]]


def answers_of(
    case: Case, replays: Sequence[Replayed], own: bool, args: argparse.Namespace
) -> tuple[Counter[str], float]:
    """Answers to as many servers as there are draws of responses, and the mean number of readings that they name."""
    unknown, sizes, answers = case.truth.startswith(UNKNOWN), [], Counter[str]()
    known = [one for one in replays if not (unknown and one.mistake.startswith(LOADED))]
    counts = np.array(case.counts)
    for seed in range(args.servers):
        order = np.random.default_rng(seed).permutation(len(counts))
        served = order[: args.responses]
        rest = served if own else order[args.responses : 2 * args.responses]
        acceptance = Acceptance.from_rows([counts[served].sum(0)], "server")
        matched = match([one.part(rest) for one in known], acceptance, own=None if own else False)
        named = matched.named()
        if unknown:
            readings_only = (item for item in matched.assessments if item.hypothesis.name in matched.results)
            likeliest = max((item.share, item.hypothesis.name) for item in readings_only)
            fits = "set" if likeliest[0] <= CLEAR else likeliest[1]
            answers["alone" if matched.unexplained else fits] += 1
        elif case.truth not in named or (case.truth == CONFIGURED and named[0] != CONFIGURED):
            answers[named[0]] += 1
        else:
            sizes.append(len(named))
            answers["alone" if len(named) == 1 else "set"] += 1
    return answers, float(np.mean(sizes)) if sizes else 0.0


def table(args: argparse.Namespace, folder: Path, kind: Kind) -> str:
    rows, totals = [], Counter[str]()
    cases, replays = kept(args, folder, kind)
    for case in cases:
        total = np.array(case.counts).sum(0)
        name = case.truth.removeprefix(UNKNOWN)
        mark = " (held out)" if any(fault.held_out and fault.name == name for fault in FAULTS) else ""
        row = [short(case.truth) + mark, " ".join(f"{rate:.2f}" for rate in total[1:] / total[0])]
        for own in (True, False):
            if not own and args.pool < 2 * args.responses:
                row += [""] * 3
                continue
            answers, size = answers_of(case, replays[case.replays], own, args)
            right, in_set = answers.pop("alone", 0), answers.pop("set", 0)
            others = ", ".join(f"{short(name)} {n}" for name, n in answers.most_common(2))
            row += [f"{right} / {in_set}", f"{size:.1f}" if in_set else "", others]
            totals[f"{own} right"] += right + in_set
            totals[f"{own} all"] += args.servers
        print(f"{kind.name}  {row}", file=sys.stderr, flush=True)
        rows.append(row)
    rows.append(["all", "", f"{totals['True right']} of {totals['True all']}", "", ""])
    rows[-1] += [f"{totals['False right']} of {totals['False all']}", "", ""] if totals["False all"] else [""] * 3
    columns = [
        "server",
        "accepted",
        "own: alone / in a set",
        "size",
        "wrong",
        "other: alone / in a set",
        "size",
        "wrong",
    ]
    return f"{kind.name}, temperature {args.temperature:g}\n\n{tabulate(rows, columns, tablefmt='github')}"


def short(name: str) -> str:
    return "another checkpoint (--or-model)" if name.startswith(LOADED) else name[:66]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", action="append", choices=tuple(KINDS), help="a kind of drafter (repeatable)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--servers", type=int, default=100)
    parser.add_argument("--responses", type=int, default=100)
    parser.add_argument("--pool", type=int, default=240, help="responses of a server; 200 are needed for `other`")
    parser.add_argument("--unlisted", action="store_true", help="servers of a draft model with unlisted faults")
    parser.add_argument("--keep", type=Path, help="directory for models and counts, which a second call reads")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = args.keep or Path(directory)
        folder.mkdir(exist_ok=True)
        for name in ["draft-model"] if args.unlisted else args.drafter or KINDS:
            print(table(args, folder, KINDS[name]), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
