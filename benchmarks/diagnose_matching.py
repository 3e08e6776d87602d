"""Confusion of ``crossdraft diagnose --replay .. --counters ..`` on real heads that a server misreads.

    python benchmarks/diagnose_matching.py [--servers 100] [--responses 48] [--max-new-tokens 32]

Replays the EAGLE-3 heads of the SmolLM2 pack under each reading on half of the responses. A server with that reading
decodes as many others, drawn from the other half with replacement: its counters are those of their replay, with chance.
Readings whose rates differ by less than 0.02 at each position from those of the named one count as right.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

import numpy as np
from crossdraft_advisor.commands.baseline_responses import baseline_responses
from crossdraft_advisor.diagnosis.matching import CONFIGURED, match
from crossdraft_advisor.diagnosis.misconfigurations import misconfigurations
from crossdraft_advisor.diagnosis.trials import Trial, TrialResult, engine_misreadings, run_trials
from crossdraft_advisor.engines.acceptance import Acceptance
from crossdraft_advisor.engines.counter_definitions import DEFINITIONS
from crossdraft_advisor.replay.engine_counts import EngineCounts
from crossdraft_advisor.replay.responses import Reader
from crossdraft_advisor.replay.teacher_forcing.lazy_models import Target
from tabulate import tabulate

from crossdraft.framework.api.build import configured
from crossdraft.framework.contracts.misconfiguration import Misconfiguration
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.models.checkpoint import load_checkpoint

TARGET, HEADS, GAMMA, ALIKE = "smollm2-135m-instruct", "smollm2-eagle3", 4, 0.02


def part(result: TrialResult, rows: np.ndarray) -> TrialResult:
    """The result on some of the responses."""
    assert result.counts is not None
    counts = EngineCounts(DEFINITIONS["vllm"], GAMMA)
    counts.by_response = [result.counts.by_response[i] for i in rows]
    total = np.sum(counts.by_response, 0)
    counts.drafts, counts.per_position = float(total[0]), total[1:]
    return replace(result, counts=counts)


def counted(result: TrialResult, rng: np.random.Generator, rows: np.ndarray) -> Acceptance:
    """Counters of a server that reads the heads as in a trial."""
    counts = part(result, rng.choice(rows, len(rows))).counts
    assert counts is not None
    numbers = [round(counts.drafts)]
    for before, after in zip((counts.drafts, *counts.per_position), counts.per_position, strict=False):
        numbers.append(int(rng.binomial(numbers[-1], min(after / before, 1.0) if before else 0.0)))
    return Acceptance.from_rows([numbers], "server")


def rates(result: TrialResult) -> np.ndarray:
    assert result.counts is not None
    return result.counts.per_position / result.counts.drafts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=100)
    parser.add_argument("--responses", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()
    sampling = Sampling(temperature=1.0)
    path = baseline_responses(
        TARGET, "builtin", sampling, limit=args.responses, maximum=args.max_new_tokens, dtype="float32"
    )
    responses = list(Reader(target=TARGET, sampling=sampling, processed=True).read([str(path)]))
    target = Target(TARGET, sampling, dtype="float32")
    drafter, heads = configured("drafters", {"name": "eagle3", "model": HEADS}), load_checkpoint(HEADS)
    readings = [Misconfiguration("", ""), *misconfigurations(*drafter, heads, target.loaded.model)]
    readings += engine_misreadings(drafter, sampling, heads)
    trials = [Trial(reading, target, responses) for reading in readings]
    results = [r for r in run_trials(drafter, trials, GAMMA, DEFINITIONS["vllm"]) if r.counts is not None]
    half = np.random.default_rng(0).permutation(len(responses))
    seen, other = half[: len(half) // 2], half[len(half) // 2 :]
    replayed = [part(result, seen) for result in results]
    by_name = {result.misconfiguration.mistake or CONFIGURED: result for result in results}
    rows = []
    for name, result in by_name.items():
        answers: Counter[str] = Counter()
        for seed in range(args.servers):
            best = match(replayed, counted(result, np.random.default_rng(seed), other)).assessments[0].hypothesis.name
            near = best in by_name and np.abs(rates(by_name[best]) - rates(result)).max() < ALIKE
            answers["right" if best == name else "as good" if near else best] += 1
        shown = " ".join(f"{rate:.2f}" for rate in rates(result))
        others = ", ".join(f"{key[:40]} {n}" for key, n in answers.most_common(3) if key not in ("right", "as good"))
        rows.append([name[:70], shown, answers["right"], answers["as good"], others])
    print(tabulate(rows, ["server reads the heads", "accepted", "right", "as good", "others"], tablefmt="github"))


if __name__ == "__main__":
    main()
