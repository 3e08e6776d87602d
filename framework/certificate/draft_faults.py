"""Faults of a drafter: its drafts depend on more than their inputs and `rng`, or q is not the distribution of the draw.

Looked for after a certificate with a verifier that is lossless by itself has failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
from torch import Tensor

from ..api.build import build_decoder
from ..contracts.draft import Draft
from ..contracts.drafter import DraftContext, Drafter
from ..contracts.rng import CounterRng
from ..contracts.sampling import Sampling
from ..plugins import get
from .certify import ROUNDING, SINGLE, WARM_UP_SEED, DrafterFactory, WarmUp, certify, limited_step
from .draft_rows import DraftRecorder, DraftRow, draft_row, paths_of
from .faults import FaultError, RandomWatch, files_of, outside_of_rng
from .table_lm import Toy, ToyContext

#: Steps of the drafts that are compared, and tokens of a sequence.
STEPS, _MAX_TOKENS = 28, 64
#: Largest difference between equal probabilities of two batches.
_EQUAL = 1e-4

#: ``context(batch_size)`` returns a context over new slots.
Contexts = Callable[[int], DraftContext]


def check_drafter(
    toy: Toy,
    build: DrafterFactory,
    lengths: Sequence[int],
    sampling: Sampling,
    who: str,
    starts: Sequence[WarmUp | None] = (None,),
) -> None:
    """Look for the faults of this module on a toy; see `check_q`."""
    check_independence_on(toy, build, lengths, sampling, who)
    check_q(toy, build, lengths, sampling, who, starts)


def check_independence_on(
    toy: Toy, build: DrafterFactory, lengths: Sequence[int], sampling: Sampling, who: str
) -> None:
    """`check_independence` on a toy."""
    longest = max(lengths, default=0)
    check_independence(_contexts(toy, sampling), lambda context: build(context, longest), texts(toy), longest, who)


def _contexts(toy: Toy, sampling: Sampling) -> Contexts:
    def context(rows: int) -> DraftContext:
        start = len(toy.prompt) - 1
        return ToyContext(toy.target, toy.drafter, sampling, rows, start=start, token_texts=toy.token_texts)

    return context


def texts(toy: Toy) -> list[list[int]]:
    """Prompts that fill the memory of a drafter: the toy's, repeated tokens, periodic texts, and random ones."""
    return [toy.prompt, *repeated_texts(toy.vocab_size)]


def repeated_texts(vocab_size: int, length: int = 24) -> list[list[int]]:
    """Texts that repeat themselves, of up to ``length`` tokens: periodic ones, and random ones with their copies."""
    random, few = Random(11), min(vocab_size, 8)
    periodic = [[i % min(period, few) for i in range(length - period)] for period in (1, 2, 3, 5)]
    halves = [[random.randrange(few) for _ in range(length // 2 - skip)] for skip in (0, 3)]
    return [*periodic, *(half * 2 for half in halves), [few - 1]]


def check_independence(
    context: Contexts,
    build: Callable[[DraftContext], Drafter],
    prompts: Sequence[Sequence[int]],
    depth: int,
    who: str,
) -> None:
    """Raise FaultError if drafts of equal sequences with equal random numbers differ.

    Compared are two runs, a run whose ``sequences.tokens`` hold other tokens after the committed ones, one in slots
    that other sequences used before, and rows by themselves, unless the drafter remembers other sequences.
    """
    drafter = build(context(1))
    remembers, rows = drafter.remembers(drafter.config), range(len(prompts))
    watch, run = RandomWatch(files_of(type(drafter))), partial(_drafts, context, build, prompts, rows, depth)
    first = run(watch=watch)
    # One run has all differences; if its drafts differ, each is tried by itself.
    differs = bool(watch.sites or _difference(first, run(poisoned=True, earlier=True)))
    if watch.sites or (differs and _difference(first, run(watch=watch, watched=STEPS))):
        raise FaultError(outside_of_rng(who, list(watch.sites)))
    if differs and _difference(first, run(poisoned=True)):
        raise FaultError(
            f"{who} reads sequences.tokens after the committed tokens, which are not part of the sequence: row b ends "
            "after len(sequences.history[b]) tokens"
        )
    if not remembers:
        for row in rows[:: 1 if differs else 2]:
            by_itself = _drafts(context, build, prompts, [row], depth)
            if difference := _difference([[step[row]] for step in first], by_itself):
                step, batched, single = difference
                raise FaultError(
                    f"{who}: rows share state: in step {step} row {row} has {batched} in a batch and {single} by "
                    "itself. Drafts of a row may depend on its sequence and on random numbers whose index does not "
                    "depend on the batch; a drafter that learns from other sequences defines reset(), and "
                    "remembers(config) returns True"
                )
    if differs and (difference := _difference(first, run(earlier=True))):
        step, new, used = difference
        cure = "reset() is incomplete: clear all memory in it" if remembers else "clear the slot in start() or free()"
        raise FaultError(
            f"{who}: a slot keeps state of its last sequence: in step {step} a row has {used} in a used slot and {new} "
            f"in a new one; {cure}"
            + ("" if remembers else "; a drafter that learns from other sequences defines reset()")
        )


def _difference(first: list[list[DraftRow]], second: list[list[DraftRow]]) -> tuple[int, str, str] | None:
    """The first step with different drafts, and both drafts in words; None without one."""
    for step, (old, new) in enumerate(zip(first, second, strict=True), 1):
        for (_, tokens, _, q), (_, others, _, other_q) in zip(old, new, strict=True):
            if tokens != others:
                return step, f"the draft {tokens}", f"{others}"
            if q is not None and other_q is not None and q.size and abs(q - other_q).max() > _EQUAL:
                at = np.unravel_index(abs(q - other_q).argmax(), q.shape)
                return step, f"q = {q[at]:.4g} of a token", f"{other_q[at]:.4g}"
    return None


def _drafts(
    context: Contexts,
    build: Callable[[DraftContext], Drafter],
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    depth: int,
    poisoned: bool = False,
    watch: RandomWatch | None = None,
    watched: int = 6,
    earlier: bool = False,
) -> list[list[DraftRow]]:
    """Drafted tokens and q of each step and row.

    ``watch`` is active in the first ``watched`` steps, because it is slow; with ``earlier``, each slot decodes the
    prompt of the next row first.
    """
    own = context(len(rows))
    options: dict[str, Any] = {"rng": CounterRng(WARM_UP_SEED), "validate": "never", "max_new_tokens": _MAX_TOKENS}
    drafts: list[list[DraftRow]] = []

    def record(event: Any) -> None:
        draft = event.draft.candidates
        drafts.append([draft_row(draft, row) for row in range(draft.batch_size)])

    decoder = build_decoder(own, build, get("verifiers", "sample-match")(), on_step=record, **options)
    for other in (1, 0) if earlier else (0,):
        if earlier and not other:
            decoder.abandon()
            decoder.drafter.reset()
            drafts.clear()
        for slot, row in enumerate(rows):
            decoder.start(slot, prompts[(row + other) % len(prompts)], row, row + len(prompts) * other)
        for step in range(STEPS):
            if poisoned:
                tokens = decoder.sequences.tokens
                for slot, history in enumerate(decoder.sequences.history):
                    tokens[slot, len(history) :] = own.vocab_size - 1
            with nullcontext() if watch is None or step >= watched else watch:
                limited_step(decoder, depth)
    return drafts


def unequal_starts(toy: Toy, build: DrafterFactory, sampling: Sampling, depth: int, count: int = 6) -> list[WarmUp]:
    """Starts from which the drafter drafts, with an unequal q if it has one: prompts and steps, found by trying them.

    Prompts that make it draft most often come first, and steps are spread over those in which it does: the last, the
    first, and others between.
    """
    prompts = texts(toy)
    drafts = _drafts(
        _contexts(toy, sampling), lambda context: build(context, depth), prompts, range(len(prompts)), depth
    )
    steps_by_start: dict[WarmUp, tuple[list[int], list[int]]] = {}
    for row, prompt in enumerate(prompts):
        drafted = [step for step, rows in enumerate(drafts) if rows[row].tokens]
        unequal = [step for step in drafted if _is_unequal(drafts[step][row].q)]
        steps_by_start[WarmUp(tuple(prompt), 0, depth, row)] = unequal, drafted
    best = sorted(steps_by_start, key=lambda start: [-len(steps) for steps in steps_by_start[start]])[:2]
    starts = []
    for start, share in zip(best, (count - count // 3, count // 3), strict=True):
        unequal, drafted = steps_by_start[start]
        chosen = dict.fromkeys([*_spread(unequal, share), *drafted[-1:]])  # the last q may be equal by mistake
        starts += [replace(start, steps=step) for step in chosen]
    drafter = build(_contexts(toy, sampling)(1), depth)
    if drafter.remembers(drafter.config):  # memory of an earlier sequence
        starts += [replace(start, earlier=best[1].prompt) for start in starts[: count // 3]]
    return starts


def _is_unequal(q: np.ndarray | None) -> bool:
    """True for a q with positive entries that differ, and for point masses."""
    return q is None or any(np.ptp(probs[probs > 0]) > ROUNDING for probs in q)


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """Up to ``count`` of these steps, the last and the first first, evenly spread."""
    if len(steps) <= count:
        return list(steps)[::-1]
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in (count - 1, *range(count - 1))]


def check_q(
    toy: Toy,
    build: DrafterFactory,
    lengths: Sequence[int],
    sampling: Sampling,
    who: str,
    starts: Sequence[WarmUp | None] = (None,),
) -> None:
    """Raise FaultError if q of the step after a start is not the distribution of its tokens, by enumeration.

    Given the path to a node, its earlier siblings and the row of q, the indicator of its token minus q has mean 0.

    Args:
        lengths: draft length of each step.
        who: the drafter, in messages.
        starts: of the enumerated steps.
    """
    kept, dropped, by_q = _Deviations(), _Deviations(), _Deviations()
    depth = max(lengths, default=0)

    def record(number: int, draft: Draft, p: Tensor, weight: np.ndarray) -> None:
        if draft.q is None:
            return
        counts = draft.count.tolist()
        for row in range(draft.batch_size):
            entries = _entries(draft, row)
            for (*context, node), token, q, position, valid in entries:
                key, own = (*context, node, number), p[row, position + 1].numpy()
                for sums in (kept, dropped) if valid else (dropped,):
                    sums.add(key, token, q, float(weight[row]), own)
                if valid:
                    by_q.add((*key, q.round(9).tobytes()), token, q, float(weight[row]), own)
            if draft.is_chain and counts[row] < depth:
                path = tuple(draft.tokens[row, : counts[row]].tolist())
                kept.end((path, (), counts[row], number), float(weight[row]))

    for number, start in enumerate(starts):
        recorder = partial(DraftRecorder, partial(record, number))
        certify(toy, build, recorder, gamma=depth, sampling=sampling, start=start)
    if (worst := kept.worst()) is None:
        if (worst := by_q.worst()) is None:
            return
        worst = (*worst[:4], ": q depends on the drawn token, so it was computed after the draw")
    context, token, drawn, reported, hint = worst
    after = f"after the drafted tokens {list(context[0])}"
    if context[1]:
        after += f", sibling of {list(context[1])}"
    start = starts[context[3]]
    place = (
        f"toy '{toy.name}', temperature {sampling.temperature:g}{f', top-k {sampling.top_k}' if sampling.top_k else ''}"
        + ("" if start is None else f", in step {start.steps + 1} after a prompt of {len(start.prompt)} tokens")
    )
    if dropped.worst() is None or kept.cut(context):
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
    tokens, parents, valid = (field[row].tolist() for field in (draft.tokens, draft.parents, draft.valid))
    index = list(range(draft.width)) if draft.q_index is None else draft.q_index[row].tolist()
    q, paths, sequences = draft.q[row].numpy(), paths_of(tokens, parents), draft.drawn_sequences()
    if sequences is None:
        draws = [(node, node) for node in range(draft.width) if index[node] < len(q)]
    else:
        draws = [(i, node) for i, nodes in enumerate(sequences[row].tolist()) for node in nodes if node >= 0]
    entries = []
    for number, node in draws:
        earlier = [i for i in range(node) if parents[i] == parents[node]] if sequences is None else []
        context = paths[parents[node]], tuple(tokens[i] for i in earlier), number
        entries.append((context, tokens[node], q[index[node]], parents[node], sequences is not None or valid[node]))
    return entries


#: Context, frequencies of its tokens, and q.
_Wrong = tuple[Any, np.ndarray, np.ndarray]


class _Deviations:
    """Frequencies of drawn tokens given their context, beside q."""

    def __init__(self) -> None:
        self._mass: dict[Any, np.ndarray] = {}
        self._q: dict[Any, np.ndarray] = {}
        self._p: dict[Any, np.ndarray] = {}
        self._ended: dict[Any, float] = defaultdict(float)
        self._deviation = ROUNDING

    def end(self, context: Any, weight: float) -> None:
        """Count drafts that end at ``context``."""
        self._ended[context] += weight

    def cut(self, context: Any) -> bool:
        """True if tokens are drawn from q and drafts end in place of some of them."""
        mass, ended = self._mass[context], self._ended[context]
        drawn = self._mean_q(context) * (mass.sum() + ended)
        kept = (mass > 0) & (abs(mass - drawn) <= self._deviation)
        return ended > self._deviation and bool(kept.any()) and bool((mass <= drawn + self._deviation).all())

    def add(self, context: Any, token: int, q: np.ndarray, weight: float, p: np.ndarray) -> None:
        if q.dtype != np.float64:
            q, self._deviation = q.astype(np.float64), SINGLE
        mass = self._mass.setdefault(context, np.zeros(len(q)))
        mass[token] += weight
        self._q[context] = self._q.get(context, 0) + weight * q
        self._p[context] = p

    def worst(self) -> tuple[tuple[Any, ...], int, float, float, str] | None:
        """Context, token, frequency, q, and the distribution that fits; None if all are q."""
        wrong: list[_Wrong] = []
        for context, mass in self._mass.items():
            if mass.sum() > 0 and abs((drawn := mass / mass.sum()) - self._mean_q(context)).max() > self._deviation:
                wrong.append((context, drawn, self._mean_q(context)))
        if not wrong:
            return None
        shortest = min(len(context[0]) for context, *_ in wrong)
        wrong = [item for item in wrong if len(item[0][0]) == shortest]
        context, drawn, q = max(wrong, key=lambda item: abs(item[1] - item[2]).max())
        token = int((drawn - q).argmax())
        return context, token, float(drawn[token]), float(q[token]), self._hint(wrong)

    def _mean_q(self, context: Any) -> np.ndarray:
        return self._q[context] / self._mass[context].sum()

    def _hint(self, wrong: list[_Wrong]) -> str:
        """The distribution that fits what was drawn."""

        def fits(formula: Callable[[Any, np.ndarray], np.ndarray]) -> bool:
            return all(abs(formula(context, q) - drawn).max() <= 1e-6 for context, drawn, q in wrong)

        if fits(lambda context, q: np.eye(len(q))[q.argmax()]):
            return ": tokens are the argmax of q, so they are point masses (q = None)"
        if fits(lambda context, q: self._p[context]):
            return ": tokens are drawn from the target's distribution"
        if fits(lambda context, q: np.full(len(q), 1 / len(q))):
            return ": tokens are drawn from a uniform distribution"
        powers = [power for _, drawn, q in wrong if (power := _power(drawn, q)) is not None]
        # Two tokens fit some power, so one such context proves nothing.
        distinct = len({d.round(6).tobytes() for _, d, _ in wrong}) > 1 or any((d > 0).sum() > 2 for _, d, _ in wrong)
        if len(powers) == len(wrong) and max(powers) - min(powers) < 1e-6 and distinct:
            times = f"{1 / powers[0]:.3g} times the temperature of q"
            return f": tokens are drawn at {times}, so q lacks the warping or is warped twice"
        if all((d[q == 0] == 0).all() and np.ptp(d[d > 0] / q[d > 0]) < 1e-6 for _, d, q in wrong):
            return ": tokens are drawn from a truncated q, so q lacks top-k or top-p"
        if all(self._is_elsewhere(context, drawn) for context, drawn, _ in wrong):
            return ": tokens are drawn from the q of another position"
        return ""

    def _is_elsewhere(self, context: Any, drawn: np.ndarray) -> bool:
        """True if the q of another node fits what was drawn in ``context``."""
        others = (o for o in self._q if o[3] == context[3] and o[2] != context[2])
        return any(abs(self._mean_q(other) - drawn).max() <= 1e-6 for other in others)


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
