"""Laws that follow from the text alone: one pass of each drafter's model, and at most one of the target for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...contracts.draft import on_device
from ...contracts.drafter import DraftContext, TextDistribution
from ...errors import NumericalError
from ..response import Response
from .drafter_walk import context_length_of, ended, room
from .forced_draft import Forced, ahead
from .iid_chains import Sums, sums
from .model_pass import pieces


@dataclass(frozen=True)
class Reading:
    """A drafter's law, and what is to be known of it.

    Attributes:
        name: of the drafter; ``most``: tokens that it can draft.
        depth, sequences, tops: see `force.Asked`.
    """

    name: str
    law: TextDistribution
    most: int
    depth: int
    sequences: int
    tops: bool


class _Pieces:
    """What a law says along a group of texts, piece by piece."""

    def __init__(self, reading: Reading, group: Sequence[Response], width: int):
        self._reading, self._group, self._width = reading, group, width
        self._logits = pieces(reading.law.lm, group, width)
        self.log_q: list[Tensor] = []
        self.log_top: list[Tensor] = []
        self.stops: list[Tensor] = []
        self.parts: list[list[Sums]] = [[] for _ in group]

    def next(self, i: int, y: Tensor, p: Tensor | None) -> None:
        """Piece i, of tokens ``y [B, w]``, whose laws of the target are ``p [B, w, V]``."""
        logits, law = next(self._logits)[: len(self._group)], self._reading.law
        q = law.sampling.probs(logits)
        self.log_q.append(_at(q, y))
        believed = q if law.sampling.temperature else logits.float().softmax(-1)
        if self._reading.tops:
            self.log_top.append(believed.amax(-1).double().log())
        if law.goes_on is not None:
            flat = (logits.flatten(0, 1), believed.flatten(0, 1), y.flatten())
            self.stops.append(~law.goes_on(*flat).view_as(y))
        if p is not None and self._reading.sequences:
            for row, text in enumerate(self._group):
                n = min(len(text.tokens) - i * self._width, self._width)
                if n > 0:
                    self.parts[row].append(sums(p[row, :n], q[row, :n], y[row, :n], self._reading.sequences))

    def close(self) -> None:
        self._logits.close()


@torch.inference_mode()
def from_text(
    readings: Sequence[Reading],
    context: DraftContext,
    width: int,
    group: Sequence[Response],
    log_p: Sequence[np.ndarray | None],
) -> list[list[Forced]]:
    """Of each drafter, what it would have drafted along each of at most B texts, all in one pass of the target.

    Args:
        width: tokens of a piece of text.
        log_p: of each text, where it is known; the target is asked if one is not, or for the sums.
    """
    asks = context.sampling.temperature > 0 and (
        any(one.sequences for one in readings) or any(one is None for one in log_p)
    )
    lengths = [len(text.tokens) for text in group]
    longest = max(lengths, default=0)
    x = on_device([[*text.tokens, *[0] * (longest - len(text.tokens))] for text in group], context.device)
    reads = [_Pieces(reading, group, width) for reading in readings]
    target, said = None, []
    if asks:
        assert context.target is not None
        target = pieces(context.target, group, width)
    try:
        for i in range(-(-longest // width)):
            y, p = x[:, i * width : (i + 1) * width], None
            if target is not None:
                p = context.sampling.probs(next(target)[: len(group)])
                said.append(_at(p, y))
            for read in reads:
                read.next(i, y, p)
    finally:
        for generator in (*reads, *([target] if target is not None else [])):
            generator.close()
    found = []
    for reading, read in zip(readings, reads, strict=True):
        mine = []
        for row, (text, n) in enumerate(zip(group, lengths, strict=True)):
            own, kept = _joined(read.log_q, row, n), log_p[row]
            target_said = _joined(said, row, n) if asks else None
            for who, values in ((f"drafter '{reading.name}'", own), ("the target", target_said)):
                if values is not None and np.isnan(values).any():
                    at = int(np.argmax(np.isnan(values)))
                    raise NumericalError(f"{who} produced NaN at token {at} of {text.where}; try dtype float32")
            compared = None if kept is None else target_said
            if kept is None:
                assert target_said is not None
                kept = target_said
            laid = _laid(reading, context_length_of(context), read, text, row, own, kept)
            mine.append(laid if compared is None else replace(laid, own_log_p=compared))
        found.append(mine)
    return found


def _laid(
    reading: Reading,
    context_length: int | None,
    read: _Pieces,
    text: Response,
    row: int,
    own: np.ndarray,
    log_p: np.ndarray,
) -> Forced:
    """The `Forced` of a text from the log Q ``own [T]`` of its tokens."""
    depth, n, most = reading.depth, len(own), min(reading.depth, reading.most)
    ends = range(len(text.prompt), len(text.prompt) + n)
    reach = np.array([room(most, end, context_length) for end in ends], dtype=np.int64)
    if read.stops:
        reach = np.minimum(reach, _until(torch.cat(read.stops, 1)[row, :n].cpu().numpy(), reading.law.keeps_last))
    cells = ahead(own, depth, -np.inf)
    cells = np.where(np.arange(depth) < reach[:, None], cells, -np.inf)
    joined = Sums.joined(read.parts[row]) if read.parts[row] else None
    best = ahead(_joined(read.log_top, row, n), depth, -np.inf) if reading.tops else None
    return Forced(ended(cells), reach, log_p, joined, best)


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
