"""Advice compared with the best measured option, at every batch size of a finished run.

    crossdraft run smollm2-batch
    python benchmarks/advise_check.py runs/smollm2-batch-<hash> [--temperature 1]

The advice is computed twice, among the drafters, verifiers and draft lengths of the run, and plain decoding:

- from the run: acceptance and component times of its own cells, and its cost curves (``crossdraft advise runs/..``);
- from replay: acceptance replayed from the responses of plain decoding, and the cost curves only (``crossdraft advise
  --replay``), without any measurement of a drafter. Only chains with a replay formula are compared.

The table compares two decisions: drafting or not, and the best option if drafting. The second is "same", "within its
interval" if the advised option's measured speed-up lies within the 95 % interval of the best option's, else "missed",
with the share of the best speed-up that the advice reaches. Measurements are noisy, so the best among many similar
options is partly chance. With too few prompts for an interval, everything but "same" is "missed".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from crossdraft_advisor.advise.candidates import Candidate, imported, of_run
from crossdraft_advisor.advise.caveats import Remarks
from crossdraft_advisor.commands.advise.options import AdviseOptions
from crossdraft_advisor.commands.advise.replay import replayed_acceptances
from tabulate import tabulate

from crossdraft.framework.cost.finished_cells import curves_of, statistics
from crossdraft.framework.cost.load_run import read_run
from crossdraft.framework.metrics.intervals import Estimate
from crossdraft.framework.runs.records import CellResult


@dataclass(frozen=True)
class Option:
    """A drafter with its options, a verifier and a draft length."""

    drafter: str
    options: str
    rule: str
    gamma: int

    def __str__(self) -> str:
        shown = ", ".join(f"{k} {v}" for k, v in json.loads(self.options).items())
        return f"{self.drafter}{f' ({shown})' if shown else ''} × {self.rule}, {self.gamma}"


def option(candidate: Candidate, gamma: int) -> Option:
    result = candidate.acceptance
    options = {k: v for k, v in result.options.items() if k in ("K", "branching")}
    return Option(result.drafter or "", json.dumps(options, sort_keys=True), result.verifier or "", gamma)


def verdict(advised: Option, best: Option, measured: dict[Option, Estimate]) -> str:
    """Outcome of the comparison, as printed in the table."""
    if advised == best:
        return "same"
    low = measured[best].low
    return "within its interval" if low is not None and measured[advised].value >= low else "missed"


def replayed(directory: Path, results: Sequence[CellResult], temperature: float, rules: set[str]) -> list[Candidate]:
    """Candidates of the run's chains, from its plain responses and its cost curves."""
    cells = [item for item in results if not item.config.is_baseline and item.config.verifier.name in rules]
    curves = read_run(directory).summary.curves
    by_key: dict[str, list[Candidate]] = {}
    for cell in cells:
        config = cell.config
        options = {k: v for k, v in config.drafter.config.items() if k not in ("gamma", "policy") and v is not None}
        name = yaml.safe_dump({"name": config.drafter.name, **options}, default_flow_style=True, width=10_000).strip()
        if name in by_key:
            continue
        inputs = AdviseOptions(
            replay=(str(directory),),
            target=config.target,
            temperature=temperature,
            drafter=(name,),
            verifier=tuple(sorted(rules)),
        )
        target, drafter = curves_of(cell, curves)
        known = statistics(cell)
        if target is None or known is None:
            raise SystemExit(
                f"{directory} has no cost curve of {config.target}: run crossdraft cost --target {config.target}"
            )
        by_key[name] = imported(replayed_acceptances(inputs, Remarks()), target, drafter, known.context)
    return [item for some in by_key.values() for item in some]


def lines(
    how: str, candidates: Sequence[Candidate], measured: dict[int, dict[Option, Estimate]]
) -> Iterator[list[str | float]]:
    """Rows of the table, one per batch size."""
    for b, cells in sorted(measured.items()):
        own = {option(c, c.acceptance.gamma): c for c in candidates}
        predicted = {o: own[o].speed_up(b, o.gamma).value for o in own if o in cells}
        if not predicted:
            continue
        outcomes = {o: cells[o] for o in predicted}
        advised, best = max(predicted, key=predicted.__getitem__), max(outcomes, key=lambda o: outcomes[o].value)
        output, was = predicted[advised], outcomes[best]
        interval = "" if was.low is None else f" [{was.low:.2f}, {was.high:.2f}]"
        draft = "draft" if output > 1 else "off"
        right = "draft" if was.value > 1 else "off"
        open_ = was.low is not None and was.high is not None and was.low <= 1 <= was.high
        yield [
            how,
            b,
            len(outcomes),
            f"{draft}: " + ("same" if draft == right else "within its interval" if open_ else "missed"),
            f"{advised}: {output:.2f}",
            f"{outcomes[advised].value:.2f}",
            f"{best}: {was.value:.2f}{interval}",
            verdict(advised, best, outcomes),
            f"{outcomes[advised].value / was.value:.2f}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a finished run over several batch sizes")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rules", nargs="+", default=["token", "block"], help="that are replayed (token block)")
    args = parser.parse_args()
    run = read_run(args.run)
    results = [item for item in run.summary.results if item.config.sampling.temperature == args.temperature]
    candidates, notes = of_run(results, run.name, run.summary.curves)
    if not candidates:
        raise SystemExit(f"{args.run} has no pair to compare: {'; '.join(notes) or 'nothing drafts'}")
    measured: dict[int, dict[Option, Estimate]] = {}
    for candidate in candidates:
        for b, metrics in candidate.measured.items():
            assert metrics.speed_up is not None
            measured.setdefault(b, {})[option(candidate, candidate.acceptance.gamma)] = metrics.speed_up
    table = list(lines("run", candidates, measured))
    table += lines("replay", replayed(args.run, results, args.temperature, set(args.rules)), measured)
    heads = ("from", "B", "of", "draft?", "advised: predicted", "it measured", "best: measured", "pair, gamma", "share")
    print(tabulate(table, heads, tablefmt="github", disable_numparse=True))
    output = [str(line[7]) for line in table]
    print("\n" + ", ".join(f"{output.count(item)} {item}" for item in ("same", "within its interval", "missed")))


if __name__ == "__main__":
    main()
