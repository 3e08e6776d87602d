"""Predicted speeds beside published ones, and the priors of step costs fitted to them.

    python benchmarks/published.py                     # totals: each source with priors fitted to the others
    python benchmarks/published.py --csv FILE          # also every prediction
    python benchmarks/published.py --read FILE --chart FILE    # totals and chart of predictions that --csv wrote
    python benchmarks/published.py --covariates        # what shifts the prior, one at a time (docs/lab-notes.md)
    python benchmarks/published.py --refit             # fits cost/prior.yaml of the advisor

Each series of published/series.yaml is predicted at the levels of knowledge of `LEVELS`; only lengths that were not
given are compared, and each series has one vote in every total. Trees are neither fitted nor predicted: their nodes
are not a draft length.

The fit: the likelihood of each series is evaluated once, on a grid of (log a, log b) and of the error of a measurement;
the evidence of a prior is its density on the grid times these. The n series of one source count as sqrt(n): they share
server and hands. Hyperparameters have the weak priors of `HYPERPRIOR` and are integrated out by importance sampling;
the prior that is written is the Student t nearest to that mixture. No value is changed by hand afterwards.

Widening: where leave-one-source-out intervals hold less than 95 % of the published speeds, their half widths are
multiplied by the smallest factor with which they hold 95 %, by number of measured lengths. The factor of a source is
chosen on the other sources.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import yaml
from crossdraft_advisor.cost import step_cost
from crossdraft_advisor.cost.step_cost import Prior, StepCost
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from scipy import interpolate, optimize, sparse, special, stats
from tabulate import tabulate

from crossdraft import Estimate

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

#: Kinds of drafters by the start of their names; the others draft one token after another with a head of the target.
KINDS = {"dflash": "block", "dspark": "block", "draft-model": "draft-model", "ngram": "n-gram"}
#: What shifts the centre of the prior: axis, and a property of a series. It earned its place (docs/lab-notes.md).
COVARIATES = (("log_b", "serving"),)
#: What was tried beside it, each alone.
TRIED = (("log_b", "block"), ("log_b", "draft-model"), ("log_b", "n-gram"), ("log_a", "experts"), ("log_a", "sglang"))


@dataclass(frozen=True)
class Series:
    """A published series: ratios of seconds of a step to plain seconds by draft length, if plain was published."""

    facts: Mapping[str, Any]
    plain_known: bool
    lengths: tuple[float, ...]
    gammas: tuple[float, ...]
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
        keys = ("engine", "gpu", "model", "drafter", "batch_size", "series")
        return ", ".join(str(self.facts[key]) for key in keys if self.facts.get(key) is not None)

    def has(self, name: str) -> bool:
        """True if the series has a property that may shift the prior."""
        where = "serving" if self.facts["engine"] in step_cost.SERVING else "local"
        return name in (self.kind, self.facts["engine"], where, "experts" * bool(self.facts["experts"]))

    @property
    def kind(self) -> str:
        """The kind of its drafter, for `--covariates`."""
        return next((kind for start, kind in KINDS.items() if self.facts["drafter"].startswith(start)), "sequential")

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


#: The published series.
CORPUS = [Series.of(facts) for facts in yaml.safe_load(SERIES.read_text(encoding="utf-8"))]


# -- the prior ---------------------------------------------------------------------------------------------------------

#: Grid of (log a, log b) of the fit, and the errors that likelihoods are evaluated at.
LOG_A, LOG_B = np.meshgrid(np.linspace(-0.8, 1.8, 105), np.linspace(-5.0, 1.5, 131), indexing="ij")
NOISES = np.geomspace(0.006, 0.08, 7)
#: Samples of the hyperparameters.
SAMPLES = 1024


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
#: Shifts of the centre by what is known of a server without a measurement: of log a, and of log b.
SHIFTS = {"log_a": Hyperparameter(0.0, 0.3), "log_b": Hyperparameter(0.0, 0.7)}


def prior_of(x: np.ndarray) -> Prior:
    """The prior of hyperparameters in the order of `HYPERPRIOR`."""
    a, b, scale_a, scale_b, correlation, freedom, noise = x.tolist()
    scale = (math.exp(scale_a), math.exp(scale_b))
    return Prior((a, b), scale, math.tanh(correlation), math.exp(freedom), math.exp(noise))


def density_of(prior: Prior) -> np.ndarray:
    """Probabilities of the cells of the grid."""
    return special.softmax(prior.log_density(LOG_A, LOG_B).ravel())


AXES = tuple(SHIFTS)


class Fit(NamedTuple):
    """A fitted prior, and the shifts of its centre with their standard deviations by axis and name."""

    prior: Prior
    shifts: Mapping[tuple[str, str], tuple[float, float]]

    def of(self, series: Series) -> Prior:
        """The prior for the server of a series."""
        centre, variance = list(self.prior.centre), [scale**2 for scale in self.prior.scale]
        for (axis, name), (by, deviation) in self.shifts.items():
            if series.has(name):
                centre[AXES.index(axis)] += by
                variance[AXES.index(axis)] += deviation**2
        return replace(
            self.prior, centre=(centre[0], centre[1]), scale=(math.sqrt(variance[0]), math.sqrt(variance[1]))
        )


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
                rows.append(sparse.csr_array(np.where(own > 1e-5, own, 0.0)[None]))
        self._matrix = sparse.csr_array(sparse.vstack(rows))

    def fit(self, left_out: str | None = None, covariates: Sequence[tuple[str, str]] = ()) -> Fit:
        """The prior of the series of all other sources.

        Args:
            covariates: axis and name of what shifts the centre (`Series.has`).
        """
        sources = [s.source for s in self.series]
        weights = np.array([0.0 if s == left_out else sources.count(s) ** -0.5 for s in sources])
        hyperprior = np.array([*HYPERPRIOR, *(SHIFTS[axis] for axis, _ in covariates)])
        size = len(HYPERPRIOR)
        design = np.array([[float(s.has(name)) for _, name in covariates] for s in self.series]).reshape(
            len(self.series), len(covariates)
        )
        on_a = np.array([axis == "log_a" for axis, _ in covariates], dtype=bool)
        groups: list[tuple[np.ndarray, np.ndarray, Any]] = []
        for row in np.unique(design, axis=0):
            members = np.flatnonzero((design == row).all(axis=1) & (weights > 0))
            if members.size:
                rows = (members[:, None] * len(NOISES) + np.arange(len(NOISES))).ravel()
                groups.append((row, members, self._matrix[rows]))

        def loss(x: np.ndarray) -> float:
            own = prior_of(x[:size])
            by_noise = np.zeros(len(NOISES))
            for row, members, matrix in groups:
                shift = (float(row[on_a] @ x[size:][on_a]), float(row[~on_a] @ x[size:][~on_a]))
                values = (matrix @ density_of(shifted(own, shift))).reshape(len(members), len(NOISES))
                by_noise += weights[members] @ (np.log(values + 1e-300) + self._log_scales[members])
            evidence = float(interpolate.CubicSpline(np.log(NOISES), by_noise)(x[size - 1]))
            return float(np.sum(((x - hyperprior[:, 0]) / hyperprior[:, 1]) ** 2)) / 2 - evidence

        reach = 6 * hyperprior[:, 1]
        bounds = np.stack([hyperprior[:, 0] - reach, hyperprior[:, 0] + reach], axis=1)
        bounds[size - 1] = np.log(NOISES[[0, -1]])
        options = {"ftol": 1e-5, "eps": 1e-4}
        mode = optimize.minimize(loss, hyperprior[:, 0], method="L-BFGS-B", bounds=bounds.tolist(), options=options)
        samples, shares = _posterior(loss, np.clip(mode.x, bounds[:, 0] + 0.1, bounds[:, 1] - 0.1), hyperprior[:, 1])
        means = shares @ samples
        deviations = np.sqrt(shares @ (samples - means) ** 2)
        values = zip(means[size:].tolist(), deviations[size:].tolist(), strict=True)
        return Fit(_nearest(samples[:, :size], shares), dict(zip(covariates, values, strict=True)))


def shifted(prior: Prior, shift: tuple[float, float]) -> Prior:
    """The prior with its centre moved."""
    return replace(prior, centre=(prior.centre[0] + shift[0], prior.centre[1] + shift[1]))


def _posterior(loss: Any, mode: np.ndarray, deviations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples of the hyperparameters and their shares, drawn from a Student t with the curvature at the mode."""
    size = len(mode)
    steps = np.diag(0.2 * deviations)
    hessian = np.empty((size, size))
    for i in range(size):
        for j in range(i + 1):
            corners = [loss(mode + p * steps[i] + q * steps[j]) for p, q in ((1, 1), (1, -1), (-1, 1), (-1, -1))]
            area = 4 * steps[i, i] * steps[j, j]
            hessian[i, j] = hessian[j, i] = (corners[0] - corners[1] - corners[2] + corners[3]) / area
    values, vectors = np.linalg.eigh(hessian * np.outer(deviations, deviations))  # 1 without data
    root = deviations[:, None] * vectors / np.sqrt(np.maximum(values, 0.5))
    proposal: Any = stats.multivariate_t(mode, root @ root.T, df=6, seed=1)  # type: ignore[arg-type]
    samples = np.atleast_2d(proposal.rvs(SAMPLES))
    log_weights = np.array([-loss(x) for x in samples]) - proposal.logpdf(samples)
    return samples, special.softmax(log_weights)


def _nearest(samples: np.ndarray, shares: np.ndarray) -> Prior:
    """The Student t nearest to the mixture of priors over samples of their hyperparameters."""
    mixture = sum(share * density_of(prior_of(x)) for share, x in zip(shares, samples, strict=True) if share > 1e-5)

    def distance(x: np.ndarray) -> float:
        return -float(mixture @ np.log(density_of(prior_of(np.append(x, 0.0))) + 1e-300))

    x = optimize.minimize(distance, (shares @ samples)[:-1], method="L-BFGS-B", options={"ftol": 1e-7}).x
    return prior_of(np.append(x, shares @ samples[:, -1]))


# -- predictions -------------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """A predicted and a published speed-up; speeds over that of the first known length if plain is unknown."""

    gamma: float
    known: tuple[float, ...]
    speed_up: Estimate
    published: float

    @property
    def error(self) -> float:
        return abs(self.speed_up.value / self.published - 1)

    @property
    def factor(self) -> float:
        """Width at which the interval holds the published speed-up, over its own, in log scale."""
        end = self.speed_up.high if self.published > self.speed_up.value else self.speed_up.low
        assert end is not None
        return math.log(self.published / self.speed_up.value) / math.log(end / self.speed_up.value)

    @property
    def is_inside(self) -> bool:
        low, high = self.speed_up.low, self.speed_up.high
        return low is not None and high is not None and low <= self.published <= high


class Result(NamedTuple):
    """Predictions for one series at one level.

    Attributes:
        every: predictions of all lengths, for each way in which lengths are given.
        losses: speed lost by the advised choice (a draft length, or off if plain is known) against the best one.
        always_on: the same, if off is never advised.
    """

    series: Series
    every: tuple[Prediction, ...]
    losses: tuple[float, ...]
    always_on: tuple[float, ...]

    @property
    def predictions(self) -> list[Prediction]:
        """Predictions of the lengths that are not given."""
        return [p for p in self.every if p.gamma not in p.known]


def predicted(series: Series, level: str, prior: Prior) -> Result | None:
    """Compare the lengths that are not given at a level; None if all are, or if plain is not published."""
    groups: list[list[Prediction]] = []
    for known in series.known(level):
        gammas, ratios = (tuple(values[k] for k in known) for values in (series.gammas, series.ratios))
        cost = StepCost(gammas, ratios, plain_known=level != "lengths", prior=prior)
        groups.append([_speed_up(series, i, cost) for i in range(len(series.gammas))])
    return result_of(series, level, groups) if groups else None


def result_of(series: Series, level: str, groups: Sequence[Sequence[Prediction]]) -> Result:
    """The result of the predictions of all lengths, for each way in which lengths are given."""
    losses: list[float] = []
    always_on: list[float] = []
    for own in groups:
        best, chosen = max(p.published for p in own), max(own, key=lambda p: p.speed_up.value)
        if level == "lengths":
            losses.append(1 - chosen.published / best)
        else:
            best = max(best, 1.0)
            losses.append(1 - (chosen.published if chosen.speed_up.value > 1 else 1.0) / best)
        always_on.append(1 - chosen.published / best)
    return Result(series, tuple(p for own in groups for p in own), tuple(losses), tuple(always_on))


def _speed_up(series: Series, i: int, cost: StepCost) -> Prediction:
    gamma, tokens, known = series.gammas[i], series.lengths[i], cost.gammas
    if cost.plain_known:
        speed_up = step_cost.speed_up_of(Estimate(tokens), cost.ratio(gamma), gamma + 1)
        return Prediction(gamma, known, speed_up, series.speed_ups[i])
    seconds, unit = cost.seconds(gamma), series.speed_ups[series.gammas.index(known[0])]
    assert seconds.low is not None
    assert seconds.high is not None
    estimate = Estimate(*(tokens / value / unit for value in (seconds.value, seconds.high, seconds.low)))
    return Prediction(gamma, known, estimate, series.speed_ups[i] / unit)


Results = dict[str, list[Result]]
#: Level that the widening with 0, 1 and at least 2 measured lengths is chosen at.
WIDENED = ("acceptance only", "one", "two")


def results_of(series: Sequence[Series], prior: Callable[[Series], Prior], levels: Iterable[str] = LEVELS) -> Results:
    """Predictions at every level."""
    return {level: [r for s in series if s.is_chain and (r := predicted(s, level, prior(s)))] for level in levels}


def widening(results: Results, left_out: str | None = None) -> tuple[float, float, float]:
    """Factors of half widths with which intervals hold 95 % of the series of all other sources; at least 1."""
    factors = []
    for level in WIDENED:
        groups = [[p.factor for p in r.predictions] for r in results[level] if r.series.source != left_out]
        factors.append(max(1.0, weighted_quantile(groups, 0.95)))
    return factors[0], factors[1], factors[2]


def leave_one_source_out(
    likelihoods: Likelihoods, covariates: Sequence[tuple[str, str]], levels: Iterable[str] = LEVELS
) -> Results:
    """Predictions of each source by a fit to all other sources, not widened."""
    fits = {source: likelihoods.fit(source, covariates) for source in sorted({s.source for s in likelihoods.series})}
    return results_of(likelihoods.series, lambda s: fits[s.source].of(s), levels)


def widened(results: Results, factors: Callable[[str], tuple[float, float, float]]) -> Results:
    """Results with the half widths of their intervals multiplied by the factors of their source."""

    def wide(p: Prediction, source: str) -> Prediction:
        factor, value = factors(source)[min(len(p.known), 2)], p.speed_up.value
        assert p.speed_up.low is not None
        assert p.speed_up.high is not None
        low, high = value * (p.speed_up.low / value) ** factor, value * (p.speed_up.high / value) ** factor
        return p._replace(speed_up=Estimate(value, low, high))

    return {
        level: [r._replace(every=tuple(wide(p, r.series.source) for p in r.every)) for r in own]
        for level, own in results.items()
    }


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


def table(results: Results) -> list[list[Any]]:
    """The totals of every level, and of one length on models with experts."""
    rows = [total(LEVELS[level], own) for level, own in results.items()]
    rows.insert(2, total("- models with experts", [r for r in results["one"] if r.series.facts["experts"]]))
    return rows


def text(results: Results) -> str:
    """The table of docs/predictions.md."""
    return tabulate(table(results), TOTALS, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every prediction")
    parser.add_argument("--read", type=Path, metavar="FILE", help="read the predictions that --csv wrote")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw predicted over published speed-ups")
    parser.add_argument("--covariates", action="store_true", help="leave-one-source-out with other shifts of the prior")
    parser.add_argument("--refit", action="store_true", help="fit the priors to all series and write them")
    arguments = parser.parse_args()
    if arguments.read:
        return _print(read_csv(arguments.read), arguments)
    likelihoods = Likelihoods(CORPUS)
    if arguments.covariates:
        return _try_covariates(likelihoods)
    results = leave_one_source_out(likelihoods, COVARIATES)
    if arguments.refit:
        _refit(likelihoods, results)
    return _print(widened(results, lambda source: widening(results, source)), arguments)


def advised_prior(series: Series) -> Prior:
    """The prior that the advisor has for the server of a series."""
    facts = series.facts
    return step_cost.published_prior(facts["engine"] or "", facts.get("batch_size") or 1.0)


def _print(results: Results, arguments: argparse.Namespace) -> None:
    print(text(results))
    if arguments.csv:
        _write_csv(arguments.csv, results)
    if arguments.chart:
        draw(arguments.chart, results)


def _try_covariates(likelihoods: Likelihoods) -> None:
    for covariates in ((), COVARIATES, *((*COVARIATES, other) for other in TRIED), (*COVARIATES, *TRIED[:3])):
        levels = ("acceptance only", "one", "ends")
        results = leave_one_source_out(likelihoods, covariates, levels)
        shifts = likelihoods.fit(None, covariates).shifts
        print(", ".join(f"{axis} {name} {by:+.2f} +- {sd:.2f}" for (axis, name), (by, sd) in shifts.items()) or "none")
        print(tabulate([total(LEVELS[level], results[level]) for level in levels], TOTALS, tablefmt="github"))
        print(flush=True)


#: Marks of the levels in the chart: colour, and label.
MARKS = {
    "acceptance only": ("tab:gray", "acceptance only"),
    "longest": ("tab:orange", "plain and the longest length"),
    "ends": ("tab:blue", "plain, the longest and the shortest length"),
}


def draw(path: Path, results: Results) -> None:
    """Draw predicted over published speed-ups with their intervals."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    every = [p for level in MARKS for r in results[level] for p in r.predictions]
    ends = (0.8 * min(p.published for p in every), 1.25 * max(p.published for p in every))
    for axes, (level, (colour, label)) in zip(figure.subplots(1, 3, sharey=True), MARKS.items(), strict=True):
        own = [p for r in results[level] for p in r.predictions]
        x, y = [p.published for p in own], [p.speed_up.value for p in own]
        low = [p.speed_up.value - (p.speed_up.low or 0.0) for p in own]
        high = [(p.speed_up.high or 0.0) - p.speed_up.value for p in own]
        axes.errorbar(x, y, (low, high), fmt="o", color=colour, markersize=3, elinewidth=0.6, alpha=0.6)
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.axhline(1, color="black", linewidth=0.4, linestyle=":")
        axes.axvline(1, color="black", linewidth=0.4, linestyle=":")
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=(ends[0] / 1.6, ends[1] * 1.6), title=label)
        axes.set_xlabel("published speed-up (log scale)")
        axes.title.set_fontsize(9)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator([0.5, 1, 2, 4]))
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_locator(NullLocator())
    figure.axes[0].set_ylabel("predicted, with 95 % interval")
    figure.savefig(path, dpi=130)


def _write_csv(path: Path, results: Results) -> None:
    numbers = {id(s): number for number, s in enumerate(CORPUS)}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["level", "series", "known", "gamma", "predicted", "low", "high", "published"])
        for level, own in results.items():
            for r in own:
                for p in r.every:
                    values = [f"{x:.5g}" for x in (p.speed_up.value, p.speed_up.low, p.speed_up.high, p.published)]
                    known = " ".join(f"{gamma:g}" for gamma in p.known)
                    writer.writerow([level, numbers[id(r.series)], known, f"{p.gamma:g}", *values])


def read_csv(path: Path) -> Results:
    """The results that `--csv` wrote."""
    groups: dict[tuple[str, int], dict[str, list[Prediction]]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            value, low, high, published = (float(row[key]) for key in ("predicted", "low", "high", "published"))
            known = tuple(float(gamma) for gamma in row["known"].split())
            own = groups.setdefault((row["level"], int(row["series"])), {}).setdefault(row["known"], [])
            own.append(Prediction(float(row["gamma"]), known, Estimate(value, low, high), published))
    results: Results = {level: [] for level in LEVELS}
    for (level, number), by_known in groups.items():
        results[level].append(result_of(CORPUS[number], level, list(by_known.values())))
    return results


def _refit(likelihoods: Likelihoods, results: Results) -> None:
    """Write the prior with its provenance beside `step_cost`."""
    chains = likelihoods.series
    head = (
        "# Prior of StepCost: python benchmarks/published.py --refit\n"
        f"# Fitted to {len(chains)} series of {len({s.source for s in chains})} sources in"
        " benchmarks/published/series.yaml; no value is set by hand.\n"
        "# widening: half widths by number of measured lengths, so that intervals of sources that were left out hold\n"
        "# 95 % of the published speeds.\n"
    )
    fit = likelihoods.fit(None, COVARIATES)
    shifts = []
    for (axis, name), (by, deviation) in fit.shifts.items():
        members = [s for s in chains if s.has(name)]
        counts = {"series": len(members), "sources": len({s.source for s in members})}
        shifts.append({"of": name, "axis": axis, "by": round(by, 3), "deviation": round(deviation, 3)} | counts)
    largest = max(s.facts.get("batch_size") or 1 for s in chains if s.plain_known)
    values = {"prior": _stored(replace(fit.prior, widening=widening(results))), "shifts": shifts}
    note = "# shifts: of the centre of the prior, which is that of engines on one machine for one user.\n"
    path = Path(step_cost.__file__).with_name("prior.yaml")
    values |= {"largest_batch_size": largest}
    path.write_text(head + note + yaml.safe_dump(values, default_flow_style=None, sort_keys=False), encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


def _stored(prior: Prior) -> dict[str, Any]:
    return {
        "centre": [round(x, 3) for x in prior.centre],
        "scale": [round(x, 3) for x in prior.scale],
        "correlation": round(prior.correlation, 2),
        "freedom": round(prior.freedom, 2),
        "noise": round(prior.noise, 4),
        "widening": [round(x, 2) for x in prior.widening],
    }


if __name__ == "__main__":
    main()
