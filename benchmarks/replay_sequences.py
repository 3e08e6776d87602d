"""Gain and cost of verifiers and of multiple sequences, from one replay of a target's responses.

    python benchmarks/replay_sequences.py PROMPTS [--limit 400] [--max-new-tokens 32] [--temperature 0.6,1] > section.md

Decodes the responses once and keeps them (as ``crossdraft advise`` does), replays token and block verification of a
chain and SpecInfer and SpecTr of K i.i.d. sequences at every draft length, and prints tables for
docs/results/replay.md: block efficiency and paired differences with 95 % intervals over prompts, in the form of Z.
Sun et al., "Block Verification Accelerates Speculative Decoding", 2024 (Figures 4 and 5, Table 5), and predicted
tokens/s by batch size from the curves of ``crossdraft cost``: each verifier at its best draft length, without the time
of verification and bookkeeping. Target rows of multiple sequences are counted without shared nodes, an upper bound.
"""

from __future__ import annotations

import argparse
from typing import Any

from crossdraft_advisor.replay.aggregate import Tally, difference
from crossdraft_advisor.replay.baseline_responses import baseline_responses
from crossdraft_advisor.replay.candidates import candidates_of
from crossdraft_advisor.replay.replay import ReplayResult, replay
from crossdraft_advisor.replay.responses import Reader
from tabulate import tabulate

from crossdraft import Sampling
from crossdraft.framework.cost.prediction import CellStatistics, Prediction, predict
from crossdraft.runs import Curve, estimate_text, stored_curves

#: Titles of (verifier, number of sequences) in the tables.
Rule = tuple[str, int]
GAMMAS = range(1, 17)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
#: Draft lengths of the tables.
SHOWN = (1, 2, 4, 8, 16)


def replayed(args: argparse.Namespace, sampling: Sampling) -> tuple[ReplayResult, dict[Rule, Tally]]:
    """Acceptance of all verifiers on the responses at one temperature."""
    path = baseline_responses(args.target, args.prompts, sampling, limit=args.limit, maximum=args.max_new_tokens)
    ks = [int(k) for k in args.k.split(",")]
    common: dict[str, Any] = {"sampling": sampling, "target": args.target}
    chain = candidates_of([f"{{name: draft-model, model: {args.drafter}}}"], ["token", "block"], GAMMAS, **common)
    drafter = f"{{name: draft-model-iid, model: {args.drafter}}}"
    multiple = candidates_of([drafter], ["specinfer", "spectr"], GAMMAS, ks=ks, **common)
    # Responses decoded by this script are stored with the log P of their sampling distribution.
    reader = Reader(target=args.target, sampling=sampling, processed=True)
    result = replay(reader.read([str(path)]), [*chain, *multiple])
    return result, {key: tally for candidate in result.candidates for key, tally in candidate.tallies.items()}


def title(rule: Rule) -> str:
    return rule[0] if rule[0] in ("token", "block") else f"{rule[0]} K={rule[1]}"


def predicted(tally: Tally, gamma: int, batch_size: int, target: Curve, drafter: Curve, context: float) -> Prediction:
    """Cost of a step: one draft-model pass over K tokens for each level, and one target pass over all nodes."""
    length = tally.row(gamma).block_efficiency
    assert length is not None
    cell = CellStatistics(
        batch_size, batch_size, length.value, {tally.k * gamma: 1.0}, context, passes=gamma, draft_width=tally.k
    )
    return predict(cell, target, drafter)


def differences(tallies: dict[Rule, Tally]) -> list[tuple[str, list[str]]]:
    """Paired differences between each verifier and its baseline, at the draft lengths of the tables."""
    results = []
    for (rule, k), tally in tallies.items():
        if rule == "token" or (rule == "specinfer" and k == 1):
            continue
        others = [("token", 1)] if rule == "block" else [("block", 1)]
        if rule == "spectr" and k > 1:
            others.append(("specinfer", k))
        for other in others:
            cells = [estimate_text(difference(tally, g, tallies[other], g), "+") for g in SHOWN]
            results.append((f"{title((rule, k))} less {title(other)}", cells))
    return results


def section(args: argparse.Namespace, sampling: Sampling, curves: tuple[Curve, Curve]) -> None:
    result, tallies = replayed(args, sampling)
    print(f"\n### temperature {sampling.temperature:g}\n")
    print(f"{result.responses} responses, {result.tokens} tokens.\n")
    heads = ["rule", *(f"gamma={g}" for g in SHOWN)]
    efficiency = [[title(r), *(estimate_text(t.row(g).block_efficiency) for g in SHOWN)] for r, t in tallies.items()]
    print(tabulate(efficiency, heads, tablefmt="github", disable_numparse=True))
    print("\nPaired differences of block efficiency, on the same texts:\n")
    rows = [[subject, *cells] for subject, cells in differences(tallies)]
    print(tabulate(rows, ["", *heads[1:]], tablefmt="github", disable_numparse=True))
    print("\nTarget rows for each emitted token, at most:\n")
    rows = [[title(r), *(f"{t.row(g).target_rows_per_token:.2f}" for g in SHOWN)] for r, t in tallies.items()]
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))
    print("\nPredicted speed-up over plain decoding at the best draft length (in brackets), by batch size:\n")
    rows = []
    for rule, tally in tallies.items():
        best = [max((predicted(tally, g, b, *curves, args.context).speed_up, -g) for g in GAMMAS) for b in BATCH_SIZES]
        rows.append([title(rule), *(f"{value:.2f} ({-minus})" for value, minus in best)])
    print(tabulate(rows, ["rule", *(f"B = {b}" for b in BATCH_SIZES)], tablefmt="github", disable_numparse=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default="smollm2-draft-model")
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", default="0.6,1")
    parser.add_argument("--k", default="1,2,4,8")
    parser.add_argument("--context", type=int, default=128, help="context length in tokens, for predictions")
    args = parser.parse_args()
    group = {curve.model: curve for curve in stored_curves()}
    if missing := [name for name in (args.target, args.drafter) if name not in group]:
        parser.error(f"no cost curve of {', '.join(missing)}: measure it with crossdraft cost")
    curves = group[args.target], group[args.drafter]
    for temperature in map(float, args.temperature.split(",")):
        section(args, Sampling(temperature=temperature), curves)


if __name__ == "__main__":
    main()
