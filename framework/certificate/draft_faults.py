"""Faults of a drafter: its drafts depend on more than their inputs and `rng`, or q is not the distribution of the draw.

Looked for after a certificate with a verifier that is lossless by itself has failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..contracts.draft import Draft, Verdict
from ..contracts.drafter import DraftContext, Drafter
from ..contracts.rng import CounterRng, StepRng
from ..contracts.sampling import Sampling
from ..contracts.verifier import Verifier, VerifierTraits
from ..engine.decoder import Decoder
from .certify import DrafterFactory, certify
from .draft_recorder import DraftRecorder
from .faults import FaultError, RandomWatch, files_of, outside_of_rng
from .table_lm import Toy, ToyContext

#: Largest difference of a probability that is round-off.
DEVIATION = 1e-9
#: Slots and steps of the drafts that are compared.
_ROWS, _STEPS = 6, 6

#: ``context(batch_size)`` returns a context over new slots.
Contexts = Callable[[int], DraftContext]


class _Match(Verifier):
    """Draws from the target at the root and accepts nothing; lossless for any draft."""

    name = "draw-at-the-root"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset())

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        token = rng.draw(p[:, 0])
        if not draft.width:
            return Verdict(torch.zeros_like(token), token)
        tau = torch.zeros_like(token)
        return Verdict(tau, token, None if draft.is_chain else torch.full_like(draft.tokens, -1))


def check_drafter(toy: Toy, build: DrafterFactory, lengths: Sequence[int], sampling: Sampling, who: str) -> None:
    """Look for the faults of this module on a toy.

    Args:
        lengths: draft length of each step.
        who: the drafter, in messages.

    Raises:
        FaultError: the fault.
    """
    check_independence_on(toy, build, lengths, sampling, who)
    check_q(toy, build, lengths, sampling, who)


def check_independence_on(
    toy: Toy, build: DrafterFactory, lengths: Sequence[int], sampling: Sampling, who: str
) -> None:
    """`check_independence` on a toy; arguments as in `check_drafter`."""
    start, longest = len(toy.prompt) - 1, max(lengths, default=0)

    def context(rows: int) -> DraftContext:
        return ToyContext(toy.target, toy.drafter, sampling, rows, start=start, token_texts=toy.token_texts)

    prompts = [[*toy.prompt, *(token % toy.vocab_size for token in range(row))] for row in range(_ROWS)]
    check_independence(context, lambda context: build(context, longest), prompts, longest, who)


def check_independence(
    context: Contexts,
    build: Callable[[DraftContext], Drafter],
    prompts: Sequence[Sequence[int]],
    depth: int,
    who: str,
    check_rows: bool = True,
) -> None:
    """Raise FaultError if drafts of equal sequences with equal random numbers differ.

    Compared are two runs, a run whose ``sequences.tokens`` hold other tokens after the committed ones, and each row by
    itself if ``check_rows`` and unless the drafter remembers other sequences.
    """
    drafter = build(context(1))
    watch = RandomWatch(files_of(type(drafter)))
    first = _drafts(context, build, prompts, range(len(prompts)), depth, watch=watch)
    if watch.sites or first != _drafts(context, build, prompts, range(len(prompts)), depth):
        raise FaultError(outside_of_rng(who, list(watch.sites)))
    if first != _drafts(context, build, prompts, range(len(prompts)), depth, poisoned=True):
        raise FaultError(
            f"{who} reads sequences.tokens after the committed tokens, which are not part of the sequence: row b ends "
            "after len(sequences.history[b]) tokens"
        )
    if not check_rows or drafter.remembers(drafter.config):
        return
    for row in range(len(prompts)):
        by_itself = _drafts(context, build, prompts, [row], depth)
        for step, (batched, single) in enumerate(zip(first, by_itself, strict=True)):
            if batched[row] != single[0]:
                raise FaultError(
                    f"{who}: rows share state: in step {step + 1} row {row} has the draft {batched[row][0]} in a "
                    f"batch and {single[0][0]} by itself, or another q. Drafts of a row may depend on its sequence and "
                    "on random numbers whose index does not depend on the batch; a drafter that learns from other "
                    "sequences defines reset(), and remembers(config) returns True"
                )


def _drafts(
    context: Contexts,
    build: Callable[[DraftContext], Drafter],
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    depth: int,
    poisoned: bool = False,
    watch: AbstractContextManager[Any] | None = None,
) -> list[list[tuple[list[int], list[float]]]]:
    """Drafted tokens of each step and row, and their q; ``watch`` is active in the steps."""
    verifier, own = _Match(), context(len(rows))
    drafts: list[list[tuple[list[int], list[float]]]] = []

    def record(event: Any) -> None:
        draft = event.draft.candidates
        rows = []
        for row in range(draft.batch_size):
            nodes = draft.valid[row].nonzero().squeeze(1)
            index = nodes if draft.q_index is None else draft.q_index[row, nodes]
            q = [] if draft.q is None else draft.q[row, index].double().round(decimals=4).flatten().tolist()
            rows.append((draft.tokens[row, nodes].tolist(), q))
        drafts.append(rows)

    assert own.target is not None
    decoder = Decoder(
        own.target, build(own), verifier, sampling=own.sampling, rng=CounterRng(7), on_step=record, validate="never"
    )
    for slot, row in enumerate(rows):
        decoder.start(slot, prompts[row], row, row)
    with nullcontext() if watch is None else watch:
        for _ in range(_STEPS):
            decoder.sequences.limit[:] = [min(limit, depth) for limit in decoder.sequences.limit]
            if poisoned:
                tokens = decoder.sequences.tokens
                for slot, history in enumerate(decoder.sequences.history):
                    tokens[slot, len(history) :] = own.vocab_size - 1
            decoder.step()
    return drafts


def check_q(toy: Toy, build: DrafterFactory, lengths: Sequence[int], sampling: Sampling, who: str) -> None:
    """Raise FaultError if q of the first step is not the distribution that tokens are drawn from, by enumeration.

    Given the path to a node, its earlier siblings and the row of q, the indicator of its token minus q has mean 0.
    """
    kept, dropped, by_q = _Deviations(), _Deviations(), _Deviations()

    def record(draft: Draft, p: Tensor, weight: np.ndarray) -> None:
        if draft.q is None or not draft.width:
            return
        for row in range(draft.batch_size):
            for context, token, q, position, valid in _entries(draft, row):
                own = p[row, position + 1].numpy()
                for sums in (kept, dropped) if valid else (dropped,):
                    sums.add(context, token, q, float(weight[row]), own)
                if valid:
                    by_q.add((*context, q.round(9).tobytes()), token, q, float(weight[row]), own)

    certify(toy, build, lambda: DraftRecorder(record), gamma=max(lengths, default=0), sampling=sampling)
    if (worst := kept.worst()) is None:
        if (worst := by_q.worst()) is None:
            return
        worst = (*worst[:4], ": q depends on the drawn token, so it was computed after the draw")
    context, token, drawn, reported, hint = worst
    after = f"after the drafted tokens {list(context[0])}"
    if context[1]:
        after += f", sibling of {list(context[1])}"
    place = (
        f"toy '{toy.name}', temperature {sampling.temperature:g}{f', top-k {sampling.top_k}' if sampling.top_k else ''}"
    )
    if dropped.worst() is None:
        raise FaultError(
            f"{who}: a token was dropped depending on its value: {after}, token {token} is kept with probability "
            f"{drawn:.4g}, but q is {reported:.4g}, with which it was drawn ({place}). Keep every token that was "
            "looked at, or decide before drawing"
        )
    raise FaultError(
        f"{who}: q is not the distribution that tokens are drawn from: {after}, token {token} is drawn with "
        f"probability {drawn:.4g}, but q is {reported:.4g} ({place}){hint}. Report the probabilities after "
        "temperature, top-k and top-p"
    )


def _entries(draft: Draft, row: int) -> list[tuple[tuple[Any, ...], int, np.ndarray, int, bool]]:
    """Draws of a row: context (path, earlier siblings, number of the draw), token, q, parent, and validity."""
    assert draft.q is not None
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    valid = draft.valid[row].tolist()
    index = list(range(draft.width)) if draft.q_index is None else draft.q_index[row].tolist()
    q = draft.q[row].double().numpy()
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    siblings: dict[int, list[int]] = defaultdict(list)
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        paths[node] = (*paths[parent], token)
    sequences = draft.drawn_sequences()
    if sequences is not None:
        entries = []
        for number, sequence in enumerate(sequences[row].tolist()):
            inside = [node for node in sequence if node >= 0]
            for node in inside:
                parent = parents[node]
                context = paths[parent], (), number
                entries.append((context, tokens[node], q[index[node]], parent, True))
        return entries
    entries = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if index[node] < len(q):
            own = q[index[node]]
            context = paths[parent], tuple(siblings[parent]), node
            entries.append((context, token, own, parent, valid[node]))
        siblings[parent].append(token)
    return entries


class _Deviations:
    """Frequencies of drawn tokens given their context, beside q."""

    def __init__(self) -> None:
        self._mass: dict[Any, np.ndarray] = {}
        self._q: dict[Any, np.ndarray] = {}
        self._p: dict[Any, np.ndarray] = {}

    def add(self, context: Any, token: int, q: np.ndarray, weight: float, p: np.ndarray) -> None:
        mass = self._mass.setdefault(context, np.zeros(len(q)))
        mass[token] += weight
        self._q[context] = self._q.get(context, 0) + weight * q
        self._p[context] = p

    def worst(self) -> tuple[tuple[Any, ...], int, float, float, str] | None:
        """Context, token, frequency, q, and the distribution that fits; None if all are q."""
        wrong = []
        for context, mass in self._mass.items():
            if mass.sum() <= 0:
                continue
            drawn, q = mass / mass.sum(), self._mean_q(context)
            if abs(drawn - q).max() > DEVIATION:
                wrong.append((context, drawn))
        if not wrong:
            return None
        shortest = min(len(context[0]) for context, _ in wrong)
        wrong = [(context, drawn) for context, drawn in wrong if len(context[0]) == shortest]
        context, drawn = max(wrong, key=lambda item: abs(item[1] - self._mean_q(item[0])).max())
        q = self._mean_q(context)
        token = int((drawn - q).argmax())
        return context, token, float(drawn[token]), float(q[token]), self._hint(wrong)

    def _mean_q(self, context: Any) -> np.ndarray:
        return self._q[context] / self._mass[context].sum()

    def _hint(self, wrong: list[tuple[Any, np.ndarray]]) -> str:
        """The distribution that fits what was drawn."""

        def fits(formula: Callable[[Any], np.ndarray | None]) -> bool:
            values = [(formula(context), drawn) for context, drawn in wrong]
            return all(value is not None and abs(value - drawn).max() <= 1e-6 for value, drawn in values)

        if fits(lambda context: np.eye(len(self._mean_q(context)))[self._mean_q(context).argmax()]):
            return ": tokens are the argmax of q, so they are point masses (q = None)"
        if fits(lambda context: self._p[context]):
            return ": tokens are drawn from the target's distribution"
        if fits(lambda context: np.full(len(self._mean_q(context)), 1 / len(self._mean_q(context)))):
            return ": tokens are drawn from a uniform distribution"
        powers = [power for context, drawn in wrong if (power := _power(drawn, self._mean_q(context))) is not None]
        if len(powers) == len(wrong) and max(powers) - min(powers) < 1e-6:
            return f": tokens are drawn at {1 / powers[0]:.3g} times the temperature of q, so q lacks the warping"
        if all((drawn[q == 0] == 0).all() for context, drawn in wrong for q in [self._mean_q(context)]) and all(
            np.ptp(drawn[drawn > 0] / self._mean_q(context)[drawn > 0]) < 1e-6 for context, drawn in wrong
        ):
            return ": tokens are drawn from a truncated q, so q lacks top-k or top-p"
        if fits(self._elsewhere):
            return ": tokens are drawn from the q of another position"
        return ""

    def _elsewhere(self, context: Any) -> np.ndarray | None:
        """The q of another node that fits what was drawn in ``context``."""
        drawn = self._mass[context] / self._mass[context].sum()
        for other in self._q:
            if other[2] != context[2] and abs(self._mean_q(other) - drawn).max() <= 1e-6:
                return drawn
        return None


def _power(drawn: np.ndarray, q: np.ndarray) -> float | None:
    """The exponent a for which ``drawn`` is proportional to q ** a on its support; None if no exponent fits."""
    inside = (drawn > 0) & (q > 0)
    if inside.sum() < 2:
        return None
    x, y = np.log(q[inside]), np.log(drawn[inside])
    if np.ptp(x) < 1e-9:
        return None
    a = float((y.max() - y.min()) / (x[y.argmax()] - x[y.argmin()])) if x[y.argmax()] != x[y.argmin()] else 0.0
    if a <= 0 or abs(y - y.mean() - a * (x - x.mean())).max() > 1e-6:
        return None
    return a
