"""What replay adds up over responses, by prompt: memory does not grow with their number.

Intervals are over prompts (`metrics.intervals`). Prompts beyond the first `MOST_PIECES` of a category join those that
are there, by a digest of their names: pieces that hold several prompts are as independent as prompts are.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..metrics.intervals import Estimate, estimate
from .step_chain import Steps

#: Pieces of a category that intervals are over, and categories that are told apart.
MOST_PIECES, MOST_CATEGORIES = 1024, 64
#: Where categories beyond those are counted.
OTHERS = "(others)"
#: Columns of what is added up by prompt: tokens and steps counted, all tokens and all steps.
_EMITTED, _COUNTED, _TOKENS, _STEPS = range(4)


@dataclass
class Pieces:
    """Numbers for prompts, by category; shared by all tallies of a replay, so that they can be paired."""

    of_category: dict[str, dict[str, int]] = field(default_factory=dict)
    category: list[str] = field(default_factory=list)
    _full: dict[str, list[int]] = field(default_factory=dict)

    def number(self, category: str, prompt: str) -> int:
        """The piece that a prompt belongs to."""
        if category not in self.of_category and len(self.of_category) >= MOST_CATEGORIES:
            category = OTHERS
        known = self.of_category.setdefault(category, {})
        if prompt not in known and len(known) >= MOST_PIECES:
            return self._listed(category)[zlib.crc32(prompt.encode(errors="surrogatepass")) % MOST_PIECES]
        if prompt not in known:
            known[prompt] = len(self.category)
            self.category.append(category)
        return known[prompt]

    def _listed(self, category: str) -> list[int]:
        if category not in self._full:
            self._full[category] = list(self.of_category[category].values())
        return self._full[category]


@dataclass(frozen=True)
class Row:
    """What a pair does at one draft length, over all responses or those of a category.

    Attributes:
        block_efficiency: tokens emitted per target call, of the steps in which a draft of gamma tokens had room; None
            where there was no such step. ``block_efficiency_all_steps``: with the others.
        steps: expected number of all steps; drafted: tokens drafted in them; target_rows: positions evaluated, of
            several sequences at most (where they agree, a node is evaluated once).
        marginal: Pr(tau >= i), i = 1 .. gamma, over the steps that count; conditional: Pr(tau >= i | tau >= i - 1).
    """

    gamma: int
    category: str
    tokens: int
    block_efficiency: Estimate | None
    block_efficiency_all_steps: float
    steps: float
    drafted: float
    target_rows: float
    marginal: list[float]
    conditional: list[float]

    @property
    def drafted_per_step(self) -> float:
        return self.drafted / self.steps

    @property
    def target_rows_per_token(self) -> float:
        return self.target_rows / self.tokens


class Tally:
    """The sums of one drafter, rule and K at every draft length.

    Args:
        pieces: those of the replay.
        gammas: draft lengths.
        k: sequences of a draft.
        by_prompt: keep what `by_prompt` says.
    """

    def __init__(self, pieces: Pieces, gammas: Sequence[int], k: int = 1, by_prompt: bool = False):
        self.pieces, self.gammas, self.k = pieces, list(gammas), k
        self._sums = np.zeros((0, len(self.gammas), 4))
        deepest = max(self.gammas)
        self._at_least = np.zeros((0, len(self.gammas), deepest)) if by_prompt else None
        #: By category: tokens drafted, and sums of Pr(tau >= i).
        self._drafted: dict[str, np.ndarray] = {}
        self._accepted: dict[str, np.ndarray] = {}

    def add(self, steps: Steps, numbers: Sequence[int]) -> None:
        """Add responses, whose prompts have these numbers (`Pieces.number`)."""
        if missing := len(self.pieces.category) - len(self._sums):
            self._sums = np.concatenate([self._sums, np.zeros((missing, *self._sums.shape[1:]))])
        np.add.at(
            self._sums, np.array(numbers), np.stack([steps.emitted, steps.counted, steps.tokens, steps.steps], -1)
        )
        if self._at_least is not None:
            missing = len(self._sums) - len(self._at_least)
            self._at_least = np.concatenate([self._at_least, np.zeros((missing, *self._at_least.shape[1:]))])
            np.add.at(self._at_least, np.array(numbers), steps.accepted)
        categories = np.array([self.pieces.category[number] for number in numbers])
        for category in dict.fromkeys(categories.tolist()):
            mine = categories == category
            drafted, accepted = steps.drafted[mine].sum(0), steps.accepted[mine].sum(0)
            self._drafted[category] = self._drafted.get(category, 0.0) + drafted
            self._accepted[category] = self._accepted.get(category, 0.0) + accepted

    def by_prompt(self, gamma: int) -> np.ndarray:
        """``[pieces, 1 + gamma]``: of each prompt the steps that count, and in how many of them tau >= 1 .. gamma."""
        assert self._at_least is not None
        column = self.gammas.index(gamma)
        return np.concatenate([self._sums[:, column, _COUNTED, None], self._at_least[:, column, :gamma]], 1)

    @property
    def categories(self) -> list[str]:
        """Those of its responses, in the order in which they came."""
        return list(self._drafted)

    def row(self, gamma: int, category: str = "") -> Row:
        """What it comes to at one of its draft lengths; of all categories by default."""
        column, sums = self.gammas.index(gamma), self.sums(gamma, category)
        total = sums.sum(0)
        drafted = self.k * sum(v[column] for name, v in self._drafted.items() if category in ("", name))
        accepted = sum(v[column] for name, v in self._accepted.items() if category in ("", name))
        at_least = np.asarray(accepted)[:gamma] / total[_COUNTED] if total[_COUNTED] else np.zeros(0)
        before = np.concatenate([[1.0], at_least[:-1]]) if len(at_least) else at_least
        conditional = [float(a / b) for a, b in zip(at_least, before, strict=True) if b > 0]
        return Row(
            gamma=gamma,
            category=category,
            tokens=int(total[_TOKENS]),
            block_efficiency=estimate(_ratio, sums[:, : _COUNTED + 1], least=1.0) if total[_COUNTED] else None,
            block_efficiency_all_steps=float(total[_TOKENS] / total[_STEPS]),
            steps=float(total[_STEPS]),
            drafted=float(drafted),
            target_rows=float(drafted + total[_STEPS]),
            marginal=at_least.tolist(),
            conditional=conditional,
        )

    def sums(self, gamma: int, category: str = "") -> np.ndarray:
        """``[pieces, 4]``: tokens and steps that count, all tokens and steps, by prompt."""
        found = self._sums[:, self.gammas.index(gamma)]
        if category:
            of = np.array(self.pieces.category[: len(found)])
            found = found[of == category]
        return found


def difference(mine: Tally, gamma: int, other: Tally, other_gamma: int) -> Estimate | None:
    """Block efficiency of one minus that of the other, on the same texts; None without steps of both."""
    sums = np.concatenate([one.sums(g)[:, : _COUNTED + 1] for one, g in ((mine, gamma), (other, other_gamma))], axis=1)
    if not (sums[:, _COUNTED].sum() and sums[:, 2 + _COUNTED].sum()):
        return None
    return estimate(lambda s: s[..., 0] / s[..., 1] - s[..., 2] / s[..., 3], sums, log=False)


def _ratio(sums: np.ndarray) -> np.ndarray:
    return sums[..., _EMITTED] / sums[..., _COUNTED]
