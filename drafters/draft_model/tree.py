"""A draft model draws a tree of a fixed shape, or one with a budget of nodes.

Without replacement: W. Jeon et al., "Recursive Speculative Decoding", 2024; Z. Chen et al., "Sequoia: Scalable,
Robust, and Hardware-aware Speculative Decoding", 2024. Top-k trees: T. Cai et al., "Medusa", ICML 2024 (choice
lists). Greedy drafts: Z. Hu et al., "Towards Optimal Multi-draft Speculative Decoding", ICLR 2025. Budgets: Sequoia,
and J. Wang et al., "OPT-Tree: Speculative Decoding with Adaptive Draft Tree Structure", TACL 2025.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict, on_device
from ...framework.contracts.draft_kind import CHAIN, DETERMINISTIC
from ...framework.contracts.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.util.limits import MOST_LEVELS, MOST_NODES
from ..autoregressive.draft_model import DraftModel
from ..autoregressive.sequoia import best_tree
from ..autoregressive.trees import (
    SIBLING_KINDS,
    Choices,
    Shape,
    Siblings,
    check_most,
    grow_dynamic,
    grow_fixed,
    most_expanded,
    tree_shape,
)
from .draft_model import ModelConfig

#: The tree of a config that describes none.
BRANCHING = (2, 2, 1)
#: How its siblings are chosen, unless it says otherwise.
SIBLINGS: Siblings = "without-replacement"
#: What `growth` leaves open. The acceptance is that of the SmolLM2 pair at temperature 1 by rule ``specinfer``, from
#: 477 steps of ``benchmarks/sibling_acceptance.py``.
NODES, DEPTH, THRESHOLD = 16, 8, 0.1
ACCEPTANCE = (0.26, 0.08, 0.057, 0.046, 0.034, 0.027, 0.027)


class DraftModelTree(Drafter):
    """A tree given by its branching, by choice lists or by a budget, one pass of the small model a level.

    ``siblings`` says how the children of a node are chosen: ``without-replacement`` (drawn one after the other),
    ``top-k`` (the most probable, point masses) or ``greedy`` (the most probable, and one drawn from the rest).
    At temperature 0 siblings are the top k.

    ``growth`` finds the tree for a number of ``nodes``: ``sequoia`` once, the best one for an acceptance vector;
    ``opt-tree`` in every step anew, the most probable one, whose nodes are point masses.
    """

    name = "draft-model-tree"

    class Config(ModelConfig):
        branching: tuple[int, ...] | None = Field(
            None, description=f"children of every node of level 1, 2, .. ({list(BRANCHING)})"
        )
        choices: Choices | None = Field(
            None, description="instead of branching: nodes as lists of sibling ranks, e.g. [[0], [1], [0, 0]]"
        )
        siblings: Siblings | None = Field(None, description=f"{SIBLINGS}, top-k or greedy ({SIBLINGS})")
        growth: Literal["sequoia", "opt-tree"] | None = Field(
            None,
            description="instead of branching: sequoia, the best fixed tree for an acceptance vector, or opt-tree, the "
            "tree that the small model finds most probable in each step",
        )
        nodes: int | None = Field(None, ge=1, le=MOST_NODES, description=f"growth: nodes of the tree ({NODES})")
        depth: int | None = Field(None, ge=1, le=MOST_LEVELS, description=f"growth: its most levels ({DEPTH})")
        acceptance: tuple[float, ...] | None = Field(
            None,
            description="sequoia: how often the first child of an accepted node is the accepted one, the second, ... "
            f"({list(ACCEPTANCE)})",
        )
        threshold: float | None = Field(
            None,
            ge=0,
            le=1,
            description="opt-tree: a level that adds less than this to the expected number of accepted tokens is the "
            f"last one ({THRESHOLD})",
        )

        #: Which growth a key belongs to.
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
            for key, meant in self._KEYS.items():
                if self.growth not in meant and getattr(self, key) != type(self).model_fields[key].default:
                    kinds: dict[str | None, str] = {None: "a tree without growth"}
                    owners = " or ".join(kinds.get(kind, f"growth: {kind}") for kind in meant)
                    raise ValueError(
                        f"{key} belongs to {owners}, but this is {kinds.get(self.growth, f'growth: {self.growth}')}"
                    )
            if self.choices is not None and self.branching is not None:
                raise ValueError("branching and choices both describe the tree; give one of them")
            if self.growth == "opt-tree":
                check_most(MOST_NODES, most_expanded(self.levels, self.budget), "expanded nodes")
            else:
                self.shape()
            return self

        @property
        def budget(self) -> int:
            """Nodes of a tree that grows."""
            return NODES if self.nodes is None else self.nodes

        @property
        def levels(self) -> int:
            """The most levels there can be."""
            if self.growth == "opt-tree":
                return min(DEPTH if self.depth is None else self.depth, self.budget)
            return len(self.shape().ranks)

        def shape(self) -> Shape:
            """Of a tree that is the same in all steps."""
            choices = self.choices
            if self.growth == "sequoia":
                depth = DEPTH if self.depth is None else self.depth
                acceptance = ACCEPTANCE if self.acceptance is None else self.acceptance
                choices, _ = best_tree(acceptance, self.budget, depth)
            branching = BRANCHING if self.branching is None else self.branching
            return tree_shape(branching, choices, contiguous=self.siblings != "top-k")

        def chosen(self, target: Sampling) -> Siblings:
            point_mass = self.growth == "opt-tree" or target.at(self.temperature).temperature == 0
            return "top-k" if point_mass else self.siblings or SIBLINGS

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        own = self.config
        self.sampling = context.sampling.at(own.temperature)
        self.shape = None if own.growth == "opt-tree" else own.shape()
        # More nodes may be fed than are kept.
        room = max(most_expanded(own.levels, own.budget) - own.budget, 0) if self.shape is None else 0
        self.model = DraftModel(context.load_lm(own.model, room=room))
        self.siblings: Siblings = own.chosen(context.sampling)
        self._place: Tensor | None = None

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        if config.growth == "opt-tree":
            return DraftTraits(kind=DETERMINISTIC, point_mass=True, nodes=config.budget, levels=config.levels)
        siblings, shape = config.chosen(sampling), config.shape()
        fixed = config.growth is None and config.choices is None
        branching = BRANCHING if config.branching is None else config.branching
        return DraftTraits(
            kind=CHAIN if shape.is_path else SIBLING_KINDS[siblings],
            point_mass=siblings == "top-k",
            nodes=shape.nodes,
            levels=len(shape.ranks),
            branching=branching if fixed else None,
        )

    @property
    def passes(self) -> int:
        return self.model.passes

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        self.model.prefill(prompts)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.model.start(row, prompt)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self.model.free(row)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        own, self._place = self.config, None
        levels = min(own.levels if self.shape is None else len(self.shape.ranks), max(sequences.limit))
        if levels == 0:
            return Draft.empty(sequences.batch_size, sequences.device)
        root, limit = self.model.root(sequences), on_device(sequences.limit, sequences.device)
        if self.shape is None:
            threshold = THRESHOLD if own.threshold is None else own.threshold
            draft, self._place = grow_dynamic(
                levels, None, own.budget, root, self.model.forward, limit, threshold=threshold
            )
        else:
            shape = self.shape.cut(levels)
            draft, self._place = grow_fixed(shape, self.siblings, root, self.model.forward, self.sampling, limit, rng)
        self._levels = levels - 1
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        if self._place is not None:
            # Of a tree that grew only leaves may never have been fed, so all but the last accepted node are kept.
            fed = accepted if self.shape is not None else [max(tau - 1, 0) for tau in accepted]
            self.model.commit(verdict, fed, self._place, self._levels)
