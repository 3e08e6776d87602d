"""Misreadings of heads that are not in their files: masks, positions and features of the drafted pairs.

Each is a subclass of the drafter whose head is wrapped (`misread`). Hidden pairs and positions are tensors that are
updated in place, so that recorded CUDA graphs read them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from crossdraft.heads import FeatureDrafter
from crossdraft.models import Configured

_ALL = 2**30  # a number of pairs that no sequence reaches


@dataclass(frozen=True)
class HeadMisreading:
    """A way to read heads; by default rightly."""

    # mistake, cure: as in `Misconfiguration`
    mistake: str = ""
    cure: str = ""
    # pairs of one sequence that the others do not attend to, from the pairs of its prompt, those without the draft's
    # and whether pairs of a draft are fed, behind the root's
    hidden_pairs: Callable[[int, int, bool], range] = lambda prompt, committed, drafting: range(0)
    # maximum position of a drafted pair, from the pairs without the draft's
    last_position: Callable[[int], int] = lambda committed: _ALL
    # features of the next drafted pairs from those of the pairs fed and the head's output; None = the head's own
    fed_back: Callable[[Tensor, Tensor], Tensor | None] = lambda features, out: None


MISREADINGS = (
    HeadMisreading(
        "the head attends to its own pair only",
        "keep the keys and values of the head between passes, and check its mask",
        hidden_pairs=lambda prompt, committed, drafting: range(_ALL),
    ),
    HeadMisreading(  # as after a hit in the target's prefix cache
        "the head does not attend to the prompt",
        "feed prompts to the head, also those that the target finds in its prefix cache",
        hidden_pairs=lambda prompt, committed, drafting: range(prompt),
    ),
    HeadMisreading(  # as if it were padding
        "the head does not attend to the first pair",
        "check the mask of the head: the first pair is that of tokens 0 and 1",
        hidden_pairs=lambda prompt, committed, drafting: range(1),
    ),
    HeadMisreading(  # the mask of a tree without the ancestors
        "drafted tokens do not attend to those drafted before them",
        "check the mask of the draft: a node attends to its ancestors",
        hidden_pairs=lambda prompt, committed, drafting: range(committed, _ALL) if drafting else range(0),
    ),
    HeadMisreading(
        "all drafted tokens have the position of the root",
        "advance the position with each drafted token",
        last_position=lambda committed: committed - 1,
    ),
    HeadMisreading(
        "the head's output is not fed back",
        "feed the head's hidden state back as the feature of the next drafted token",
        fed_back=lambda features, out: torch.zeros_like(out),
    ),
    HeadMisreading(
        "the target's last feature is used for all drafted tokens",
        "feed the head's hidden state back as the feature of the next drafted token",
        fed_back=lambda features, out: features,
    ),
)


def misread(drafter: Configured, misreading: HeadMisreading) -> Configured:
    """The drafter with its head misread, a `FeatureDrafter`."""
    cls, config = drafter
    return type(cls.__name__, (_Misread, cls), {"misreading": misreading}), config


class _Misread(FeatureDrafter):
    misreading: ClassVar[HeadMisreading]
    #: Tokens of the response that sequences start with: 1 in a decoder that drafts as servers do, after the prefill.
    emitted: ClassVar[int] = 0

    def __init__(self, config: Any, context: Any):
        super().__init__(config, context)
        rows = context.batch_size
        self._prompt_pairs = [0] * rows
        # Of each row: the first hidden pair, the first visible one behind them, and the maximum position.
        self._bounds = torch.zeros(3, rows, dtype=torch.long, device=context.device)
        self._fed: Tensor | None = None
        head = self.head
        advance, recurrent = head.advance, head.recurrent

        def misled(embeds: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any) -> Tensor:
            self._fed = features
            if len(embeds) == rows:
                position_ids = torch.minimum(position_ids, self._bounds[2][:, None])
                mask = self._masked(mask)
            return advance(embeds, features, position_ids, mask, cache)

        def fed_back(out: Tensor) -> Tensor:
            assert self._fed is not None
            features = self.misreading.fed_back(self._fed, out)
            return recurrent(out) if features is None else features

        head.advance, head.recurrent = misled, fed_back  # type: ignore[method-assign]

    def start(self, row: int, prompt: Any, hidden: Tensor | None = None) -> None:
        self._prompt_pairs[row] = max(len(prompt) - 1 - self.emitted, 0)
        self._bounds.copy_(torch.tensor([[0], [0], [_ALL]]).expand_as(self._bounds))
        super().start(row, prompt, hidden)

    def _feed_pending(self, sequences: Any) -> Tensor:
        self._set_bounds([0] * sequences.batch_size, drafting=False)
        return super()._feed_pending(sequences)

    def _draft(self, levels: int, root: Tensor, limit: Tensor, rng: Any) -> Any:
        self._set_bounds(self.lm.lengths, drafting=True)
        return super()._draft(levels, root, limit, rng)

    def _set_bounds(self, committed: list[int], drafting: bool) -> None:
        bounds = []
        for prompt, pairs in zip(self._prompt_pairs, committed, strict=True):
            hidden = self.misreading.hidden_pairs(prompt, pairs, drafting)
            bounds.append((hidden.start, hidden.stop, self.misreading.last_position(pairs) if drafting else _ALL))
        self._bounds.copy_(torch.tensor(bounds).T)

    def _masked(self, mask: Any) -> Any:
        """The additive mask ``[B, 1, W, pairs]`` without the hidden pairs; a pair always attends to itself."""
        if isinstance(mask, Mapping):
            return {kind: self._masked(each) for kind, each in mask.items()}
        if mask is None:
            return None
        pairs = torch.arange(mask.shape[-1], device=mask.device)
        first, end = (bound[:, None, None, None] for bound in self._bounds[:2])
        visible = mask == 0
        own = visible & (visible.flip(-1).cumsum(-1).flip(-1) == 1)
        hidden = (pairs >= first) & (pairs < end) & ~own
        return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
