"""Shorter drafts derived from counters of longer ones, compared with a replay of the same responses.

    python benchmarks/shorter_drafts.py [--limit 24] [--max-new-tokens 80] [--longest 4,8]

For each drafter, verifier, temperature, subset of the prompts (all, and each category), longest draft K and gamma < K:
the block efficiency that `Acceptance.cut` derives from the acceptance by position at K, and the replayed one at gamma.
Prints, for each pair and temperature, the errors of a plain cut and of the model over all prompts, how many of these
the model's own part of the interval covers, and the share of all cases inside the 95 % interval. Responses are decoded
once and cached; drafters with a model are replayed on the categories with short prompts only. ``suffix`` needs
plugins/crossdraft-suffix.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from crossdraft_advisor.engines.acceptance import Acceptance
from crossdraft_advisor.replay.baseline_responses import baseline_responses
from crossdraft_advisor.replay.candidates import candidates_of
from crossdraft_advisor.replay.replay import replay
from crossdraft_advisor.replay.responses import Reader
from tabulate import tabulate

from crossdraft import Sampling
from crossdraft.framework import plugins

TARGET = "smollm2-135m-instruct"
#: Categories with short prompts.
SHORT = ("multi_turn", "translation", "qa", "math_reasoning")
LOOKUPS = ["prompt-lookup", "suffix"]
MODELS = [
    "{name: draft-model, model: smollm2-draft-model}",
    "{name: eagle3, model: smollm2-eagle3}",
]


class Case(NamedTuple):
    """Relative errors of a plain cut and of the model, half widths of the model's part and of the whole interval."""

    subset: str
    cut: float
    model: float
    model_half: float
    half: float
    inside: bool


def replayed(args: argparse.Namespace, temperature: float, longest: int) -> Iterator[tuple[str, str, Any, list[str]]]:
    """Drafter, verifier and tally of every pair, and the category of each of its prompts."""
    sampling = Sampling(temperature=temperature)
    path = baseline_responses(TARGET, args.prompts, sampling, limit=args.limit, maximum=args.max_new_tokens)
    for texts in (LOOKUPS, MODELS):
        drafters = [text for text in texts if text != "suffix" or text in plugins.entries("drafters")]
        candidates = candidates_of(drafters, [], range(1, longest + 1), sampling=sampling, target=TARGET)
        responses = Reader(target=TARGET, sampling=sampling, processed=True).read([str(path)])
        kept = (response for response in responses if texts is LOOKUPS or response.category in SHORT)
        result = replay(kept, candidates, by_prompt=True)
        for candidate in result.candidates:
            for (verifier, _), tally in candidate.tallies.items():
                yield candidate.drafter[0].name, verifier, tally, result.groups.category


def cases(tally: Any, categories: list[str], longest: list[int]) -> Iterator[Case]:
    """Every subset of the prompts, K and gamma, but those without accepted tokens or an interval."""
    names = np.array(categories)
    for subset in ("", *dict.fromkeys(categories)):
        rows = {gamma: tally.by_prompt(gamma) for gamma in range(1, max(longest) + 1)}
        rows = {gamma: sums[(names[: len(sums)] == subset) | (subset == "")] for gamma, sums in rows.items()}
        for maximum in longest:
            if not rows[maximum][:, 1:].sum():
                continue
            measured = Acceptance.from_rows(rows[maximum].tolist(), "replay", refusal="")
            for gamma in range(1, maximum):
                truth = float(1 + rows[gamma][:, 1:].sum() / rows[gamma][:, 0].sum())
                derived, plain = measured.cut(gamma), 1 + sum(measured.marginal[:gamma])
                be = derived.block_efficiency()
                if be.low is None or be.high is None:
                    continue
                own = 1.96 * float(np.sqrt(derived.model_error().variance))
                half = (be.high - be.low) / 2 / be.value
                inside = be.low <= truth <= be.high
                yield Case(subset, abs(plain / truth - 1), abs(be.value / truth - 1), own, half, inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--longest", default="4,8")
    args = parser.parse_args()
    longest = [int(text) for text in args.longest.split(",")]
    header = ["pair", "temperature", "cut: mean error", "model: mean", "largest", "within its own part", "half width"]
    rows, every = [], []
    for temperature in (0.0, 1.0):
        for drafter, verifier, tally, categories in replayed(args, temperature, max(longest)):
            every_case = list(cases(tally, categories, longest))
            whole = [case for case in every_case if not case.subset]
            errors = [np.mean([case.cut for case in whole]), np.mean([case.model for case in whole])]
            errors.append(max(case.model for case in whole))
            within = f"{sum(case.model <= case.model_half for case in whole)} of {len(whole)}"
            inside = f"{sum(case.inside for case in every_case)} of {len(every_case)}"
            numbers = [*(f"{100 * error:.1f} %" for error in errors), within]
            half = f"{100 * np.median([case.half for case in every_case]):.0f} %"
            rows.append([f"{drafter} × {verifier}", f"{temperature:g}", *numbers, half, inside])
            every += every_case
    print(tabulate(rows, headers=[*header, "inside"], tablefmt="github"))
    print(f"\ninside the interval: {sum(case.inside for case in every)} of {len(every)}")


if __name__ == "__main__":
    main()
