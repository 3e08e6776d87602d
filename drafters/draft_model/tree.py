"""``draft-model-tree``: a draft model drafts a static tree, or a tree with a budget of nodes.

Without replacement: W. Jeon et al., "Recursive Speculative Decoding", 2024; Z. Chen et al., "Sequoia: Scalable,
Robust, and Hardware-aware Speculative Decoding", 2024. Top-k trees: T. Cai et al., "Medusa", ICML 2024 (choice
lists). Greedy drafts: Z. Hu et al., "Towards Optimal Multi-draft Speculative Decoding", ICLR 2025. Budgets: Sequoia,
and J. Wang et al., "OPT-Tree: Speculative Decoding with Adaptive Draft Tree Structure", TACL 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict, on_device
from ...framework.contracts.draft_kind import CHAIN, DETERMINISTIC
from ...framework.contracts.drafter import DraftContext, DraftTraits
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.util.limits import MOST_LEVELS, MOST_NODES
from ..autoregressive.draft_model import DraftModel
from ..autoregressive.sequoia import best_tree
from ..autoregressive.trees import (
    SIBLING_KINDS,
    Choices,
    Siblings,
    TreeTemplate,
    check_most,
    check_owners,
    grow_dynamic,
    grow_static,
    max_expanded,
    tree_shape,
)
from .draft_model import ModelConfig
from .tree_drafter import TreeDrafter

#: Default tree.
BRANCHING = (2, 2, 1)
#: Default choice of siblings.
SIBLINGS: Siblings = "without-replacement"
#: Defaults of `growth`. The acceptance was measured for the SmolLM2 pair at temperature 1 with ``specinfer``, on 477
#: steps of ``benchmarks/sibling_acceptance.py``.
NODES, DEPTH, THRESHOLD = 16, 8, 0.1
ACCEPTANCE = (0.26, 0.08, 0.057, 0.046, 0.034, 0.027, 0.027)


class DraftModelTree(TreeDrafter):
    """A tree given by its branching, by choice lists or by a budget; one pass of the draft model per level.

    ``siblings`` sets the choice of the children of a node: ``without-replacement`` (drawn one after the other),
    ``top-k`` (the most probable, point masses) or ``greedy`` (the most probable, and one drawn from the rest).
    At temperature 0 siblings are the top k.

    ``growth`` finds the tree for a number of ``nodes``: ``sequoia`` once, the optimal one for an acceptance vector;
    ``opt-tree`` in every step, the most probable one, of point masses.
    """

    name = "draft-model-tree"

    class Config(ModelConfig):
        branching: tuple[int, ...] | None = Field(
            None, description=f"children per node, level by level (default: {list(BRANCHING)})"
        )
        choices: Choices | None = Field(
            None, description="instead of branching: nodes as lists of sibling ranks, e.g. [[0], [1], [0, 0]]"
        )
        siblings: Siblings | None = Field(None, description=f"{SIBLINGS}, top-k or greedy (default: {SIBLINGS})")
        growth: Literal["sequoia", "opt-tree"] | None = Field(
            None,
            description="instead of branching: sequoia, the optimal static tree for an acceptance vector, or opt-tree, "
            "the most probable tree of the draft model in each step",
        )
        nodes: int | None = Field(
            None, ge=1, le=MOST_NODES, description=f"growth: nodes of the tree (default: {NODES})"
        )
        depth: int | None = Field(
            None, ge=1, le=MOST_LEVELS, description=f"growth: maximum number of levels (default: {DEPTH})"
        )
        acceptance: tuple[float, ...] | None = Field(
            None,
            description="sequoia: for each child of an accepted node, the probability that it is the accepted one "
            f"(default: {list(ACCEPTANCE)})",
        )
        threshold: float | None = Field(
            None,
            ge=0,
            le=1,
            description="opt-tree: stop after a level that adds less than this to the expected number of accepted "
            f"tokens (default: {THRESHOLD})",
        )

        #: The values of `growth` that an option applies to.
        _KEYS: ClassVar[dict[str, tuple[str | None, ...]]] = {
            "branching": (None,),
            "choices": (None,),
            "siblings": (None, "sequoia"),
            "temperature": (None, "sequoia"),
            "nodes": ("sequoia", "opt-tree"),
            "depth": ("sequoia", "opt-tree"),
            "acceptance": ("sequoia",),
            "threshold": ("opt-tree",),
        }

        @model_validator(mode="after")
        def _fits(self) -> Any:
            growths = {None: "a tree without growth", "sequoia": "growth: sequoia", "opt-tree": "growth: opt-tree"}
            check_owners(self, self._KEYS, self.growth, growths)
            if self.choices is not None and self.branching is not None:
                raise ValueError("branching and choices both describe the tree; give one of them")
            if self.growth == "opt-tree":
                check_most(MOST_NODES, max_expanded(self.levels, self.budget), "expanded nodes")
            else:
                self.shape()
            return self

        @property
        def budget(self) -> int:
            """Number of nodes of `growth`."""
            return NODES if self.nodes is None else self.nodes

        @property
        def levels(self) -> int:
            """Maximum number of levels."""
            if self.growth == "opt-tree":
                return min(DEPTH if self.depth is None else self.depth, self.budget)
            return len(self.shape().ranks)

        def shape(self) -> TreeTemplate:
            """Build the static tree."""
            choices = self.choices
            if self.growth == "sequoia":
                depth = DEPTH if self.depth is None else self.depth
                acceptance = ACCEPTANCE if self.acceptance is None else self.acceptance
                choices, _ = best_tree(acceptance, self.budget, depth)
            branching = BRANCHING if self.branching is None else self.branching
            return tree_shape(branching, choices, contiguous=self.siblings != "top-k")

        def effective_siblings(self, target: Sampling) -> Siblings:
            point_mass = self.growth == "opt-tree" or target.at(self.temperature).temperature == 0
            return "top-k" if point_mass else self.siblings or SIBLINGS

    config: Config

    def __init__(self, config: Any, context: DraftContext):
        self.shape = None if config.growth == "opt-tree" else config.shape()
        slack = max(max_expanded(config.levels, config.budget) - config.budget, 0) if self.shape is None else 0
        super().__init__(config, context, DraftModel(context.load_lm(config.model, extra_tokens=slack)))
        self.sampling = context.sampling.at(config.temperature)
        self.siblings: Siblings = config.effective_siblings(context.sampling)

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        if config.growth == "opt-tree":
            waits = config.levels - 1  # once a level: the width of the next one
            return DraftTraits(DETERMINISTIC, True, config.budget, levels=config.levels, waits=waits)
        siblings, shape = config.effective_siblings(sampling), config.shape()
        by_branching = config.growth is None and config.choices is None
        branching = BRANCHING if config.branching is None else config.branching
        return DraftTraits(
            kind=CHAIN if shape.is_path else SIBLING_KINDS[siblings],
            point_mass=siblings == "top-k",
            nodes=shape.nodes,
            levels=len(shape.ranks),
            branching=branching if by_branching else None,
        )

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        own, self.fed_index = self.config, None
        levels = min(own.levels if self.shape is None else len(self.shape.ranks), max(sequences.limit))
        if levels == 0:
            return Draft.empty(sequences.batch_size, sequences.device)
        root, limit = self.model.root(sequences), on_device(sequences.limit, sequences.device)
        if self.shape is None:
            threshold = THRESHOLD if own.threshold is None else own.threshold
            draft, self.fed_index = grow_dynamic(
                levels, None, own.budget, root, self.model.forward, limit, threshold=threshold
            )
        else:
            draft, self.fed_index = grow_static(
                self.shape, levels, self.siblings, root, self.model.forward, self.sampling, limit, rng
            )
        self._levels = levels - 1
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        if self.fed_index is not None:
            # In an OPT-Tree only a leaf can be without feeding, so all accepted nodes except the last were fed.
            fed = accepted if self.shape is not None else [max(tau - 1, 0) for tau in accepted]
            self.model.commit(verdict, fed, self.fed_index, self._levels)
