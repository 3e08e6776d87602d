"""Frequencies of drawn tokens compared with the reported q, over thousands of drafts of long texts.

Enumeration is exact and reaches the first dozens of tokens of small vocabularies. A drafter may be wrong later, with
more tokens in its memory, in a slot that was used before, after a rejection, or at another temperature. Given the
earlier draws, the indicator of a token minus its q has mean 0 for any shape of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..api.build import StrategyLike, build_decoder, make_verifier
from ..contracts.draft import Draft, take_rows
from ..contracts.drafter import DraftContext, Drafter
from ..contracts.rng import CounterRng
from ..contracts.sampling import Sampling
from ..contracts.steps import StepEvent
from .draft_faults import repeated_texts
from .faults import FaultError
from .table_lm import ToyContext, random_tables

#: Standard deviations of a mean from 0 that are a fault: once in a million tests of 100 tokens.
FAR = 6.0
#: Batch size, tokens of a text, of a vocabulary in which memories fill soon, and of one larger than most top-k.
_ROWS, _TOKENS, _FEW, _MANY = 48, 128, 16, 96
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
    counted, rule = Counted(tokens), make_verifier(verifier)
    decoder = build_decoder(context, build, rule, rng=CounterRng(), on_step=counted, max_new_tokens=tokens)
    for _ in decoder.run([prompts[i % len(prompts)] for i in range(sequences)]):
        if not counted.drafts:
            return
    if (kept := counted.deviation("kept")) < FAR:
        return
    fault, cure = "q is not the distribution that tokens are drawn from", "Report the probabilities after all warping"
    if counted.deviation("all") < FAR:  # all that were drawn follow q
        fault, cure = "a token was dropped depending on its value", "Keep it, or decide before drawing"
    raise FaultError(
        f"{who}: {fault}: tokens of drafts deviate from q by {kept:.1f} standard deviations (temperature "
        f"{context.sampling.temperature:g}, {counted.drafts:,} drafts in texts of {tokens} tokens). {cure}"
    )


class Counted:
    """Observed minus expected counts of drawn tokens over steps; an ``on_step`` callback.

    Tokens are counted by id and by the rank of their probability in an unequal q, because deviations of a q that is
    reported too sharp or too flat cancel in the sums by id. Each node of a draft, each quarter of the texts, and each
    sequence of the slots has sums of its own, because what is right elsewhere hides deviations.
    """

    def __init__(self, length: int) -> None:
        self.drafts = self._tokens = 0  # drafts with a q, and emitted tokens
        self._length = length  # tokens of a text
        self._sums: dict[int | str, Tensor] = {}  # by part: sums, squares ``[2, E, 2, 2 V]`` of kept, all

    def __call__(self, event: StepEvent) -> None:
        done = self._tokens // len(event.prompts)  # of a slot
        parts = ("whole", done * 4 // self._length % 4, f"sequence {done // self._length}")
        self._tokens += sum(map(len, event.emitted))
        if event.draft.q is None or not event.draft.width:
            return
        busy = torch.tensor([prompt is not None for prompt in event.prompts])[:, None]
        tokens, probs, valid = draws(event.draft.candidates)
        difference = (torch.zeros_like(probs).scatter_(2, tokens[..., None], 1.0) - probs).double()
        ranked = difference.gather(2, probs.argsort(2, descending=True))
        ranked = ranked * (probs.amax(2) - probs.masked_fill(probs <= 0, torch.inf).amin(2) > 1e-6)[..., None]
        both = torch.cat([difference, ranked], 2).transpose(0, 1)
        counts = torch.stack([valid & busy, busy.expand_as(valid)]).permute(2, 0, 1).double()
        added = torch.stack([counts @ both, counts @ both.square()])
        for part in parts:
            sums = self._sums.get(part, added[:, :0])
            nodes = max(sums.shape[1], added.shape[1])
            padded = [pad(each, (0, 0, 0, 0, 0, nodes - each.shape[1])) for each in (sums, added)]
            self._sums[part] = padded[0] + padded[1]
        self.drafts += int(busy.sum())

    def deviation(self, name: Literal["kept", "all"]) -> float:
        """Largest deviation of a token in standard deviations, at least 5 because few terms are not significant."""
        of = ("kept", "all").index(name)
        parts = (part[:, :, of] for part in self._sums.values())
        return max(float((sums.abs() / squares.sqrt().clamp(min=5.0)).max()) for sums, squares in parts)


def draws(draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    """Drawn tokens ``[B, E]``, their probabilities ``[B, E, V]``, and validity ``[B, E]``.

    E enumerates nodes; for i.i.d. sequences, which share nodes, the tokens of every sequence.
    """
    assert draft.q is not None
    q_index = torch.arange(draft.width).expand_as(draft.tokens) if draft.q_index is None else draft.q_index
    tokens, valid = draft.tokens, draft.valid
    sequences = draft.drawn_sequences()
    if sequences is not None:
        entry = sequences.transpose(1, 2).flatten(1)
        valid, entry = entry >= 0, entry.clamp(min=0)
        tokens, q_index = tokens.gather(1, entry), q_index.gather(1, entry)
    return tokens, take_rows(draft.q, q_index), valid
