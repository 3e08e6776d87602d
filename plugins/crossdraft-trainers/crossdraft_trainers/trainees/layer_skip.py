"""Search for the sublayers that a target skips when it drafts for itself.

J. Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", ACL 2024,
section 3.3: z* = argmin f(z) by Bayesian optimisation, f(z) the mean time per token on a few texts. Measured time
depends on the machine and its load; here f is computed, so the search is reproducible: the reciprocal of the predicted
speed-up, see `Search.worth`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from crossdraft_drafters.self_speculation.layer_skip import KIND
from crossdraft_drafters.self_speculation.own_layers import depth_of

from crossdraft import LM, LoadedModel, UsageError

from ..contract import Search, SearchConfig

#: Shares of skipped sublayers in the first random trials, and the number of trials of each.
SHARES, EACH = (1 / 16, 1 / 8, 1 / 4), 4


class LayerSkipSearch(SearchConfig):
    """Options of ``crossdraft train layer-skip``."""

    name = KIND

    def search(self, target: LoadedModel) -> Search:
        return LayerSkipTrials(target, self)


class LayerSkipTrials(Search):
    """One boolean for each of 2L sublayers."""

    def __init__(self, target: LoadedModel, recipe: LayerSkipSearch):
        super().__init__(target, recipe)
        self.drafter = {"name": "layer-skip"}
        depth = depth_of(target.model)
        if depth is None or depth < 2:
            raise UsageError(f"{target.name} has {depth} layers; at least 2 are needed to skip some")
        self.depth: int = depth

    def first(self) -> Sequence[Mapping[str, Any]]:
        """Every third layer, every second attention, every second feed-forward network of the middle; random sets.

        Random sets hold few sublayers, because a model without half of its sublayers is useless.
        """
        middle = range(self.depth // 4, max(self.depth * 7 // 8, self.depth // 4 + 1))
        random, layers = Random(self.recipe.seed), range(self.depth)
        few = [
            self._params(*([i for i in layers if random.random() < share] for _ in range(2)))
            for share in SHARES
            for _ in range(EACH)
        ]
        return [
            self._params(middle[1::3], middle[1::3]),
            self._params(middle[::2], ()),
            self._params((), middle[::2]),
            *few,
        ]

    def _params(self, attention: Sequence[int], mlp: Sequence[int]) -> dict[str, bool]:
        layers = range(self.depth)
        return {f"attention.{i}": i in attention for i in layers} | {f"mlp.{i}": i in mlp for i in layers}

    def suggest(self, trial: Any) -> dict[str, Any]:
        skipped = {
            part: [i for i in range(self.depth) if trial.suggest_categorical(f"{part}.{i}", [False, True])]
            for part in ("attention", "mlp")
        }
        return {"layers": self.depth, "skip_attention": skipped["attention"], "skip_mlp": skipped["mlp"]}

    def fork(self, lm: LM, settings: Mapping[str, Any]) -> LM | None:
        attention, mlp = set(settings["skip_attention"]), set(settings["skip_mlp"])
        layers = [i for i in range(self.depth) if i not in attention & mlp]
        if not layers or not attention | mlp:
            return None
        return lm.fork(layers, no_attention=attention - mlp, no_mlp=mlp - attention)

    def describe(self) -> tuple[str, str, str]:
        return (
            f"Sublayers that {self.target_name} skips as drafter",
            f"The attention and feed-forward sublayers that `{self.target_name}` skips when it drafts for itself (J. "
            "Zhang et al., Draft & Verify, 2024); use it as checkpoint of the drafter layer-skip.",
            f"the predicted speed-up at the best draft length up to {self.recipe.gamma}, from the acceptance on "
            f"{self.recipe.sample} response tokens and the share of weights that are still read",
        )
