"""What a drafter would have drafted along recorded responses: see `Forced`.

Any drafter of chains can be forced, a third party's too, through its public contract: `walk` gives it a random source
that draws the recorded tokens. That is one drafting of G tokens from each token of a text, many responses side by side,
and a pass of the target over each token. For heads nothing else is cheaper: their law depends on where the step
started.

If a token's distribution depends only on the tokens before it (`Drafter.text_distribution`), one pass of
its model over the text is enough. The target is needed for log P alone, and not at all where that was recorded. So can
sequences that are drawn independently be replayed, and what rules for several of them need comes from the same rows of
the two laws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from pydantic import ValidationError

from ...api.build import Configured, TargetContext, make_slots
from ...contracts.draft_kind import INDEPENDENT_SEQUENCES
from ...contracts.drafter import DraftContext, Drafter, DraftTraits, TextDistribution
from ...contracts.models import LoadedModel
from ...contracts.options import fault
from ...contracts.rng import CounterRng
from ...contracts.sampling import Sampling
from ...errors import ModelError, UsageError
from ..response import Response
from .drafter_walk import Walked, Walker, context_length_of, unforced, walk_together
from .forced_draft import Forced
from .text_distributions import Reading, from_text

#: How deep drafts are replayed unless somebody asks for more.
DEPTH = 16
#: Most responses side by side, and bytes that the laws of a step or of a piece of text may take.
ROWS, BYTES = 32, 512 * 2**20
#: Longest piece of a text that one pass reads, in tokens.
WIDEST = 64
#: Responses that are sorted by length, so that those of one length go together, in batches.
WINDOW = 8

#: ``make(rows, longest, room)``: what the drafter may ask for, over ``rows`` new slots of the target that hold the
#: longest sequence and ``room`` tokens more.
MakeContext = Callable[[int, int, int], DraftContext]


def over(loaded: LoadedModel, sampling: Sampling, **more: Any) -> MakeContext:
    """For a loaded target; ``more`` goes to `TargetContext.of`."""

    def make(rows: int, longest: int, room: int) -> DraftContext:
        slot = longest + room
        lm = make_slots(loaded, rows, slot)
        return TargetContext.of(loaded, lm, sampling, slot=slot, sequence=longest, **more)

    return make


@dataclass(frozen=True)
class Asked:
    """A drafter to force along texts.

    Attributes:
        drafter: class and config. Its ``gamma``, if it has one, becomes ``depth``: shorter drafts are beginnings.
        depth: G, of the deepest drafts.
        sequences: most draft sequences that a rule will be asked about, for `Forced.sums`; 0 = there are no sums.
        tops: tell `Forced.log_top`; of point masses that is known only of drafters with a law of the text.
    """

    drafter: Configured
    depth: int = DEPTH
    sequences: int = 0
    tops: bool = False


def forced(
    drafter: Configured,
    texts: Sequence[Response],
    make: MakeContext,
    *,
    depth: int = DEPTH,
    sequences: int = 0,
    tops: bool = False,
    rows: int = ROWS,
) -> Iterator[Forced]:
    """`together` of one drafter, see `Asked`."""
    for (one,) in together([Asked(drafter, depth, sequences, tops)], texts, make, rows=rows):
        yield one


def together(
    asked: Sequence[Asked],
    texts: Sequence[Response],
    make: MakeContext,
    *,
    without: MakeContext | None = None,
    rows: int = ROWS,
) -> Iterator[list[Forced]]:
    """What several drafters would have drafted along each of ``texts``, in their order: one of each for every text.

    The target goes over a text once, or not at all: for log P, for the rows that several sequences need, and for all
    drafters that read its hidden states.

    Args:
        make: see `MakeContext`; `over` makes it for a loaded target.
        without: the same without the target, where it can be spared: log P was recorded (or is 0), no sums are asked
            for, and the laws of all drafters follow from the text.
        rows: most responses side by side; fewer where their laws would take too much memory.

    Raises:
        UsageError: a drafter that cannot be forced, or a response that this target cannot have given.
        ModelError: a model that a drafter asks for and cannot have.
        NumericalError: NaN in the numbers of target or drafter; log P that are no logarithms of probabilities.
    """
    # What a drafter learns hangs on the order of texts, so one that does goes along them alone.
    alone = [i for i, one in enumerate(asked) if _learns(one)]
    parts = [[i for i in range(len(asked)) if i not in alone], *([i] for i in alone)]
    parts = [part for part in parts if part]
    replays = [_Replay([asked[i] for i in part], texts, make, without, rows) for part in parts]
    order = [i for part in parts for i in part]
    for found in zip(*(replay.each(replay.forced) for replay in replays), strict=True):
        of = dict(zip(order, chain(*found), strict=True))
        yield [of[i] for i in range(len(asked))]


def _learns(asked: Asked) -> bool:
    """Whether what it drafts may hang on earlier sequences."""
    return asked.drafter[0].remembers(asked.drafter[1])


def drafted(
    drafter: Configured,
    texts: Sequence[Response],
    make: MakeContext,
    *,
    depth: int = DEPTH,
    seed: int = 0,
    without: MakeContext | None = None,
    rows: int = ROWS,
) -> Iterator[Walked]:
    """What ``drafter`` drafts from each token of each text when it draws for itself: `Walked.lengths`, and log Q of the
    drafted tokens, from which other lengths follow (`lengths`).

    What tokens cost that are drafted in vain, where the length depends on what is drafted. Given the tokens before t,
    whether a step starts there and what is drafted there are independent. So the sum over t of Pr(a step starts at t)
    times these lengths has the mean of what a run drafts.

    Args and errors: as of `together`, where log P counts as recorded: nobody asks for it; ``seed`` of the drawing.
    """
    replay = _Replay([Asked(drafter, depth, tops=True)], texts, make, without, rows, said=False)
    rng = CounterRng(seed)

    def drawn(group: Sequence[Response], indices: Sequence[int]) -> list[Walked]:
        return walk_together(replay.walkers(), replay.context, group, rng, indices)[0]

    yield from replay.each(drawn)


class _Replay:
    """Drafters that were made for some texts, over one set of slots of the target."""

    def __init__(
        self,
        asked: Sequence[Asked],
        texts: Sequence[Response],
        make: MakeContext,
        without: MakeContext | None,
        rows: int,
        said: bool = True,
    ):
        depth = max(one.depth for one in asked)
        if min(one.depth for one in asked) < 1 or rows < 1:
            raise UsageError(f"a replay needs depth and rows of at least 1, not {depth} and {rows}")
        self.asked, self.texts = asked, texts
        configs = [deepened(*one.drafter, one.depth) for one in asked]
        longest = max((len(text.prompt) + len(text.tokens) for text in texts), default=1)
        spared = without is not None and not any(one.sequences for one in asked)
        facts = without(1, longest, 1) if without is not None and spared else make(1, longest, 1)
        self.sampling = facts.sampling
        known = not said or not self.sampling.temperature or all(text.log_p is not None for text in texts)
        self.traits = [
            _checked(one.drafter[0], config, self.sampling) for one, config in zip(asked, configs, strict=True)
        ]
        check(texts, facts.vocab_size, context_length_of(facts))
        learns = _learns(asked[0])
        rows = 1 if learns else min(rows, max(len(texts), 1), max(1, BYTES // (12 * depth * facts.vocab_size)))
        self.width = max(1, min(WIDEST, BYTES // (24 * rows * facts.vocab_size)))
        self._window = rows if learns else WINDOW * rows
        room = 1 + max(self.width, *(traits.nodes for traits in self.traits))
        self.drafters: list[Drafter] = []
        self.laws: list[TextDistribution | None] = []
        spared = spared and known and not any(traits.hidden_layers for traits in self.traits)
        if spared and without is not None:
            with suppress(ModelError):  # one may ask for what only a target that is there can give
                self._made(configs, without(rows, longest, room))
        if not self.laws or (self.context.target is None and None in self.laws):
            self._made(configs, make(rows, longest, room))
        for one, law, traits in zip(asked, self.laws, self.traits, strict=True):
            name = one.drafter[0].name
            if law is None and (one.sequences or (traits.kind is not None and traits.kind.merged_sequences)):
                raise unforced(name, "its law depends on where a step starts, which only single chains may")
            if one.sequences and law is not None and not (law.sampling.temperature and self.sampling.temperature):
                raise UsageError(
                    f"drafter '{name}' drafts one chain at temperature 0; there are no {one.sequences} sequences to "
                    "replay"
                )

    def _made(self, configs: Sequence[Any], context: DraftContext) -> None:
        self.context = context
        self.drafters = [one.drafter[0](config, context) for one, config in zip(self.asked, configs, strict=True)]
        self.laws = [drafter.text_distribution() for drafter in self.drafters]

    def walkers(self) -> list[Walker]:
        """All of them, to be walked."""
        pairs = zip(self.drafters, self.asked, strict=True)
        return [Walker(drafter, one.depth, one.tops) for drafter, one in pairs]

    def each(self, replayed: Callable[[list[Response], list[int]], list[Any]]) -> Iterator[Any]:
        """What ``replayed(texts, their indices)`` returns for every text, in order, asked for at most B at once."""
        for start in range(0, len(self.texts), self._window):
            window = range(start, min(start + self._window, len(self.texts)))
            order = sorted(window, key=lambda index: len(self.texts[index].tokens))
            found: dict[int, Any] = {}
            for first in range(0, len(order), self.context.batch_size):
                indices = order[first : first + self.context.batch_size]
                found.update(zip(indices, replayed([self.texts[i] for i in indices], indices), strict=True))
            yield from (found[index] for index in window)

    def forced(self, group: list[Response], indices: Sequence[int]) -> list[list[Forced]]:
        """Of each text, what each drafter would have drafted."""
        every: dict[int, list[Forced]] = {}
        walking = [i for i, law in enumerate(self.laws) if law is None]
        log_p = [self.recorded(text) for text in group]
        walked: list[np.ndarray | None] = [None] * len(group)
        if walking:
            mine = self.walkers()
            walks = walk_together([mine[i] for i in walking], self.context, group)
            if self.context.target is not None and self.sampling.temperature:
                walked = [None if p is None else one.log_p for one, p in zip(walks[0], log_p, strict=True)]
            log_p = [one.log_p if p is None else p for one, p in zip(walks[0], log_p, strict=True)]
            for i, own in zip(walking, walks, strict=True):
                every[i] = [
                    Forced(one.log_q, one.lengths, p, log_top=one.log_top, own_log_p=target)
                    for one, p, target in zip(own, log_p, walked, strict=True)
                ]
        reading = [i for i in range(len(self.laws)) if i not in walking]
        if reading:
            read = from_text([self._reading(i) for i in reading], self.context, self.width, group, log_p)
            every |= dict(zip(reading, read, strict=True))
        return [list(one) for one in zip(*(every[i] for i in range(len(self.asked))), strict=True)]

    def _reading(self, i: int) -> Reading:
        one, law = self.asked[i], self.laws[i]
        assert law is not None
        return Reading(one.drafter[0].name, law, self.traits[i].depth, one.depth, one.sequences, one.tops)

    def recorded(self, text: Response) -> np.ndarray | None:
        """Its log P if that is known: 0 at temperature 0, whatever somebody wrote down."""
        if not self.sampling.temperature:
            return np.zeros(len(text.tokens))
        if text.log_p is None:
            return None
        found = np.asarray(text.log_p, dtype=np.float64)
        if found.shape != (len(text.tokens),):
            raise UsageError(f"{text.where}: {len(text.tokens)} tokens have log P of shape {list(found.shape)}")
        return found


def _checked(cls: type[Drafter], config: Any, sampling: Sampling) -> DraftTraits:
    """The traits of a drafter that can be forced."""
    traits = cls.traits(config, sampling)
    if traits.adapts:
        raise unforced(cls.name, "how it drafts depends on how earlier steps went")
    if not traits.nested:
        raise unforced(cls.name, "a shorter draft of it is no beginning of a longer one")
    if traits.kind is not None and INDEPENDENT_SEQUENCES not in traits.kind.capabilities:
        raise unforced(cls.name, f"it drafts trees ('{traits.kind}'), for which no identity is known")
    if traits.temperature_zero_only and sampling.temperature:
        raise UsageError(f"drafter '{cls.name}' drafts at temperature 0 only")
    return traits


def deepened(cls: type[Drafter], config: Any, depth: int) -> Any:
    """The config with a ``gamma`` of ``depth``; as it is without one. One that may be null, "as far as it goes", is."""
    field = cls.Config.model_fields.get("gamma")
    if field is None:
        return config
    gamma = None if field.default is None else depth
    try:
        return cls.Config(**{**config.model_dump(exclude_unset=True), "gamma": gamma})
    except ValidationError as error:
        raise UsageError(f"drafter '{cls.name}' cannot draft {depth} tokens: {fault(error.errors()[0])}") from None


def check(texts: Sequence[Response], vocab_size: int, context_length: int | None) -> None:
    """Raise UsageError for a response that this target cannot have given."""
    for text in texts:
        ids = [*text.prompt, *text.tokens]
        if not len(text.prompt):
            raise UsageError(f"{text.where}: the prompt is empty; a response follows at least one token")
        if context_length is not None and len(ids) > context_length:
            raise UsageError(
                f"{text.where}: prompt and response have {len(ids)} tokens, but the target's context is "
                f"{context_length}; leave it out"
            )
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            strange = min(ids) if min(ids) < 0 else max(ids)
            raise UsageError(
                f"{text.where}: it holds the token {strange}, outside of the target's vocabulary of {vocab_size}; was "
                "it given by another model?"
            )
