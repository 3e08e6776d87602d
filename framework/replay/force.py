"""What a drafter would have drafted along recorded responses: see `Forced`.

Any drafter of chains can be forced, a third party's too, through its public contract: `walk` gives it a random source
that draws the recorded tokens. That is one drafting of G tokens from each token of a text, many responses side by side,
and a pass of the target over each token. For heads nothing else is cheaper: their law depends on where the round
started.

Where a token's law follows from the tokens before it alone, the drafter says so (`Drafter.text_law`): then one pass of
its model over the text is enough. The target is needed for log P alone, and not at all where that was recorded. So can
sequences that are drawn independently be replayed, and what rules for several of them need comes from the same rows of
the two laws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from ..contracts.draft import on_device
from ..contracts.drafter import DraftContext, Drafter, TextLaw
from ..contracts.errors import NumericalError, UsageError
from ..contracts.models import LoadedModel
from ..contracts.rng import CounterRng
from ..contracts.sampling import Sampling
from ..decoding.build import Configured, TargetContext, make_slots
from .along import laid_out, pieces
from .forced import Forced
from .response import Response
from .sequences import Sums, sums
from .walk import Walked, ended, room, unforced, walk

#: How deep drafts are replayed unless somebody asks for more.
DEPTH = 16
#: Most responses side by side, and bytes that the laws of a round or of a piece of text may take.
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
    """What ``drafter`` would have drafted along each of ``texts``, in their order.

    Args:
        drafter: class and config. Its ``gamma``, if it has one, becomes ``depth``: shorter drafts are beginnings.
        make: see `MakeContext`; `over` makes it for a loaded target.
        depth: G, of the deepest drafts.
        sequences: most draft sequences that a rule will be asked about, for `Forced.sums`; 0 = there are no sums.
        tops: tell `Forced.log_top`; of point masses that is known only of drafters with a law of the text.
        rows: most responses side by side; fewer where their laws would take too much memory.

    Raises:
        UsageError: a drafter that cannot be forced, or a response that this target cannot have given.
        ModelError: a model that the drafter asks for and cannot have.
        NumericalError: NaN in the numbers of target or drafter; log P that are no logarithms of probabilities.
    """
    replay = _Replay(drafter, texts, make, depth, rows, tops)
    law = replay.drafter.text_law()
    if law is None and (sequences or replay.traits.drawn == "iid"):
        raise unforced(replay.name, "its law depends on where a round starts, which only single chains may")
    if sequences and law is not None and not (law.sampling.temperature and replay.context.sampling.temperature):
        raise UsageError(
            f"drafter '{replay.name}' drafts one chain at temperature 0; there are no {sequences} sequences to replay"
        )
    yield from replay.each(lambda group, _: _from_text(replay, law, group, sequences) if law else replay.walked(group))


def drafted(
    drafter: Configured,
    texts: Sequence[Response],
    make: MakeContext,
    *,
    depth: int = DEPTH,
    seed: int = 0,
    rows: int = ROWS,
) -> Iterator[Walked]:
    """What ``drafter`` drafts from each token of each text when it draws for itself: `Walked.lengths`, and log Q of the
    drafted tokens, from which other lengths follow (`lengths`).

    What tokens cost that are drafted in vain, where the length depends on what is drafted. Given the tokens before t,
    whether a round starts there and what is drafted there are independent. So the sum over t of Pr(a round starts at t)
    times these lengths has the mean of what a run drafts.

    Args and errors: as of `forced`; ``seed`` of the drawing.
    """
    replay = _Replay(drafter, texts, make, depth, rows, True)
    rng = CounterRng(seed)

    def drawn(group: Sequence[Response], indices: Sequence[int]) -> list[Walked]:
        return walk(replay.drafter, replay.context, group, depth, rng, streams=indices, tops=True)

    yield from replay.each(drawn)


class _Replay:
    """A drafter that was made for some texts."""

    def __init__(
        self, drafter: Configured, texts: Sequence[Response], make: MakeContext, depth: int, rows: int, tops: bool
    ):
        if depth < 1 or rows < 1:
            raise UsageError(f"a replay needs depth and rows of at least 1, not {depth} and {rows}")
        cls, config = drafter
        self.name, self.texts, self.depth, self.tops = cls.name, texts, depth, tops
        config = deepened(cls, config, depth)
        longest = max((len(text.prompt) + len(text.tokens) for text in texts), default=1)
        alone = make(1, longest, 1)
        self.traits = traits = cls.traits(config, alone.sampling)
        if traits.adapts:
            raise unforced(self.name, "how it drafts depends on how earlier rounds went")
        if traits.drawn not in (None, "chain", "iid"):
            raise unforced(self.name, f"it drafts trees ('{traits.drawn}'), for which no identity is known")
        if traits.temperature_zero_only and alone.sampling.temperature:
            raise UsageError(f"drafter '{self.name}' drafts at temperature 0 only")
        vocab = alone.vocab_size
        check(texts, vocab, None if alone.target is None else alone.target.context_length)
        learns = cls.reset is not Drafter.reset  # from one sequence for the next, so their order matters
        rows = 1 if learns else min(rows, max(len(texts), 1), max(1, BYTES // (12 * depth * vocab)))
        self.width = max(1, min(WIDEST, BYTES // (24 * rows * vocab)))
        self.context = make(rows, longest, 1 + max(traits.nodes, self.width))
        self.drafter: Drafter = cls(config, self.context)
        self._window = rows if learns else WINDOW * rows

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

    def walked(self, group: Sequence[Response]) -> list[Forced]:
        walks = walk(self.drafter, self.context, group, self.depth, tops=self.tops)
        return [
            Forced(
                one.log_q,
                one.lengths,
                one.log_p if text.log_p is None else self.recorded(text),
                log_top=one.log_top,
            )
            for one, text in zip(walks, group, strict=True)
        ]

    def recorded(self, text: Response) -> np.ndarray:
        """Its log P, 0 at temperature 0 whatever somebody wrote down."""
        if not self.context.sampling.temperature:
            return np.zeros(len(text.tokens))
        found = np.asarray(text.log_p, dtype=np.float64)
        if found.shape != (len(text.tokens),):
            raise UsageError(f"{text.where}: {len(text.tokens)} tokens have log P of shape {list(found.shape)}")
        return found


def deepened(cls: type[Drafter], config: Any, depth: int) -> Any:
    """The config with a ``gamma`` of ``depth``; as it is without one. One that may be null, "as far as it goes", is."""
    field = cls.Config.model_fields.get("gamma")
    if field is None:
        return config
    gamma = None if field.default is None else depth
    try:
        return cls.Config(**{**config.model_dump(exclude_unset=True), "gamma": gamma})
    except ValidationError as error:
        raise UsageError(f"drafter '{cls.name}' cannot draft {depth} tokens: {error.errors()[0]['msg']}") from None


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


# -- a law that follows from the text --------------------------------------------------------------------------


@torch.inference_mode()
def _from_text(replay: _Replay, law: TextLaw, group: Sequence[Response], sequences: int) -> list[Forced]:
    context, width = replay.context, replay.width
    sampled = context.sampling.temperature > 0
    asks = sampled and (sequences > 0 or any(text.log_p is None for text in group))
    lengths = [len(text.tokens) for text in group]
    longest = max(lengths, default=0)
    x = on_device([[*text.tokens, *[0] * (longest - len(text.tokens))] for text in group], context.device)
    log_q, log_p, log_top, stops = [], [], [], []
    parts: list[list[Sums]] = [[] for _ in group]
    assert context.target is not None
    target = pieces(context.target, group, width) if asks else None
    for i, logits in enumerate(pieces(law.lm, group, width)):
        y = x[:, i * width : i * width + logits.shape[1]]
        logits = logits[: len(group)]
        q = law.sampling.law(logits)
        log_q.append(_at(q, y))
        believed = q if law.sampling.temperature else logits.float().softmax(-1)
        if replay.tops:
            log_top.append(believed.amax(-1).double().log())
        if law.goes_on is not None:
            flat = (logits.flatten(0, 1), believed.flatten(0, 1), y.flatten())
            stops.append(~law.goes_on(*flat).view_as(y))
        if target is not None:
            p = context.sampling.law(next(target)[: len(group)])
            log_p.append(_at(p, y))
            for row, length in enumerate(lengths):
                n = min(length - i * width, width)
                if sequences and n > 0:
                    parts[row].append(sums(p[row, :n], q[row, :n], y[row, :n], sequences))
    if target is not None:
        target.close()
    found = []
    depth = min(replay.depth, replay.traits.depth)
    for row, (text, n) in enumerate(zip(group, lengths, strict=True)):
        own = _joined(log_q, row, n)
        said = _joined(log_p, row, n) if asks else np.zeros(n)
        for who, values in ((f"drafter '{replay.name}'", own), ("the target", said)):
            if np.isnan(values).any():
                at = int(np.argmax(np.isnan(values)))
                raise NumericalError(f"{who} produced NaN at token {at} of {text.where}; try dtype float32")
        ends = range(len(text.prompt), len(text.prompt) + n)
        reach = np.array([room(depth, end, context.target.context_length) for end in ends], dtype=np.int64)
        if stops:
            reach = np.minimum(reach, _until(torch.cat(stops, 1)[row, :n].cpu().numpy(), law.keeps_last))
        cells = laid_out(own, replay.depth)
        cells = np.where(np.arange(replay.depth) < reach[:, None], cells, -np.inf)
        kept = said if text.log_p is None or not sampled else replay.recorded(text)
        joined = Sums.joined(parts[row]) if parts[row] else None
        best = laid_out(_joined(log_top, row, n), replay.depth) if replay.tops else None
        found.append(Forced(ended(cells), reach, kept, joined, best))
    return found


def _at(law: Tensor, tokens: Tensor) -> Tensor:
    """``[B, w]`` float64: the log of ``law [B, w, V]`` at ``tokens [B, w]``."""
    return law.gather(2, tokens[..., None])[..., 0].double().log()


def _joined(pieces: Sequence[Tensor], row: int, n: int) -> np.ndarray:
    return torch.cat([piece[row] for piece in pieces])[:n].cpu().numpy() if n else np.zeros(0)


def _until(stops: np.ndarray, keeps_last: bool) -> np.ndarray:
    """``[T]``: tokens from each on to the first of ``stops [T]`` bool, it included or not; very many if none comes."""
    t = np.arange(len(stops))
    at = np.where(stops, t + keeps_last, t[-1:] + 2**20)
    return np.minimum.accumulate(at[::-1])[::-1] - t
