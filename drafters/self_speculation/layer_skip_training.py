"""Search for the sublayers that a target should leave out when it drafts for itself.

J. Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", ACL 2024,
section 3.3: z* = argmin f(z) by Bayesian optimisation, f(z) the mean time a token takes on a few texts. Time depends
on the machine and on who else uses it; here f is what it follows from, and comes out the same wherever it is
searched: 1 over the speed-up that a search promises, see `Search.worth`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ...framework.contracts.lm import LM
from ...framework.contracts.models import LoadedModel
from ...framework.contracts.training import Search, SearchConfig
from ...framework.errors import UsageError
from .layer_skip import KIND
from .own_layers import depth_of

#: Shares of the sublayers that are left out in the first random trials, and how many trials of each there are.
SHARES, EACH = (1 / 16, 1 / 8, 1 / 4), 4


@dataclass(frozen=True, kw_only=True)
class LayerSkipSearch(SearchConfig):
    """How to search for the sublayers to leave out."""

    name = KIND

    def search(self, target: LoadedModel) -> Search:
        return LayerSkipTrials(target, self)


class LayerSkipTrials(Search):
    """A yes or no for each of 2L sublayers."""

    def __init__(self, target: LoadedModel, recipe: LayerSkipSearch):
        super().__init__(target, recipe)
        self.drafter = {"name": "layer-skip"}
        depth = depth_of(target.model)
        if depth is None or depth < 2:
            raise UsageError(f"{target.name} has {depth} layers, of which none can be left out")
        self.depth: int = depth

    def first(self) -> Sequence[Mapping[str, Any]]:
        """Every third layer, every second attention, and every second feed-forward network of the middle; then random
        sets that leave out few, because a model without half of its sublayers, whichever they are, says nothing."""
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
        left_out = {
            what: [i for i in range(self.depth) if trial.suggest_categorical(f"{what}.{i}", [False, True])]
            for what in ("attention", "mlp")
        }
        return {"layers": self.depth, "skip_attention": left_out["attention"], "skip_mlp": left_out["mlp"]}

    def fork(self, lm: LM, settings: Mapping[str, Any]) -> LM | None:
        attention, mlp = set(settings["skip_attention"]), set(settings["skip_mlp"])
        layers = [i for i in range(self.depth) if i not in attention & mlp]
        if not layers or not attention | mlp:
            return None
        return lm.fork(layers, no_attention=attention - mlp, no_mlp=mlp - attention)

    def describe(self) -> tuple[str, str, str]:
        return (
            f"Sublayers to leave out of {self.target_name}",
            f"Which attention and feed-forward sublayers `{self.target_name}` leaves out when it drafts for itself (J. "
            "Zhang et al., Draft & Verify, 2024); use it as checkpoint of the drafter layer-skip.",
            f"the speed-up that the acceptance on {self.recipe.sample} response tokens, and the share of the weights "
            f"that are still read, promise at the best draft length up to {self.recipe.gamma}",
        )
