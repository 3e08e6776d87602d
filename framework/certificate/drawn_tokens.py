"""Frequencies of drawn tokens compared with the reported q, over thousands of drafts of long texts.

Enumeration is exact and reaches the first dozens of tokens of small vocabularies. A drafter may be wrong later, with
more tokens in its memory, in a slot that was used before, after a rejection, or at another temperature. Given the
earlier draws, the indicator of a token minus its q has mean 0 for any shape of the draft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..api.build import StrategyLike, build_decoder, make_verifier
from ..contracts.draft import Draft, take_rows
from ..contracts.drafter import DraftContext, Drafter
from ..contracts.rng import CounterRng
from ..contracts.sampling import Sampling
from ..contracts.steps import StepEvent
from ..engine.decoder import Decoder
from .draft_faults import repeated_texts
from .faults import FaultError
from .table_lm import ToyContext, random_tables

#: Standard deviations of a mean from 0 that are a fault: once in a million tests of 100 tokens.
FAR = 6.0
#: Batch size, tokens of a text, of a vocabulary in which memories fill soon, and of one larger than most top-k.
_ROWS, _TOKENS, _FEW, _MANY = 48, 128, 16, 96
#: Largest k of faults in every k-th step, and steps in which limits come again.
_PERIODS = 16
#: Vocabulary, sampling, verifier and number of long texts, some of them beside idle slots; the last verifier accepts
#: most drafts, whatever q.
_TEXTS: tuple[tuple[int, Sampling, StrategyLike, int], ...] = (
    (_FEW, Sampling(), "sample-match", 120),
    (_MANY, Sampling(temperature=0.6, top_k=8), "sample-match", 120),
    (_MANY, Sampling(top_k=_MANY - 8), {"name": "top-k", "k": _MANY, "tolerance": 1e9}, _ROWS),
)


def check_long_texts(build: Callable[[DraftContext], Drafter], who: str) -> None:
    """`check_mean` on long texts after prompts of up to 96 tokens, with most drafts rejected and with most accepted."""
    prompts = [*repeated_texts(_FEW), *repeated_texts(_FEW, 96)]
    for vocabulary, sampling, verifier, sequences in _TEXTS:
        context = ToyContext(*random_tables(vocabulary), sampling, _ROWS)
        check_mean(context, build, prompts, sequences, _TOKENS, who, verifier)


def check_mean(
    context: DraftContext,
    build: Callable[[DraftContext], Drafter],
    prompts: Sequence[Sequence[int]],
    sequences: int,
    tokens: int,
    who: str,
    verifier: StrategyLike = "sample-match",
) -> None:
    """Raise FaultError if drawn tokens do not follow q on average, over sequences of ``tokens`` tokens."""

    def deviation(kept: bool) -> float:
        decoder = build_decoder(context, build, make_verifier(verifier), rng=CounterRng(), max_new_tokens=tokens)
        counted = decoder.on_step = Counted(decoder, -(-sequences // context.batch_size), tokens, kept)
        for _ in decoder.run([prompts[i % len(prompts)] for i in range(sequences)]):
            if not counted.drafts:
                return 0.0
        drafts.append(counted.drafts)
        return counted.deviation()

    drafts: list[int] = []
    if (kept := deviation(True)) < FAR:
        return
    fault, cure = "q is not the distribution that tokens are drawn from", "Report the probabilities after all warping"
    if deviation(False) < FAR:  # all that were drawn follow q
        fault, cure = "a token was dropped depending on its value", "Keep it, or decide before drawing"
    raise FaultError(
        f"{who}: {fault}: tokens of drafts deviate from q by {kept:.1f} standard deviations (temperature "
        f"{context.sampling.temperature:g}, {drafts[0]:,} drafts in texts of {tokens} tokens). {cure}"
    )


class Counted:
    """Observed minus expected counts of drawn tokens over the steps of a decoder, whose ``on_step`` it is.

    Tokens are counted by id, by the rank of their probability in an unequal q, because deviations of a q that is
    reported too sharp or too flat cancel in the sums by id, and by their rank in the target's distribution, because a
    q that is reported too flat has no order. Each node of a draft, each quarter of the texts, each sequence of the
    slots and every k-th step has sums of its own, because what is right elsewhere hides deviations. Every second
    draft is limited to fewer tokens, as at the end of a text.
    """

    def __init__(self, decoder: Decoder, groups: int, length: int, kept: bool) -> None:
        self._limit, self._depth, self._kept = decoder.sequences.limit, decoder.traits.depth, kept
        self._steps: dict[int, int] = defaultdict(int)  # of each sequence
        self._drafts = torch.zeros(groups, length)  # with a q, by sequence of the slot and step
        self._sums: dict[int, Tensor] = {}  # and sums of squares, of each node

    @property
    def drafts(self) -> int:
        return int(self._drafts.sum())

    def __call__(self, event: StepEvent) -> None:
        rows = [row for row, sequence in enumerate(event.prompts) if sequence is not None]
        sequences = [sequence for sequence in event.prompts if sequence is not None]
        if event.draft.q is not None and event.draft.width:
            length = self._drafts.shape[1]
            self._count(event, rows, [s // len(event.prompts) * length + self._steps[s] for s in sequences])
        for row, sequence in zip(rows, sequences, strict=True):
            self._steps[sequence] = step = self._steps[sequence] + 1
            if step % 2:
                self._limit[row] = min(self._limit[row], 1 + step % _PERIODS // 2 * self._depth // (_PERIODS // 2))

    def _count(self, event: StepEvent, rows: list[int], places: list[int]) -> None:
        tokens, parents, probs, valid = (tensor[rows] for tensor in draws(event.draft.candidates))
        difference = torch.zeros_like(probs).scatter_(2, tokens[..., None], 1.0) - probs
        unequal = probs.amax(2) - probs.masked_fill(probs <= 0, torch.inf).amin(2) > 1e-6
        orders = (x.float().numpy().argsort(2) for x in (probs, take_rows(event.scores.p[rows], parents + 1)))
        by_q, by_p = (difference.gather(2, torch.from_numpy(order)) for order in orders)
        features = torch.cat([difference, by_q * unequal[..., None], by_p], 2).float()
        if self._kept:
            features = features * valid[..., None]
        place = torch.tensor(places)
        self._drafts.view(-1)[place] += 1
        for node, values in enumerate(features.unbind(1)):
            if node not in self._sums:
                self._sums[node] = torch.zeros(self._drafts.numel(), 2 * values.shape[1])
            self._sums[node].index_add_(0, place, torch.cat([values, values.square()], 1))

    def deviation(self) -> float:
        """Largest deviation of a token in standard deviations, at least 8 because few terms are not significant."""
        groups, length = self._drafts.shape
        step, order = torch.arange(length), self._drafts.sum(0).cumsum(0) / self._drafts.sum()
        quarters = [(order > i / 4) & (order <= (i + 1) / 4) for i in range(4)]
        steps = [*quarters, *(step % n == i for n in range(1, _PERIODS + 1) for i in range(n))]
        parts = [*(part.repeat(groups) for part in steps), *torch.eye(groups).repeat_interleave(length, 1)]
        both = (torch.stack([part.float() for part in parts]) @ sums for sums in self._sums.values())
        halves = (sums.chunk(2, 1) for sums in both)
        return max(float((sums.abs() / squares.sqrt().clamp(min=8.0)).max()) for sums, squares in halves)


def draws(draft: Draft) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Drawn tokens and their parents ``[B, E]``, their probabilities ``[B, E, V]``, and validity ``[B, E]``.

    E enumerates nodes; for i.i.d. sequences, which share nodes, the tokens of every sequence.
    """
    assert draft.q is not None
    q_index = torch.arange(draft.width).expand_as(draft.tokens) if draft.q_index is None else draft.q_index
    fields, valid = (draft.tokens, draft.parents, q_index), draft.valid
    sequences = draft.drawn_sequences()
    if sequences is not None:
        entry = sequences.transpose(1, 2).flatten(1)
        valid, entry = entry >= 0, entry.clamp(min=0)
        fields = tuple(field.gather(1, entry) for field in fields)
    tokens, parents, q_index = fields
    return tokens, parents, take_rows(draft.q, q_index), valid
