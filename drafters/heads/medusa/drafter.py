"""Medusa: heads on the target's last hidden state draft the next tokens in parallel.

T. Cai, Y. Li, Z. Geng, H. Peng, J. D. Lee, D. Chen, T. Dao, "Medusa: Simple LLM Inference Acceleration Framework with
Multiple Decoding Heads", ICML 2024. Head i (from 0) at position t predicts token t + 2 + i (section 2.1.1, equation 1);
token t + 1 is the root, already chosen by the target. The features of the last accepted token come from the target's
own pass, so drafting costs only the heads. A sequence of one token has no feature yet and drafts nothing.

Heads are not conditioned on each other's tokens: their distributions are independent given the text, which is the q of
a sampled chain. Trees hold the most probable tokens of each head (section 2.1.2) and are point masses.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from ....framework.contracts.draft import Draft, Sequences, on_device
from ....framework.contracts.draft_kind import CHAIN, DETERMINISTIC
from ....framework.contracts.drafter import DraftContext, DraftTraits, StrategyConfig
from ....framework.contracts.models import Checkpoint
from ....framework.contracts.rng import StepRng
from ....framework.contracts.sampling import Sampling
from ....framework.errors import UsageError
from ....framework.util.limits import MOST_LEVELS, MOST_NODES
from ....framework.util.static_trees import tree_constant
from ...autoregressive.trees import Choices, TreeTemplate, best_paths, ordered, tree_shape
from ..config_keys import LAYOUTS
from ..feature_head import expand_vocab
from ..feature_reader import LastStateReader
from .weights import read_heads

#: Maximum length of a chain if gamma is not set.
MOST_HEADS = 16
#: Published trees: number of children, of ranks 0, 1, .., of each inner node.
_TREES: dict[str, dict[tuple[int, ...], int]] = {
    "mc_sim_7b_63": {
        **{(): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2},
        **{(rank,): 1 for rank in range(4, 10)},
        **{(0, 0): 10, (0, 1): 3, (0, 2): 2},
        **{(0, rank): 1 for rank in range(3, 8)},
        **{(1, 0): 2, (2, 0): 1, (0, 0, 0): 2},
    }
}
#: The same trees as choice lists.
TREES: dict[str, Choices] = {
    name: tuple((*parent, rank) for parent, count in tree.items() for rank in range(count))
    for name, tree in _TREES.items()
}


class Medusa(LastStateReader):
    """A chain of gamma tokens, one per head; or a tree of the heads' most probable tokens.

    A chain is sampled, each token from its head's distribution warped like the target's; at temperature 0 it is the
    argmax, a point mass. A tree is given as ``choices``, by ``branching``, or computed for a number of ``nodes`` from
    the accuracies in the heads' config.
    """

    name = "medusa"
    layout = LAYOUTS["medusa"]

    class Config(StrategyConfig):
        model: str = Field(description="name, directory or Hub id of heads made for the target")
        heads: int | None = Field(
            None,
            ge=1,
            le=MOST_LEVELS,
            description="number of heads to use; required if their config has a wrong number",
        )
        gamma: int | None = Field(
            None,
            ge=0,
            le=MOST_LEVELS,
            description=f"length of a chain; default: one token per head, at most {MOST_HEADS}",
        )
        choices: Choices | Literal["mc_sim_7b_63"] | None = Field(
            None, description="a tree: nodes as lists of ranks, e.g. [[0], [1], [0, 0]], or the published mc_sim_7b_63"
        )
        branching: tuple[int, ...] | None = Field(None, description="a tree: children per node, level by level")
        nodes: int | None = Field(
            None,
            ge=1,
            le=MOST_NODES,
            description="the best tree of this size, by medusa_accuracies in the heads' config",
        )
        temperature: float | None = Field(None, ge=0, description="temperature of a chain; default: the target's")

        @model_validator(mode="after")
        def _one_shape(self) -> Any:
            shape_keys = [key for key in ("gamma", "choices", "branching", "nodes") if getattr(self, key) is not None]
            if len(shape_keys) > 1:
                raise ValueError(f"{' and '.join(shape_keys)} are different shapes; give one of them")
            if self.temperature is not None and shape_keys not in ([], ["gamma"]):
                raise ValueError(
                    "temperature belongs to a chain; a tree holds the most probable tokens at any temperature"
                )
            self.shape()
            return self

        def shape(self) -> TreeTemplate | None:
            """Build the tree, if it does not depend on the heads."""
            if self.branching is None and self.choices is None:
                return None
            choices = TREES[self.choices] if isinstance(self.choices, str) else self.choices
            return tree_shape(self.branching, choices)

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        target, name = context.target_model, self.config.model
        checkpoint = context.load_heads(name)
        self.heads, self._ids = context.load_module(
            checkpoint, lambda heads: read_heads(heads, target, self.config.heads), Medusa, self.config.heads
        )
        self._run = context.runner(self.heads)
        self.sampling = context.sampling.at(self.config.temperature)
        self._tree = self.config.shape()
        if self.config.nodes is not None:
            self._tree = TreeTemplate.choices(best_paths(_accuracies(checkpoint)[: len(self.heads)], self.config.nodes))
        if self._tree is not None:
            self.depth = len(self._tree.ranks)
            self._set_tree(self._tree)
        elif self.config.gamma is None:
            self.depth = min(len(self.heads), MOST_HEADS)
        else:
            self.depth = self.config.gamma
        if self.depth > len(self.heads):
            raise UsageError(
                f"drafter 'medusa': the draft is {self.depth} tokens deep, but '{name}' has {len(self.heads)} heads, "
                "one per token; shorten gamma or the tree"
            )

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        if config.nodes is not None:
            levels = min(config.nodes, MOST_HEADS)
            return DraftTraits(DETERMINISTIC, True, config.nodes, hidden_layers=(-1,), levels=levels)
        if (shape := config.shape()) is not None:
            return DraftTraits(
                kind=CHAIN if shape.is_path else DETERMINISTIC,
                point_mass=True,
                nodes=shape.nodes,
                levels=len(shape.ranks),
                hidden_layers=(-1,),
                branching=config.branching,
            )
        return DraftTraits(
            kind=CHAIN,
            point_mass=sampling.at(config.temperature).temperature == 0,
            nodes=MOST_HEADS if config.gamma is None else config.gamma,
            hidden_layers=(-1,),
        )

    def _set_tree(self, tree: TreeTemplate) -> None:
        """Store parent, level and rank of each node, ``[N]`` each."""
        device, ranks = self.context.device, [rank for level in tree.ranks for rank in level]
        self._parents = tree_constant(tree.children, "parents", device)
        self._levels = tree_constant(tree.children, "depth", device)[1:] - 1
        self._ranks = on_device(ranks, device)
        if max(ranks, default=0) >= self.heads.vocab_size:
            raise UsageError(
                f"drafter 'medusa': the tree has rank {max(ranks)}, but the heads '{self.config.model}' have only "
                f"{self.heads.vocab_size} tokens; use lower ranks"
            )

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        limits = [
            min(limit, self.depth) if known else 0
            for limit, known in zip(sequences.limit, self._has_feature, strict=True)
        ]
        steps = max(limits)
        if steps == 0:
            return Draft.empty(sequences.batch_size, sequences.device)
        limit = on_device(limits, sequences.device)
        # All heads, in short steps, too: one shape to capture.
        (logits,) = self._run(self._score, {"features": self._features}, self.depth)
        assert logits is not None
        logits = logits[:, :steps]
        not_ready = ~on_device(self._has_feature, sequences.device).bool()  # logits of such a row are meaningless
        if self._tree is not None:
            return self._most_probable(self._tree, logits, limit, not_ready)
        if self.sampling.temperature == 0:
            best = logits.argmax(-1)
            finite = ~logits.gather(2, best[..., None]).isnan().flatten(1).any(1)
            return Draft.chain(self._token(best), limit, finite=finite | not_ready)
        q, finite = self.sampling.checked_probs(self._expand(logits))
        tokens = torch.stack([rng.draw(q[:, i], "draft", i) for i in range(steps)], 1)
        return Draft.chain(tokens, limit, q, finite=finite.all(1) | not_ready)

    def _score(self, steps: int, features: Tensor) -> tuple[Tensor]:
        """Logits ``[B, steps, rows]`` of the first ``steps`` heads, from ``features [B, H]``."""
        return (self.heads(features, steps).transpose(0, 1),)

    def _most_probable(self, tree: TreeTemplate, logits: Tensor, limit: Tensor, not_ready: Tensor) -> Draft:
        """Draft the first ``steps`` levels of the tree, with each head's tokens by rank."""
        b, steps, rows = logits.shape
        nodes = sum(map(len, tree.ranks[:steps]))
        level, rank = self._levels[:nodes], self._ranks[:nodes]
        widest = 1 + max(map(max, tree.ranks[:steps]))
        best = ordered(logits.reshape(-1, rows), widest).view(b, steps, widest)
        return Draft(
            tokens=self._token(best[:, level, rank]),
            parents=self._parents[:nodes].expand(b, -1),
            valid=level < limit[:, None],
            kind=CHAIN if tree.is_path and self.config.nodes is None else DETERMINISTIC,
            levels=steps,
            finite=~logits.gather(2, best[..., :1]).isnan().flatten(1).any(1) | not_ready,
        )

    def _token(self, index: Tensor) -> Tensor:
        """Map rows of the heads' logits to the target's ids."""
        return index if self._ids is None else self._ids[index]

    def _expand(self, logits: Tensor) -> Tensor:
        """Expand ``[.., rows]`` to ``[.., V]``; tokens not_ready to the heads get -inf, so q is 0."""
        missing = self.context.vocab_size - logits.shape[-1]
        if self._ids is None and missing:
            return functional.pad(logits, (0, missing), value=-torch.inf)
        return expand_vocab(logits, self._ids, self.context.vocab_size)


def _accuracies(checkpoint: Checkpoint) -> list[list[float]]:
    """Read ``medusa_accuracies``: per head, the frequency with which its token of rank 0, 1, .. is correct."""
    accuracies = checkpoint.config.get("medusa_accuracies")
    if accuracies is None:
        raise checkpoint.refused(
            "their config lacks medusa_accuracies (per head, the accuracy of each rank), which nodes: N needs; give "
            "choices or branching instead"
        )
    is_nested = isinstance(accuracies, list) and all(isinstance(ranks, list) for ranks in accuracies)
    if not is_nested or not all(isinstance(a, int | float) and 0 <= a <= 1 for ranks in accuracies for a in ranks):
        raise checkpoint.refused("medusa_accuracies must be a list per head of numbers from 0 to 1, by rank")
    return accuracies
