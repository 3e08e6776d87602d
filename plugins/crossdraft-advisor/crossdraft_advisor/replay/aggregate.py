"""Sums over replayed responses, grouped by prompt; memory does not grow with the number of responses.

Confidence intervals are over prompts (`metrics.intervals`). Beyond `MAX_GROUPS` prompts per category, a prompt is
assigned to an existing group by a hash of its name; groups of prompts are as independent as single prompts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from crossdraft import Estimate
from crossdraft.runs import bounded_estimate, ratio, ratio_difference

from .step_chain import Steps

MAX_GROUPS, MAX_CATEGORIES = 1024, 64  # groups of prompts per category, and categories
OTHERS = "(others)"  # category of all further ones
#: Columns of the sums by group: tokens and steps that count towards block efficiency, all tokens and all steps, and
#: the counted steps without a draft.
_EMITTED, _COUNTED, _TOKENS, _STEPS, _IDLE = range(5)


@dataclass
class PromptGroups:
    """Group index of each prompt; shared by all tallies of a replay, so that their differences can be paired."""

    by_category: dict[str, dict[str, int]] = field(default_factory=dict)
    category: list[str] = field(default_factory=list)
    _full: dict[str, list[int]] = field(default_factory=dict)

    def number(self, category: str, prompt: str) -> int:
        """Return the index of the group that a prompt belongs to."""
        if category not in self.by_category and len(self.by_category) >= MAX_CATEGORIES:
            category = OTHERS
        members = self.by_category.setdefault(category, {})
        if prompt not in members and len(members) >= MAX_GROUPS:
            if category not in self._full:
                self._full[category] = list(members.values())
            return self._full[category][zlib.crc32(prompt.encode(errors="surrogatepass")) % MAX_GROUPS]
        if prompt not in members:
            members[prompt] = len(self.category)
            self.category.append(category)
        return members[prompt]

    def names(self) -> list[str]:
        """Category and name of each prompt, or of the first prompt of its group, in the order of the groups."""
        names = [""] * len(self.category)
        for category, members in self.by_category.items():
            for name, number in members.items():
                names[number] = f"{category}: {name}"
        return names


@dataclass(frozen=True)
class Row:
    """Result of a drafter and verifier at one draft length, over all responses or one category."""

    gamma: int
    category: str
    # tokens, steps: expected number of all steps, and of the tokens that they emit; drafted: tokens drafted in them;
    # target_rows: positions evaluated by the target (an upper bound for K > 1: shared prefixes are evaluated once)
    tokens: float
    # tokens emitted per target call over the steps with enough remaining tokens for a draft of gamma; None without such
    # steps. ``block_efficiency_all_steps``: over all steps.
    block_efficiency: Estimate | None
    block_efficiency_all_steps: float
    steps: float
    drafted: float
    target_rows: float
    # Pr(tau >= i), i = 1 .. gamma, over the counted steps; conditional: Pr(tau >= i | tau >= i - 1).
    marginal: list[float]
    conditional: list[float]
    idle: float = 0.0  # share of the counted steps without a draft

    @property
    def drafted_per_step(self) -> float:
        return self.drafted / self.steps

    @property
    def target_rows_per_token(self) -> float:
        return self.target_rows / self.tokens


class Tally:
    """Sums of one drafter, verifier and K at every draft length; ``groups`` are shared by all tallies of a replay."""

    def __init__(self, groups: PromptGroups, gammas: Sequence[int], k: int = 1, by_prompt: bool = False):
        self.groups, self.gammas, self.k = groups, list(gammas), k
        self._sums = np.zeros((0, len(self.gammas), 5))
        deepest = max(self.gammas)
        self._at_least = np.zeros((0, len(self.gammas), deepest)) if by_prompt else None
        # By category: drafted tokens, and sums of Pr(tau >= i).
        self._drafted: dict[str, np.ndarray] = {}
        self._accepted: dict[str, np.ndarray] = {}

    def add(self, steps: Steps, numbers: Sequence[int]) -> None:
        """Add responses; ``numbers`` are the groups of their prompts (`PromptGroups.number`)."""
        if missing := len(self.groups.category) - len(self._sums):
            self._sums = np.concatenate([self._sums, np.zeros((missing, *self._sums.shape[1:]))])
        columns = (steps.emitted, steps.counted, steps.tokens, steps.steps, steps.idle)
        np.add.at(self._sums, np.array(numbers), np.stack(columns, -1))
        if self._at_least is not None:
            missing = len(self._sums) - len(self._at_least)
            self._at_least = np.concatenate([self._at_least, np.zeros((missing, *self._at_least.shape[1:]))])
            np.add.at(self._at_least, np.array(numbers), steps.accepted)
        categories = np.array([self.groups.category[number] for number in numbers])
        for category in dict.fromkeys(categories.tolist()):
            selected = categories == category
            drafted, accepted = steps.drafted[selected].sum(0), steps.accepted[selected].sum(0)
            self._drafted[category] = self._drafted.get(category, 0.0) + drafted
            self._accepted[category] = self._accepted.get(category, 0.0) + accepted

    def by_prompt(self, gamma: int) -> np.ndarray:
        """``[groups, 1 + gamma]``: counted steps of each group, and the number of them with tau >= 1 .. gamma."""
        assert self._at_least is not None
        column = self.gammas.index(gamma)
        sums = np.concatenate([self._sums[:, column, _COUNTED, None], self._at_least[:, column, :gamma]], 1)
        return np.minimum.accumulate(sums, axis=1)  # sums of equal probabilities may differ by rounding

    @property
    def categories(self) -> list[str]:
        """Categories of the responses, in order of first appearance."""
        return list(self._drafted)

    def row(self, gamma: int, category: str = "") -> Row:
        """Return the result at one draft length, over all categories by default."""
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
            tokens=float(total[_TOKENS]),
            block_efficiency=bounded_estimate(ratio, sums[:, : _COUNTED + 1], 1.0, 1.0 + gamma)
            if total[_COUNTED]
            else None,
            block_efficiency_all_steps=float(total[_TOKENS] / total[_STEPS]),
            steps=float(total[_STEPS]),
            drafted=float(drafted),
            target_rows=float(drafted + total[_STEPS]),
            marginal=at_least.tolist(),
            conditional=conditional,
            idle=float(total[_IDLE] / total[_COUNTED]) if total[_COUNTED] else 0.0,
        )

    def sums(self, gamma: int, category: str = "") -> np.ndarray:
        """``[groups, 5]``: counted tokens and steps, all tokens and steps, counted steps without a draft."""
        rows = self._sums[:, self.gammas.index(gamma)]
        if category:
            categories = np.array(self.groups.category[: len(rows)])
            rows = rows[categories == category]
        return rows


def segment_difference(tally: Tally, gamma: int, segment: str, other: str) -> Estimate | None:
    """Block efficiency in a segment minus that in another, on the prompts that have both."""
    rows = tally.sums(gamma)[:, : _COUNTED + 1]
    first, second = (tally.groups.by_category.get(name, {}) for name in (segment, other))
    pairs = [(first[prompt], second[prompt]) for prompt in first if prompt in second]
    sums = np.array([[*rows[i], *rows[j]] for i, j in pairs if max(i, j) < len(rows)]).reshape(-1, 4)
    sums = sums[(sums[:, _COUNTED] > 0) & (sums[:, 2 + _COUNTED] > 0)]
    return ratio_difference(sums) if len(sums) else None


def difference(tally: Tally, gamma: int, other: Tally, other_gamma: int) -> Estimate | None:
    """Block efficiency of ``tally`` minus that of ``other`` on the same responses; None if either has none counted."""
    sums = np.concatenate(
        [item.sums(g)[:, : _COUNTED + 1] for item, g in ((tally, gamma), (other, other_gamma))], axis=1
    )
    if not (sums[:, _COUNTED].sum() and sums[:, 2 + _COUNTED].sum()):
        return None
    return ratio_difference(sums)
