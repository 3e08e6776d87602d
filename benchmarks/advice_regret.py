"""Speed lost by advice from one draft length: what every length of a finished run measured against what is advised.

    crossdraft run benchmarks/advice.yaml ...        # or another recipe with several draft lengths and batch sizes
    python benchmarks/advice_regret.py runs/advice-<hash>

For each pair of drafter and verifier, `crossdraft advise` is given plain decoding and the cells with the longest draft
(acceptance and seconds), and decides at every batch size: a length, or no drafts. The loss is the measured speed of
that decision against the best measured one, plain decoding included. "Sure": the interval excludes 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from crossdraft_advisor.advise.candidates import of_run
from crossdraft_advisor.advise.decision import decide
from tabulate import tabulate

from crossdraft.runs import CellResult, estimate_text, read_run

HEADS = ("drafter × verifier", "B", "advised", "predicted", "measured", "best measured", "loss, %")


def pairs(results: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """The cells of each drafter × verifier; their draft lengths and batch sizes differ."""
    by_pair: dict[str, list[CellResult]] = {}
    for result in results:
        if not result.config.is_baseline and result.metrics is not None:
            key = f"{result.config.drafter.name} × {result.config.verifier.name}"
            by_pair.setdefault(f"{key}, temperature {result.config.sampling.temperature:g}", []).append(result)
    return by_pair


def rows(
    title: str, cells: Sequence[CellResult], plain: Sequence[CellResult], name: str
) -> Iterator[list[str | float]]:
    """A row per batch size."""
    longest = max(cell.config.drafter.config["gamma"] for cell in cells)
    known = [cell for cell in cells if cell.config.drafter.config["gamma"] == longest]
    same = [cell for cell in plain if cell.config.sampling == cells[0].config.sampling]
    candidates, notes = of_run([*same, *known], name, [])
    for note in notes:
        print(note)
    rates = {cell.config.batch_size: cell.metrics.tokens_per_second for cell in same if cell.metrics is not None}
    for size in sorted(rates) if candidates else ():
        measured = {0: 1.0} | {
            cell.config.drafter.config["gamma"]: cell.metrics.tokens_per_second / rates[size]
            for cell in cells
            if cell.config.batch_size == size and cell.metrics is not None
        }
        step = decide(candidates, size)
        gamma = step.best.gamma if step.draft else 0
        if gamma not in measured:  # the nearest measured length stands for it
            gamma = min((g for g in measured if g), key=lambda g: abs(g - gamma))
        best = max(measured, key=measured.__getitem__)
        advised = f"{gamma or 'off'}{'' if step.sure else ' ?'}"
        outcome = f"{best or 'off'}: {measured[best]:.2f}"
        loss = 100 * (1 - measured[gamma] / measured[best])
        yield [
            title,
            size,
            advised,
            estimate_text(step.best.speed_up),
            f"{measured[gamma]:.2f}",
            outcome,
            f"{loss:.1f}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a finished run with several draft lengths")
    run = read_run(parser.parse_args().run)
    plain = [result for result in run.summary.results if result.config.is_baseline]
    table = [row for title, cells in pairs(run.summary.results).items() for row in rows(title, cells, plain, run.name)]
    print(tabulate(table, HEADS, tablefmt="github", disable_numparse=True))
    losses = [float(row[-1]) for row in table]
    print(f"\nloss at most 5 % in {sum(loss <= 5 for loss in losses)} of {len(losses)}, at most {max(losses):.1f} %")


if __name__ == "__main__":
    main()
