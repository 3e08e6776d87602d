"""Somebody else's sampler against the target's law: what an engine drew after given prefixes, tested.

A speculative engine is lossless if what it emits is distributed as the target's own samples. Enumeration needs its
code; this needs only what came out of it. Two kinds of draws are tested:

* *next tokens*: many draws of the token after one prefix, as counts. Pearson's chi-square against the law there.
* *sequences*: draws of several tokens after one prefix. The first tokens are counted as above; all that follow them
  are tested together by the probability integral transform (M. Rosenblatt, "Remarks on a multivariate
  transformation", Annals of Mathematical Statistics 23, 1952): with the tokens of a law in falling order of
  probability, u = (what comes before the drawn one) + v times its own share, v uniform, is uniform and independent from
  token to token if, and only if, each token was drawn from its law. Falling order makes a temperature that is wrong, or
  tokens cut off, a slope in u.

All tests of a file share one level: a sampler that is right is called wrong once in `1 / LEVEL` files (Bonferroni, over
the tests and one of their sum). What the draws could not have shown is said, too: the same tests against a law that is
wrong on purpose, the most probable token's share moved by a stated deviation, have to reject it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..contracts.errors import UsageError, quoted
from ..contracts.limits import LINE_BYTES, MOST_WIDTH, PROMPT_FILE_BYTES
from ..contracts.reading import parse_json, read_lines
from .goodness_of_fit import Fit, goodness_of_fit

#: A file of draws is called wrong below this p-value, all its tests counted.
LEVEL = 1e-3
#: Cells of the test of u, and the draws that each should have.
MOST_CELLS, DRAWS_A_CELL = 64, 20
#: How often a deviation that is called visible is seen.
POWER = 0.9


@dataclass
class Draws:
    """What was drawn after one prefix.

    Attributes:
        where: file and line.
        prefix: text, or token ids; empty where the law is given.
        counts: how often each token came next.
        sequences: drawn token ids, one list a draw.
        law: the law of the next token, if the file says it.
    """

    where: str
    prefix: str | list[int]
    counts: Counter[int] = field(default_factory=Counter)
    sequences: list[list[int]] = field(default_factory=list)
    law: list[float] | None = None


@dataclass(frozen=True)
class Test:
    """One test.

    Attributes:
        name: what was tested.
        draws: how many tokens.
        fit: against the target's law.
        control: the same draws against the law that is wrong on purpose; None where one token has all of the law.
        visible: the least change of the most probable token's share that `POWER` of such tests reject, at the level of
            the whole file; None for the test of u, and where one token has all of the law.
    """

    name: str
    draws: int
    fit: Fit
    control: Fit | None
    visible: float | None


@dataclass(frozen=True)
class Verdict:
    """All tests of a file, and what they come to; ``p_value`` is that of the file, corrected."""

    tests: list[Test]
    p_value: float
    control: float

    @property
    def kept(self) -> bool:
        return self.p_value >= LEVEL

    @property
    def conclusive(self) -> bool:
        return not self.kept or self.control < LEVEL


# -- reading ---------------------------------------------------------------------------------------------------


def read_draws(path: Path) -> list[Draws]:
    """The draws of a JSONL file: ``prompt`` (text) or ``prefix`` (ids) or ``law``, with ``counts`` or ``samples``.

    ``counts`` maps ids to numbers; ``samples`` is a list of ids (draws of the next token) or of lists of ids
    (sequences); ``law`` lists the probability of every id, and takes no prefix. Lines of one prefix are draws of one
    law.

    Raises:
        UsageError: with file, line and key.
    """
    found: dict[str, Draws] = {}
    for number, line in read_lines(path, PROMPT_FILE_BYTES, LINE_BYTES):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = parse_json(line, path, line=number)
        if not isinstance(row, dict):
            raise UsageError(f"{where}: a line must hold a JSON object")
        if unknown := sorted(set(row) - {"prompt", "prefix", "law", "counts", "samples"}):
            raise UsageError(
                f"{where}: unknown key {quoted(unknown[0])}; there are prompt, prefix, law, counts, samples"
            )
        given = [key for key in ("prompt", "prefix", "law") if key in row]
        if len(given) != 1 or ("counts" in row) == ("samples" in row):
            raise UsageError(f"{where}: give one of prompt, prefix and law, and one of counts and samples")
        draws = _prefix(where, given[0], row[given[0]])
        key = repr((given[0], row[given[0]]))
        draws = found.setdefault(key, draws)
        if "counts" in row:
            _counts(where, row["counts"], draws)
        else:
            _samples(where, row["samples"], draws)
    if not found:
        raise UsageError(f"{path} is empty; it needs one JSON object a line")
    for draws in found.values():
        if draws.law is not None and draws.sequences:
            raise UsageError(f"{draws.where}: samples of a given law must be single tokens, not sequences")
    return list(found.values())


def _prefix(where: str, key: str, value: Any) -> Draws:
    if key == "prompt":
        if not isinstance(value, str) or not value:
            raise UsageError(f"{where}: prompt must be a text")
        return Draws(where, value)
    if key == "prefix":
        if not isinstance(value, list) or not value:
            raise UsageError(f"{where}: prefix must be a list of token ids, with at least one")
        return Draws(where, [_id(where, "prefix", one) for one in value])
    good = isinstance(value, list) and len(value) > 1
    if not good or any(type(p) not in (int, float) or not 0 <= p <= 1 for p in value) or abs(sum(value) - 1) > 1e-3:
        raise UsageError(f"{where}: law must be a list of at least two probabilities that sum to 1")
    return Draws(where, [], law=[p / sum(value) for p in value])


def _id(where: str, key: str, value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:  # keys of JSON objects
        value = int(value)
    if type(value) is not int or not 0 <= value < MOST_WIDTH:
        raise UsageError(f"{where}: {key} holds {quoted(value)}, which is no token id")
    return value


def _counts(where: str, counts: Any, draws: Draws) -> None:
    if not isinstance(counts, dict) or not counts:
        raise UsageError(f"{where}: counts must map token ids to how often they came")
    for token, n in counts.items():
        if type(n) is not int or not 0 <= n < 2**53:
            raise UsageError(f"{where}: counts says {quoted(n)} of token {quoted(token)}, which is no number of draws")
        draws.counts[_id(where, "counts", token)] += n
    if not draws.counts.total():
        raise UsageError(f"{where}: counts has no draws")


def _samples(where: str, samples: Any, draws: Draws) -> None:
    if not isinstance(samples, list) or not samples:
        raise UsageError(f"{where}: samples must be a list of token ids, or of lists of them")
    for sample in samples:
        if isinstance(sample, list):
            if not sample:
                raise UsageError(f"{where}: samples holds a sequence without tokens")
            draws.sequences.append([_id(where, "samples", token) for token in sample])
        else:
            draws.counts[_id(where, "samples", sample)] += 1


# -- testing ---------------------------------------------------------------------------------------------------


def judge(
    every: Sequence[Draws],
    laws: Callable[[Draws, Sequence[int]], Tensor],
    *,
    deviation: float = 0.02,
    seed: int = 0,
    progress: Callable[[int], Any] = lambda done: None,
) -> Verdict:
    """Test draws against the target.

    Args:
        laws: the laws ``[n + 1, V]`` after the prefix and after each of n tokens that follow it.
        deviation: of the control: by how much it moves the share of the most probable token.
        seed: of v, the uniform numbers of the integral transform.
        progress: called with the number of draws (or sequences) done.

    Raises:
        UsageError: a token beyond the vocabulary; with file and line.
    """
    uniform = np.random.default_rng(seed)
    tested: list[tuple[str, int, Fit, Fit | None, Tensor | None]] = []
    for draws in every:
        first = Counter(draws.counts)
        transforms: list[tuple[Tensor, Tensor]] = []
        law = torch.tensor(draws.law, dtype=torch.float64) if draws.law else laws(draws, [])[0].double().cpu()
        for sequence in draws.sequences:
            _check(draws, sequence, len(law))
            first[sequence[0]] += 1
            rows = laws(draws, sequence[:-1]).double().cpu()
            # Without the first token, which is counted: so the two tests are independent.
            if len(sequence) > 1:
                tokens, v = torch.tensor(sequence[1:]), torch.from_numpy(uniform.random(len(sequence) - 1))
                wrong = _deviated(rows[1:], deviation)
                transforms.append((_transforms(rows[1:], tokens, v), _transforms(wrong, tokens, v)))
            progress(1)
        _check(draws, list(first), len(law))
        counts = torch.zeros(len(law), dtype=torch.float64)
        for token, n in first.items():
            counts[token] = n
        wrong = _deviated(law, deviation)
        control = goodness_of_fit(counts, wrong) if float(law.max()) < 1 else None
        tested.append((f"{draws.where}: next token", first.total(), goodness_of_fit(counts, law), control, law))
        if transforms:
            u, deviated = (torch.cat(column) for column in zip(*transforms, strict=True))
            tested.append((f"{draws.where}: what follows it", len(u), _uniform(u), _uniform(deviated), None))
        progress(draws.counts.total())
    many = len(tested) + (len(tested) > 1)
    tests = [
        Test(name, n, fit, control, None if law is None else visible(n, law, LEVEL / many, fit.degrees))
        for name, n, fit, control, law in tested
    ]
    controls = [test.control for test in tests if test.control is not None]
    # Where every law is one token there is nothing to deviate: a draw that is right is all that can be asked.
    control = _together(controls, many) if controls else 0.0
    return Verdict(tests, _together([test.fit for test in tests], many), control)


def visible(draws: int, law: Tensor, level: float, degrees: int) -> float | None:
    """The least change of the most probable token's share that a chi-square of these draws rejects `POWER` of the time.

    The other tokens' shares change in proportion, so the statistic's noncentrality is n d^2 / (p (1 - p)).
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    p = float(law.max())
    if p >= 1 or degrees < 1:
        return None
    critical = chi2.isf(level, degrees)
    needed: Any = brentq(lambda x: float(ncx2.sf(critical, degrees, x)) - POWER, 1e-9, 1e7)
    return math.sqrt(float(needed) * p * (1 - p) / draws)


def _check(draws: Draws, tokens: Sequence[int], vocabulary: int) -> None:
    if tokens and max(tokens) >= vocabulary:
        raise UsageError(f"{draws.where}: token {max(tokens)} is beyond the vocabulary, which has {vocabulary}")


def _deviated(law: Tensor, deviation: float) -> Tensor:
    """Laws ``[..., V]`` with their greatest share moved by ``deviation``, and the others in proportion.

    Towards one half; a law of one token stays.
    """
    p, best = law.max(-1, keepdim=True)
    moved = torch.where(p > 0.5, p - deviation, p + deviation)
    wrong = (law * ((1 - moved) / (1 - p).clamp(min=1e-300))).scatter(-1, best, moved)
    return torch.where(p < 1, wrong, law)


def _transforms(laws: Tensor, tokens: Tensor, v: Tensor) -> Tensor:
    """u ``[n]`` of drawn tokens ``[n]``, each from its law ``[n, V]``; NaN where that calls it impossible."""
    p = laws.gather(1, tokens[:, None])
    earlier = (laws > p) | ((laws == p) & (torch.arange(laws.shape[1]) < tokens[:, None]))
    u = (laws * earlier).sum(1) + v * p[:, 0]
    return u.clamp(max=1 - 1e-12).where(p[:, 0] > 0, torch.nan)


def _uniform(u: Tensor) -> Fit:
    """Are these numbers uniform on [0, 1)? A NaN is impossible."""
    cells = max(2, min(MOST_CELLS, len(u) // DRAWS_A_CELL))
    counts = (u[~u.isnan()] * cells).long().bincount(minlength=cells)
    fit = goodness_of_fit(counts, torch.full((cells,), 1 / cells, dtype=torch.float64))
    return replace(fit, chi_square=math.inf, p_value=0.0) if bool(u.isnan().any()) else fit


def _together(fits: Sequence[Fit], many: int) -> float:
    """The p-value of all tests: ``many`` times the least of theirs and, if there are several, of their sum's."""
    from scipy.stats import chi2

    values = [fit.p_value for fit in fits]
    if len(fits) > 1:
        values.append(float(chi2.sf(sum(fit.chi_square for fit in fits), max(1, sum(fit.degrees for fit in fits)))))
    return min(1.0, many * min(values))


def rows(verdict: Verdict) -> Iterator[Mapping[str, Any]]:
    """A line a test, for a table or JSON, the least p-value first."""
    for test in sorted(verdict.tests, key=lambda test: test.fit.p_value):
        yield {
            "draws": test.name,
            "n": test.draws,
            **test.fit.as_json(),
            "control_p_value": test.control.p_value if test.control else None,
            "visible": test.visible,
        }
