"""What the draft labels of ``crossdraft certify`` stand for: registered drafters with their options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import plugins
from ..contracts.drafter import DraftContext, Drafter


@dataclass(frozen=True)
class DraftKind:
    """What a draft label stands for: a registered drafter and its config, given the draft's depth gamma."""

    drafter: str
    options: Callable[[int], dict[str, Any]]
    summary: str

    def config(self, gamma: int) -> tuple[type[Drafter], Any]:
        """The drafter's class and its validated config."""
        found = plugins.get("drafters", self.drafter)
        return found, found.Config(**self.options(gamma))

    def build(self, context: DraftContext, gamma: int) -> Drafter:
        """Make the drafter; a `crossdraft.framework.certificate.certify.DrafterFactory`."""
        found, config = self.config(gamma)
        return found(config, context)


#: ``--draft``. The model's name is free: whatever a drafter loads is the toy's drafter model.
DRAFTS: dict[str, DraftKind] = {
    "chain": DraftKind(
        "small-lm",
        lambda gamma: {"model": "toy", "gamma": gamma, "temperature": 1},
        "a chain that is sampled",
    ),
    "point-mass": DraftKind(
        "small-lm",
        lambda gamma: {"model": "toy", "gamma": gamma, "temperature": 0},
        "the drafter's argmax chain",
    ),
    # Less 1e-9, so that the rounding of a probability equal to 2/5 does not decide.
    "stop-early": DraftKind(
        "dynamic-threshold",
        lambda gamma: {"model": "toy", "gamma": gamma, "temperature": 1, "threshold": 2 / 5 - 1e-9},
        "a sampled chain that ends after a token drawn with probability below 2/5",
    ),
    "iid-2": DraftKind("small-lm-iid", lambda gamma: _iid(gamma, 2), "two sequences, drawn independently"),
    "iid-3": DraftKind("small-lm-iid", lambda gamma: _iid(gamma, 3), "three of them"),
    "tree-wor-2-1": DraftKind(
        "small-lm-tree",
        lambda gamma: _tree(gamma, "without-replacement"),
        "two children of the root drawn without replacement, a chain below each",
    ),
    "tree-greedy-2-1": DraftKind(
        "small-lm-tree",
        lambda gamma: _tree(gamma, "greedy"),
        "the most probable child of the root and one drawn from the rest, a sampled chain below each",
    ),
    "tree-top-2-1": DraftKind(
        "small-lm-tree",
        lambda gamma: _tree(gamma, "top-k"),
        "the two most probable children, an argmax chain below each",
    ),
}


def _iid(gamma: int, k: int) -> dict[str, Any]:
    return {"model": "toy", "gamma": gamma, "K": k, "temperature": 1}


def _tree(gamma: int, siblings: str) -> dict[str, Any]:
    branching = [2] * min(gamma, 1) + [1] * (gamma - 1)
    return {"model": "toy", "branching": branching, "siblings": siblings, "temperature": 1}
