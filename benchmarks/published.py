"""Predicted speed-ups beside published ones, and the prior of step costs fitted to them.

    python benchmarks/published.py                # table by series, and totals, with the prior of the advisor
    python benchmarks/published.py --leave-out    # each source with a prior fitted to the others; takes long
    python benchmarks/published.py --refit        # writes a newly fitted cost/prior.yaml of the advisor

Each series of published/series.yaml is predicted at three levels of knowledge: acceptance only; plain decoding and the
longest draft; plain decoding, the longest and the shortest draft. Only lengths that were not given are compared. The
prior of the advisor was fitted to these series, so only --leave-out is a test on data that it has not seen. Each series
has one vote in every total; trees are shown, but not counted, because the nodes of a tree are not a draft length.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml
from crossdraft_advisor.cost import step_cost
from crossdraft_advisor.cost.step_cost import Prior, StepCost
from scipy import optimize
from tabulate import tabulate

from crossdraft.framework.util.estimate import Estimate

SERIES = Path(__file__).parent / "published" / "series.yaml"
LEVELS = ("acceptance only", "plain and one length", "plain and two lengths")


@dataclass(frozen=True)
class Series:
    """A published series: ratios of seconds of a step to plain seconds by draft length, if plain was published."""

    facts: Mapping[str, Any]
    plain_known: bool
    lengths: tuple[float, ...]
    gammas: tuple[int, ...]
    ratios: tuple[float, ...]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Series:
        rows = sorted(facts["rows"], key=lambda row: row["gamma"])
        plain, lengths = facts.get("plain"), tuple(row["length"] for row in rows)
        ratios = tuple((plain or 1.0) * row["length"] / row["tokens_per_s"] for row in rows)
        return cls(facts, plain is not None, lengths, tuple(row["gamma"] for row in rows), ratios)

    @property
    def source(self) -> str:
        return self.facts["source"]

    @property
    def is_chain(self) -> bool:
        return self.facts.get("kind") != "tree"

    def known(self, level: int) -> tuple[int, ...]:
        """Indices of the lengths that are given at a level: the longest, then the shortest too."""
        return ((), (len(self.gammas) - 1,), (0, len(self.gammas) - 1))[level]

    def cost(self, indices: Sequence[int], prior: Prior) -> StepCost:
        gammas, ratios = (tuple(values[i] for i in indices) for values in (self.gammas, self.ratios))
        return StepCost(gammas, ratios, plain_known=self.plain_known, prior=prior)


def read() -> list[Series]:
    return [Series.of(facts) for facts in yaml.safe_load(SERIES.read_text(encoding="utf-8"))]


def fit(series: Sequence[Series], evaluations: int = 150) -> Prior:
    """The prior of maximum evidence, without trees."""
    chains = [s for s in series if s.is_chain]

    def prior_of(x: np.ndarray) -> Prior:
        scale = (float(np.exp(x[2])), float(np.exp(x[3])))
        return Prior((float(x[0]), float(x[1])), scale, float(np.tanh(x[4])), 2.7, float(np.exp(x[5])))

    def loss(x: np.ndarray) -> float:
        prior = prior_of(x)
        return -sum(s.cost(range(len(s.gammas)), prior).log_evidence for s in chains) + _hyperprior(x)

    start = np.array([0.074, -1.423, math.log(0.153), math.log(0.732), 0.19, math.log(0.02)])
    return prior_of(
        optimize.minimize(loss, start, method="Nelder-Mead", options={"maxfev": evaluations, "xatol": 1e-2}).x
    )


def _hyperprior(x: np.ndarray) -> float:
    """Weak restoring force to scales of 0.2, 0.6 and 0.02."""
    return float(np.sum((x[[2, 3, 5]] - np.log([0.2, 0.6, 0.02])) ** 2) / 2 + x[4] ** 2 / 2)


@dataclass(frozen=True)
class Result:
    """Predictions for one series at one level.

    Attributes:
        errors: absolute relative errors of the speed-up.
        inside: share of the published speed-ups inside the 95 % interval.
        loss: speed lost by the advised choice (a draft length, or off) against the best published one; None
            with a single choice.
    """

    errors: tuple[float, ...]
    inside: float
    loss: float | None


def predicted(series: Series, level: int, prior: Prior) -> Result | None:
    """Compare the lengths that are not given at ``level``; None if all are, or if plain is not published."""
    known = series.known(level)
    others = [i for i in range(len(series.gammas)) if i not in known]
    if not others or not series.plain_known:
        return None
    cost = series.cost(known, prior)
    speed_ups = [
        cost.speed_up(Estimate(tokens, tokens, tokens), gamma)
        for gamma, tokens in zip(series.gammas, series.lengths, strict=True)
    ]
    published = [tokens / ratio for tokens, ratio in zip(series.lengths, series.ratios, strict=True)]
    errors = tuple(abs(speed_ups[i].value / published[i] - 1) for i in others)
    inside = fmean(
        low <= published[i] <= high
        for i in others
        if (low := speed_ups[i].low) is not None and (high := speed_ups[i].high) is not None
    )
    best = max(range(len(published)), key=lambda i: speed_ups[i].value)
    chosen = published[best] if level == 0 or speed_ups[best].value > 1 else 1.0
    return Result(errors, inside, 1 - chosen / max(1.0, *published))


def weighted_quantile(groups: Sequence[Sequence[float]], share: float) -> float:
    """Quantile of the values of all groups, each group with the same total weight."""
    values = sorted((value, 1 / len(group)) for group in groups for value in group)
    total = np.cumsum([weight for _, weight in values])
    return values[min(int(np.searchsorted(total, share * total[-1])), len(values) - 1)][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave-out", action="store_true", help="predict each source by a prior fitted without it")
    parser.add_argument("--refit", action="store_true", help="fit the prior to all series and write it")
    arguments = parser.parse_args()
    corpus = read()
    if arguments.refit:
        write(fit(corpus), corpus)
        return
    sources = sorted({s.source for s in corpus})
    priors = dict.fromkeys(sources, step_cost.published_prior())
    if arguments.leave_out:
        priors = {source: fit([s for s in corpus if s.source != source]) for source in sources}
    rows: list[list[str]] = []
    results: dict[int, list[Result]] = {level: [] for level in range(len(LEVELS))}
    for s in corpus:
        cells: list[str] = []
        for level in results:
            result = predicted(s, level, priors[s.source])
            if result is not None and s.is_chain:
                results[level].append(result)
            cells += ["", ""] if result is None else [f"{100 * max(result.errors):.1f}", f"{100 * result.inside:.0f}"]
        name = ", ".join(str(s.facts.get(key)) for key in ("model", "drafter", "batch_size"))
        rows.append([s.source, name, *cells])
    print(tabulate(rows, ["source", "series", *(c for _ in LEVELS for c in ("worst error, %", "inside, %"))]))
    print()
    print(tabulate([total(LEVELS[level], own) for level, own in results.items()], TOTALS))


TOTALS = ["known", "series", "median error, %", "90 %, %", "inside, %", "mean loss, %"]


def total(level: str, results: Sequence[Result]) -> list[Any]:
    """A row of totals, in per cent."""
    errors = [result.errors for result in results]
    losses = [result.loss for result in results if result.loss is not None]
    shares = (
        weighted_quantile(errors, 0.5),
        weighted_quantile(errors, 0.9),
        fmean(r.inside for r in results),
        fmean(losses),
    )
    return [level, len(results), *(f"{100 * share:.1f}" for share in shares)]


def write(prior: Prior, corpus: Sequence[Series]) -> None:
    """Write the prior with its provenance beside `step_cost`."""
    sources = len({s.source for s in corpus})
    values = {
        "centre": [round(x, 3) for x in prior.centre],
        "scale": [round(x, 3) for x in prior.scale],
        "correlation": round(prior.correlation, 2),
        "freedom": prior.freedom,
        "noise": round(prior.noise, 4),
    }
    head = (
        "# Prior of StepCost: python benchmarks/published.py --refit\n"
        f"# Fitted to {len(corpus)} series of {sources} sources in benchmarks/published/series.yaml.\n"
    )
    path = Path(step_cost.__file__).with_name("prior.yaml")
    path.write_text(head + yaml.safe_dump(values, default_flow_style=None, sort_keys=False), encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
