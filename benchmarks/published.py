"""Predicted speeds beside published ones, and the prior of step costs fitted to them.

    python benchmarks/published.py                          # totals: each source with a prior fitted to the others
    python benchmarks/published.py --series --csv FILE      # also a row for each series, and every prediction
    python benchmarks/published.py --in-sample              # with the prior of the advisor, which has seen all series
    python benchmarks/published.py --refit                  # fits cost/prior.yaml of the advisor to all series

Each series of published/series.yaml is predicted at the levels of knowledge of `LEVELS`; only lengths that were not
given are compared, and each series has one vote in every total. Trees are neither fitted nor predicted: their nodes
are not a draft length.

The fit: the likelihood of each series is evaluated once, on a grid of (log a, log b) and of the error of a measurement;
the evidence of a prior is its density on the grid times these. The n series of one source count as sqrt(n): they share
server and hands. Hyperparameters have the weak priors of `HYPERPRIOR` and are integrated out by importance sampling;
the prior that is written is the Student t nearest to that mixture. No value is changed by hand afterwards.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import yaml
from crossdraft_advisor.cost import step_cost
from crossdraft_advisor.cost.step_cost import Prior, StepCost
from scipy import interpolate, optimize, sparse, special, stats
from tabulate import tabulate

from crossdraft.framework.util.estimate import Estimate

SERIES = Path(__file__).parent / "published" / "series.yaml"
#: Levels of knowledge, beside the tokens per step of each length.
LEVELS = {
    "acceptance only": "acceptance only",
    "one": "plain and one length, each in turn",
    "longest": "plain and the longest length",
    "two": "plain and two lengths, each pair in turn",
    "ends": "plain, the longest and the shortest length",
    "lengths": "two lengths, plain unknown, each pair in turn",
}


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
    def name(self) -> str:
        keys = ("engine", "model", "drafter", "batch_size", "series")
        return ", ".join(str(self.facts[key]) for key in keys if self.facts.get(key) is not None)

    @property
    def is_chain(self) -> bool:
        return self.facts.get("kind") != "tree"

    @cached_property
    def speed_ups(self) -> tuple[float, ...]:
        """Published speed-ups over plain decoding; tokens per second if plain is unknown."""
        return tuple(tokens / ratio for tokens, ratio in zip(self.lengths, self.ratios, strict=True))

    def known(self, level: str) -> Iterator[tuple[int, ...]]:
        """Indices of the lengths that are given at a level, in every way; none if no other length is left."""
        n = len(self.gammas)
        if level == "acceptance only" and self.plain_known:
            yield ()
        elif level == "longest" and self.plain_known and n > 1:
            yield (n - 1,)
        elif level == "ends" and self.plain_known and n > 2:
            yield (0, n - 1)
        elif level == "one" and self.plain_known and n > 1:
            yield from combinations(range(n), 1)
        elif (level == "two" and self.plain_known and n > 2) or (level == "lengths" and n > 2):
            yield from combinations(range(n), 2)


def read() -> list[Series]:
    return [Series.of(facts) for facts in yaml.safe_load(SERIES.read_text(encoding="utf-8"))]


# -- the prior ---------------------------------------------------------------------------------------------------------

#: Grid of (log a, log b) of the fit, and the errors that likelihoods are evaluated at.
LOG_A, LOG_B = np.meshgrid(np.linspace(-0.9, 2.4, 166), np.linspace(-6.0, 1.6, 153), indexing="ij")
NOISES = np.geomspace(0.005, 0.12, 9)


class Hyperparameter(NamedTuple):
    """A normal prior of a parameter of the prior: weak, as wide as what one would believe without data."""

    mean: float
    deviation: float


HYPERPRIOR = (
    Hyperparameter(0.1, 0.5),  # centre of log a
    Hyperparameter(-1.5, 1.0),  # centre of log b
    Hyperparameter(math.log(0.2), 0.7),  # logarithm of the scale of log a
    Hyperparameter(math.log(0.6), 0.7),  # of the scale of log b
    Hyperparameter(0.0, 0.5),  # inverse hyperbolic tangent of the correlation
    Hyperparameter(math.log(4.0), 0.7),  # logarithm of the degrees of freedom
    Hyperparameter(math.log(0.02), 0.7),  # of the error of a measurement
)


def prior_of(x: np.ndarray) -> Prior:
    """The prior of hyperparameters in the order of `HYPERPRIOR`."""
    a, b, scale_a, scale_b, correlation, freedom, noise = x.tolist()
    scale = (math.exp(scale_a), math.exp(scale_b))
    return Prior((a, b), scale, math.tanh(correlation), math.exp(freedom), math.exp(noise))


def density_of(prior: Prior) -> np.ndarray:
    """Probabilities of the cells of the grid."""
    return special.softmax(prior.log_density(LOG_A, LOG_B).ravel())


class Likelihoods:
    """Likelihoods of series on the grid, by error of a measurement."""

    def __init__(self, series: Sequence[Series]) -> None:
        self.series = [s for s in series if s.is_chain and (s.plain_known or len(s.gammas) > 1)]
        rows: list[Any] = []
        self._log_scales = np.empty((len(self.series), len(NOISES)))
        for i, s in enumerate(self.series):
            for j, noise in enumerate(NOISES):
                own = step_cost.log_likelihood(s.gammas, s.ratios, noise, s.plain_known, LOG_A, LOG_B).ravel()
                self._log_scales[i, j] = own.max()
                own = np.exp(own - own.max())
                rows.append(sparse.csr_array(np.where(own > 1e-7, own, 0.0)[None]))
        self._matrix = sparse.csr_array(sparse.vstack(rows))

    def log_evidence(self, prior: Prior, weights: np.ndarray) -> float:
        """Logarithm of the probability density of all series, each to the power of its weight."""
        values = self._matrix @ density_of(prior)
        by_noise = weights @ (np.log(values.reshape(self._log_scales.shape) + 1e-300) + self._log_scales)
        return float(interpolate.CubicSpline(np.log(NOISES), by_noise)(math.log(prior.noise)))

    def fit(self, left_out: str | None = None) -> Prior:
        """The prior of the series of all other sources."""
        sources = [s.source for s in self.series]
        weights = np.array([0.0 if s == left_out else sources.count(s) ** -0.5 for s in sources])
        means, deviations = np.array(HYPERPRIOR).T
        low, high = means - 6 * deviations, means + 6 * deviations
        low[-1], high[-1] = np.log(NOISES[[0, -1]])

        def loss(x: np.ndarray) -> float:
            x = np.clip(x, low, high)
            return float(np.sum(((x - means) / deviations) ** 2)) / 2 - self.log_evidence(prior_of(x), weights)

        mode = optimize.minimize(loss, means, method="L-BFGS-B", bounds=list(zip(low, high, strict=True)))
        return _marginal(loss, mode.x)


def _marginal(loss: Any, best: np.ndarray) -> Prior:
    """The Student t nearest to the mixture of priors over the posterior of the hyperparameters.

    Importance sampling from a Student t at the mode, with the curvature there.
    """
    step = 0.05
    size = len(best)
    hessian = np.empty((size, size))
    shifts = step * np.eye(size)
    middle = loss(best)
    for i in range(size):
        for j in range(i + 1):
            corners = [loss(best + p * shifts[i] + q * shifts[j]) for p, q in ((1, 1), (1, -1), (-1, 1), (-1, -1))]
            hessian[i, j] = hessian[j, i] = (corners[0] - corners[1] - corners[2] + corners[3]) / (4 * step**2)
    values, vectors = np.linalg.eigh(hessian)
    deviations = np.array([h.deviation for h in HYPERPRIOR]).min()
    covariance = (vectors / np.maximum(values, deviations**-2 / 4)) @ vectors.T
    proposal: Any = stats.multivariate_t(best, covariance, df=6, seed=1)  # type: ignore[arg-type]
    samples = proposal.rvs(SAMPLES)
    log_weights = np.array([middle - loss(x) for x in samples]) - proposal.logpdf(samples)
    shares = special.softmax(log_weights)
    mixture = sum(share * density_of(prior_of(x)) for share, x in zip(shares, samples, strict=True) if share > 1e-5)
    noise = float(np.exp(shares @ samples[:, -1]))

    def distance(x: np.ndarray) -> float:
        return -float(mixture @ np.log(density_of(prior_of(np.append(x, 0.0))) + 1e-300))

    x = optimize.minimize(distance, best[:-1], method="L-BFGS-B").x
    return prior_of(np.append(x, math.log(noise)))


#: Samples of the hyperparameters.
SAMPLES = 256


# -- predictions -------------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """A predicted and a published speed-up; speeds over that of the first known length if plain is unknown."""

    gamma: int
    known: tuple[int, ...]
    speed_up: Estimate
    published: float

    @property
    def error(self) -> float:
        return abs(self.speed_up.value / self.published - 1)

    @property
    def is_inside(self) -> bool:
        low, high = self.speed_up.low, self.speed_up.high
        return low is not None and high is not None and low <= self.published <= high


class Result(NamedTuple):
    """Predictions for one series at one level.

    Attributes:
        predictions: of the lengths that are not given.
        losses: speed lost by the advised choice (a draft length, or off if plain is known) against the best one.
        always_on: the same, if off is never advised.
    """

    series: Series
    predictions: tuple[Prediction, ...]
    losses: tuple[float, ...]
    always_on: tuple[float, ...]


def predicted(series: Series, level: str, prior: Prior) -> Result | None:
    """Compare the lengths that are not given at a level; None if all are, or if plain is not published."""
    predictions: list[Prediction] = []
    losses: list[float] = []
    always_on: list[float] = []
    plain = level != "lengths"
    for known in series.known(level):
        gammas, ratios = (tuple(values[k] for k in known) for values in (series.gammas, series.ratios))
        cost = StepCost(gammas, ratios, plain_known=plain, prior=prior)
        own = [_speed_up(series, i, cost) for i in range(len(series.gammas))]
        predictions += [p for i, p in enumerate(own) if i not in known]
        best, chosen = max(p.published for p in own), max(own, key=lambda p: p.speed_up.value)
        if plain:
            best = max(best, 1.0)
            losses.append(1 - (chosen.published if chosen.speed_up.value > 1 else 1.0) / best)
        else:
            losses.append(1 - chosen.published / best)
        always_on.append(1 - chosen.published / best)
    return Result(series, tuple(predictions), tuple(losses), tuple(always_on)) if predictions else None


def _speed_up(series: Series, i: int, cost: StepCost) -> Prediction:
    gamma, tokens, known = series.gammas[i], series.lengths[i], tuple(int(g) for g in cost.gammas)
    if cost.plain_known:
        return Prediction(gamma, known, cost.speed_up(Estimate(tokens, tokens, tokens), gamma), series.speed_ups[i])
    seconds, unit = cost.seconds(gamma), series.speed_ups[series.gammas.index(known[0])]
    assert seconds.low is not None
    assert seconds.high is not None
    estimate = Estimate(*(tokens / value / unit for value in (seconds.value, seconds.high, seconds.low)))
    return Prediction(gamma, known, estimate, series.speed_ups[i] / unit)


def leave_one_source_out(corpus: Sequence[Series]) -> dict[str, Prior]:
    """Priors by source, each fitted to the series of all other sources."""
    likelihoods = Likelihoods(corpus)
    return {source: likelihoods.fit(source) for source in sorted({s.source for s in corpus})}


def weighted_quantile(groups: Sequence[Sequence[float]], share: float) -> float:
    """Quantile of the values of all groups, each group with the same total weight."""
    values = sorted((value, 1 / len(group)) for group in groups for value in group)
    total = np.cumsum([weight for _, weight in values])
    return values[min(int(np.searchsorted(total, share * total[-1])), len(values) - 1)][0]


TOTALS = ["known", "series", "median error", "90 %", "inside", "loss", "always on", "on or off right", "always on"]


def total(title: str, results: Sequence[Result]) -> list[Any]:
    """A row of totals, in per cent; each series has one vote."""
    errors = [[p.error for p in r.predictions] for r in results]
    shares = [
        weighted_quantile(errors, 0.5),
        weighted_quantile(errors, 0.9),
        fmean(fmean(p.is_inside for p in r.predictions) for r in results),
        fmean(fmean(r.losses) for r in results),
        fmean(fmean(r.always_on) for r in results),
    ]
    if title != LEVELS["lengths"]:
        shares += [
            fmean(fmean((p.speed_up.value > 1) == (p.published > 1) for p in r.predictions) for r in results),
            fmean(fmean(p.published > 1 for p in r.predictions) for r in results),
        ]
    return [title, len(results), *(f"{100 * share:.1f}" for share in shares)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-sample", action="store_true", help="predict by the prior of the advisor")
    parser.add_argument("--series", action="store_true", help="a row for each series, too")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every prediction")
    parser.add_argument("--refit", action="store_true", help="fit the prior to all series and write it")
    arguments = parser.parse_args()
    corpus = read()
    if arguments.refit:
        write(Likelihoods(corpus).fit(), corpus)
        return
    prior = step_cost.published_prior()
    priors = dict.fromkeys((s.source for s in corpus), prior) if arguments.in_sample else leave_one_source_out(corpus)
    chains = [s for s in corpus if s.is_chain]
    results = {level: [r for s in chains if (r := predicted(s, level, priors[s.source]))] for level in LEVELS}
    if arguments.series:
        print(tabulate([_row(s, results) for s in chains], ["source", "series", *LEVELS], maxcolwidths=[40, 60]))
        print("\nworst error in %, and share inside the 95 % interval in %\n")
    table = [total(LEVELS[level], own) for level, own in results.items()]
    experts = [r for r in results["one"] if r.series.facts["experts"]]
    table.insert(2, total("  models with experts", experts))
    print(tabulate(table, TOTALS, tablefmt="github"))
    if arguments.csv:
        _write_csv(arguments.csv, results)


def _row(series: Series, results: Mapping[str, Sequence[Result]]) -> list[str]:
    cells = [series.source, series.name]
    for own in results.values():
        predictions = next((r.predictions for r in own if r.series is series), ())
        inside = 100 * fmean([p.is_inside for p in predictions] or [0.0])
        cells.append(f"{100 * max(p.error for p in predictions):.1f}  {inside:.0f}" if predictions else "")
    return cells


def _write_csv(path: Path, results: Mapping[str, Sequence[Result]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["level", "source", "series", "known", "gamma", "predicted", "low", "high", "published"])
        for level, own in results.items():
            for r in own:
                for p in r.predictions:
                    numbers = [f"{x:.4g}" for x in (p.speed_up.value, p.speed_up.low, p.speed_up.high, p.published)]
                    known = " ".join(map(str, p.known))
                    writer.writerow([level, r.series.source, r.series.name, known, p.gamma, *numbers])


def write(prior: Prior, corpus: Sequence[Series]) -> None:
    """Write the prior with its provenance beside `step_cost`."""
    chains = [s for s in corpus if s.is_chain]
    values = {
        "centre": [round(x, 3) for x in prior.centre],
        "scale": [round(x, 3) for x in prior.scale],
        "correlation": round(prior.correlation, 2),
        "freedom": round(prior.freedom, 2),
        "noise": round(prior.noise, 4),
    }
    head = (
        "# Prior of StepCost: python benchmarks/published.py --refit\n"
        f"# Fitted to {len(chains)} series of {len({s.source for s in chains})} sources in"
        " benchmarks/published/series.yaml; no value is set by hand.\n"
    )
    path = Path(step_cost.__file__).with_name("prior.yaml")
    path.write_text(head + yaml.safe_dump(values, default_flow_style=None, sort_keys=False), encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
