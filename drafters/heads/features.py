"""The base class of autoregressive heads on the target's features: EAGLE-1, -2 and -3, multi-token prediction.

Such a head is a decoder layer over *pairs* (see `feature_head`). A committed pair is always fed with the target's
feature, from the pass that verified it; keys and values computed from the head's own features are dropped after the
draft. So the head's cache depends on the committed tokens only, not on earlier drafts.

A sequence of one token has no pair yet, and heads were not trained on a token without a feature: such a row drafts
nothing in its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...framework.contracts.draft import Draft, Sequences, on_device
from ...framework.contracts.draft_kind import CHAIN, DETERMINISTIC
from ...framework.contracts.drafter import DraftContext, DraftTraits, StrategyConfig
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.util.limits import MOST_LEVELS, MOST_NODES, MOST_SIBLINGS
from ..autoregressive.draft_model import fed_before, grow_chain
from ..autoregressive.policies import POLICIES, Policy, Static
from ..autoregressive.trees import (
    SIBLING_KINDS,
    Choices,
    Siblings,
    TreeTemplate,
    check_candidates,
    check_owners,
    dynamic_slack,
    grow_dynamic,
    grow_static,
    tree_shape,
)
from .feature_head import FeatureHead, FeatureLM
from .feature_reader import FeatureReader


class HeadConfig(StrategyConfig):
    """Options of the drafters with such heads: a chain, a static tree or a dynamic tree."""

    model: str = Field(description="name, directory or Hub id of the heads' checkpoint")
    tree: Literal["static", "dynamic"] | None = Field(
        None, description="static: from branching or choices; dynamic: EAGLE-2's; default: a chain"
    )
    gamma: int = Field(default=5, ge=0, le=MOST_LEVELS, description="a chain's draft length")
    policy: Policy = Field(
        default=Static(),
        description=f"a chain's length policy: {POLICIES}, e.g. {{name: confidence}}",
    )
    branching: tuple[int, ...] = Field((2, 2, 1), description="static tree: children per node, level by level")
    choices: Choices | None = Field(
        None, description="static tree, instead of branching: nodes as lists of sibling ranks, e.g. [[0], [1], [0, 0]]"
    )
    siblings: Siblings = Field("top-k", description="static tree: top-k (point masses), without-replacement or greedy")
    depth: int = Field(default=4, ge=1, le=MOST_LEVELS, description="dynamic tree: levels, one pass of the head each")
    top_k: int = Field(
        default=4, ge=1, le=MOST_SIBLINGS, description="dynamic tree: nodes expanded per level, and children per node"
    )
    nodes: int = Field(default=12, ge=1, le=MOST_NODES, description="dynamic tree: nodes kept")
    temperature: float | None = Field(
        None, ge=0, description="drafting temperature of sampled drafts; default: the target's"
    )

    #: The kinds of draft that an option applies to.
    _KEYS: ClassVar[dict[str, tuple[str | None, ...]]] = {
        "gamma": (None,),
        "policy": (None,),
        "branching": ("static",),
        "choices": ("static",),
        "siblings": ("static",),
        "depth": ("dynamic",),
        "top_k": ("dynamic",),
        "nodes": ("dynamic",),
        "temperature": (None, "static"),
    }

    @model_validator(mode="after")
    def _fits(self) -> Any:
        kinds: dict[str | None, str] = {
            None: "a chain (leave out tree)",
            "static": "tree: static",
            "dynamic": "tree: dynamic",
        }
        check_owners(self, self._KEYS, self.tree, kinds)
        if self.choices is not None and self.branching != type(self).model_fields["branching"].default:
            raise ValueError("branching and choices both describe the tree; give one of them")
        if self.tree is None:
            self.policy.make(self.gamma, 1)
        elif self.tree == "dynamic":
            check_candidates(self.depth, self.top_k, self.nodes)
        else:
            self.shape()
        return self

    def shape(self) -> TreeTemplate:
        """Build the static tree."""
        return tree_shape(self.branching, self.choices, contiguous=self.siblings != "top-k")

    def effective_siblings(self, target: Sampling) -> Siblings:
        """Siblings of a static tree for a target sampled with ``target``: top-k at temperature 0."""
        return "top-k" if target.at(self.temperature).temperature == 0 else self.siblings


class FeatureDrafter(FeatureReader):
    """Base of the drafters with such heads. A subclass defines `layers` and loads its head."""

    Config = HeadConfig
    config: HeadConfig
    head: FeatureHead

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        own = self.config
        slack = dynamic_slack(own.depth, own.top_k, own.nodes) if own.tree == "dynamic" else 0
        self.lm = self._slots(slack)
        self.policy = own.policy.make(own.gamma, context.batch_size)
        self.policy.load(context)
        self.shape = own.shape() if own.tree == "static" else None
        self.siblings: Siblings = own.effective_siblings(context.sampling)

    def _slots(self, slack: int) -> Any:
        """Make the slots of the head, with room for ``slack`` more tokens."""
        return FeatureLM(self.head, self.context.slots(self.head, extra_tokens=slack), self.context.vocab_size)

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        # Never replayable: q depends on where the step started, since features up to there are the target's.
        layers = cls.layers(config)
        if config.tree == "dynamic":
            return DraftTraits(
                kind=DETERMINISTIC, point_mass=True, nodes=config.nodes, hidden_layers=layers, levels=config.depth
            )
        if config.tree is None:
            policy = config.policy.make(config.gamma, 1)
            return DraftTraits(
                kind=CHAIN,
                point_mass=sampling.at(config.temperature).temperature == 0,
                nodes=config.gamma,
                hidden_layers=layers,
                adapts=policy.adapts,
                shortenable=policy.fixed,
                always_drafts=policy.fixed,
                waits=policy.waits,
            )
        shape, siblings = config.shape(), config.effective_siblings(sampling)
        return DraftTraits(
            kind=CHAIN if shape.is_path else SIBLING_KINDS[siblings],
            point_mass=siblings == "top-k",
            nodes=shape.nodes,
            levels=len(shape.ranks),
            hidden_layers=layers,
            branching=config.branching if config.choices is None else None,
        )

    @classmethod
    def remembers(cls, config: Any) -> bool:
        return config.tree is None and config.policy.make(config.gamma, 1).remembers

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self._pending[row] = []
        self.policy.start(row)
        if len(prompt) == 1:
            self.lm.start(row, [], self._no_features())
            return
        features = self._features(hidden)
        # The last pair, that of the root, is fed with the first draft.
        self.lm.start(row, list(prompt[1:]), features[:-1])
        self._pending[row] = [features[-1:]]

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        has_pair = [len(history) > 1 for history in sequences.history]
        limit = [limit if ready else 0 for limit, ready in zip(sequences.limit, has_pair, strict=True)]
        self._draft_lengths = self.policy.draft_lengths(limit, sequences.occupied)
        levels = self._levels(max(limit))
        if levels == 0:
            return Draft.empty(sequences.batch_size, sequences.device)
        root = self._feed_pending(sequences)
        draft = self._draft(levels, root, on_device(limit, sequences.device), rng)
        if draft.finite is not None:  # the logits of a row without a pair are meaningless
            draft.finite = draft.finite | ~on_device(has_pair, sequences.device).bool()
        self.lm.forget()
        return draft

    def _levels(self, limit: int) -> int:
        """Number of levels to draft, given the largest limit of the rows."""
        if self.config.tree is None:
            return max(self._draft_lengths)
        return min(limit, self.config.depth if self.shape is None else len(self.shape.ranks))

    def _draft(self, levels: int, root: Tensor, limit: Tensor, rng: StepRng) -> Draft:
        own = self.config
        if own.tree is None:
            return grow_chain(root, self.lm.forward, self._draft_lengths, self.policy, self.sampling, rng)
        if self.shape is None:
            top_k = min(own.top_k, root.shape[1])
            return grow_dynamic(levels, top_k, own.nodes, root, self.lm.forward, limit)[0]
        # A path needs no tree mask.
        expand = (lambda tokens, parents: self.lm.forward(tokens)) if self.shape.is_path else self.lm.forward
        return grow_static(self.shape, levels, self.siblings, root, expand, self.sampling, limit, rng)[0]

    def _feed_pending(self, sequences: Sequences) -> Tensor:
        """Feed the newly committed pairs with the target's features; return logits ``[B, V]`` after the root."""
        features = self._pop_pending()
        tokens = [history[length + 1 :] for history, length in zip(sequences.history, self.lm.lengths, strict=True)]
        missing = [len(rows) for rows in features]
        assert [len(t) for t in tokens] == missing, "a committed pair lacks its token or its feature"
        while counts := fed_before(missing, self.lm.lengths, sequences.max_length):
            self._feed(tokens, features, counts)
            tokens = [t[n:] for t, n in zip(tokens, counts, strict=True)]
            features = [rows[n:] for rows, n in zip(features, counts, strict=True)]
            missing = [len(t) for t in tokens]
        return self._feed(tokens, features, missing)

    def _feed(self, tokens: Sequence[list[int]], features: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        """Feed the first ``counts[b]`` pairs of each row; return logits ``[B, V]`` after the last one."""
        width = max(counts)
        padded = on_device([(t + [0] * width)[:width] for t in tokens], self.context.device)
        rows = [rows[:width] for rows in features]
        return self.lm.commit(padded, pad_sequence(rows, batch_first=True), counts)
