"""Exact certificate of a drafter x verifier pair by enumeration: losslessness and E[tau].

The drafter, the decoding loop and the verifier run unmodified on small exact models with an enumerating random source:
each row of the batch follows one script of decisions and carries its probability. At a decision beyond its script a row
takes the first possible outcome and queues a new script for each other outcome, so the rows are exactly the leaves of
the decision tree. A script covers all steps, with one drafter instance that observes them. For drafters that depend on
the last token only, rows with equal last tokens and verifier states are merged between steps instead.

After R steps every output is completed to R (gamma + 1) tokens with the target distribution (or, while the verifier
holds state, by steps without a draft), and the joint distribution is compared with the target's. This is the validity
of Lemma 2 in Sun et al. 2024; it must hold jointly, because tests of the first token miss most mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .. import plugins
from ..api.build import build_decoder
from ..contracts.constraint import Grammar, Matcher
from ..contracts.draft import Draft, Verdict
from ..contracts.drafter import DraftContext, Drafter
from ..contracts.rng import CounterRng, StepRng
from ..contracts.sampling import Sampling
from ..contracts.steps import StepEvent
from ..contracts.verifier import Verifier
from ..engine.decoder import Decoder
from ..errors import NumericalError
from .effort import MOST_PATHS, TooLargeError
from .faults import FaultError, Verification, check_fully, check_quickly, draft_note, name_of, unmodified
from .table_lm import Toy, ToyContext

#: Largest total variation of a lossless pair: round-off, and with a q in float32.
TOLERANCE, SINGLE = 1e-12, 1e-6
#: Largest negative probability that is taken for round-off.
ROUNDING = 1e-9
#: Decision paths per batch.
BATCH = 4096

#: ``build(context, gamma)`` returns the drafter under test; ``context.load_lm(...)`` returns the toy's draft model.
DrafterFactory = Callable[[DraftContext, int], Drafter]
Checks = Literal["none", "quick", "all"]
#: Size of a large vocabulary, whose last tokens have no number of 16 bits, and rows that are verified in it.
WIDE, _WIDE_ROWS = 2**16 + 64, 2
#: Least number of rows of the batch that is verified again, and number of batches if all faults are looked for.
CHECKED_ROWS, CHECKED_BATCHES = 8, 6
#: Seed of the random numbers of a warm-up, and maximum number of tokens of a sequence.
WARM_UP_SEED, MAX_TOKENS = 7, 200
#: Least share of drafted steps with an unequal q, in the enumeration from the start that has the largest share.
UNEQUAL_SHARE = 0.1


@dataclass(frozen=True)
class Coverage:
    """Numbers of enumerated steps of each kind. Sums are over enumerations from different starts.

    Attributes:
        drafted: steps with a draft.
        unequal: drafted steps with an unequal q, whose positive entries differ; others cannot expose a wrong q.
        rejected: steps that end with a rejection.
        bonus: steps that end with a bonus token after a draft.
        depth: largest number of accepted tokens.
        share: ``unequal / drafted`` of the start with the largest.
    """

    drafted: int = 0
    unequal: int = 0
    rejected: int = 0
    bonus: int = 0
    depth: int = 0
    share: float = 0.0

    def __add__(self, other: Coverage) -> Coverage:
        drafted, unequal = self.drafted + other.drafted, self.unequal + other.unequal
        ends = (self.rejected + other.rejected, self.bonus + other.bonus)
        return Coverage(drafted, unequal, *ends, max(self.depth, other.depth), max(self.share, other.share))

    @classmethod
    def of_step(cls, event: StepEvent) -> Coverage:
        """Coverage of one step of a batch; rows without a draft are not counted."""
        draft, tau, path = event.draft.candidates, event.verdict.length, event.verdict.path
        drafted = draft.valid.any(1)
        if not (count := int(drafted.sum())):
            return cls()
        if path is None:
            rejected = tau < draft.count
        else:
            last = torch.where(tau > 0, path.gather(1, (tau - 1).clamp(min=0)[:, None])[:, 0], -1)
            rejected = ((draft.parents == last[:, None]) & draft.valid).any(1)
        ends = int((rejected & drafted).sum())
        return cls(count, int(unequal_q(draft).sum()), ends, count - ends, int(tau[drafted].max()))

    def gap(self, point_mass: bool) -> str:
        """The reason why the pair is not exercised; empty if it is."""
        if not self.drafted:
            return "nothing was drafted"
        if not point_mass and self.share < UNEQUAL_SHARE:
            return f"q is unequal in {self.unequal:,} of {self.drafted:,} drafted steps"
        return ""


def unequal_q(draft: Draft) -> Tensor:
    """``[B]`` bool: a node of the row was drawn from a distribution whose positive entries differ."""
    if draft.q is None or not draft.width:
        return torch.zeros(draft.batch_size, dtype=torch.bool)
    spread = draft.q.amax(-1) - draft.q.masked_fill(draft.q <= 0, torch.inf).amin(-1)
    index = torch.arange(draft.width).expand_as(draft.tokens) if draft.q_index is None else draft.q_index
    return ((spread > ROUNDING).gather(1, index) & draft.valid).any(1)


@dataclass(frozen=True)
class WarmUp:
    """A start with a filled memory: all rows decode the same ``steps`` steps from ``prompt``, which are not enumerated.

    Attributes:
        depth: maximum depth of drafts in these steps.
        stream: number of the random stream; equal starts have equal random numbers and texts.
        earlier: prompt of a sequence that is decoded in the slot before, for as many steps; empty = none.
    """

    prompt: tuple[int, ...]
    steps: int = 0
    depth: int = 0
    stream: int = 0
    earlier: tuple[int, ...] = ()

    def run(self, decoder: Decoder) -> list[int]:
        """Run it in all slots of a new decoder; returns their text.

        Tokens are verified by `sample-match`, which is lossless for all drafts, so the text is the target's own and
        starts are equal for all verifiers.
        """
        own = decoder.verifier, decoder.rng, decoder.on_step
        if self.steps:
            decoder.verifier = plugins.get("verifiers", "sample-match")()
            decoder.verifier.claim = own[0].claim
            decoder.rng, decoder.on_step = CounterRng(WARM_UP_SEED), None
        for later, prompt in enumerate((self.earlier, self.prompt)):
            decoder.abandon()
            for row in range(decoder.sequences.batch_size if prompt else 0):
                decoder.start(row, prompt, stream=self.stream + 1 - later)
            for _ in range(self.steps if prompt else 0):
                limited_step(decoder, self.depth)
        decoder.verifier, decoder.rng, decoder.on_step = own
        if self.steps:
            for row in range(decoder.sequences.batch_size):
                decoder.verifier.start(row)
        return list(decoder.sequences.history[0])


def limited_step(decoder: Decoder, gamma: int) -> None:
    """Run a step with drafts of at most ``gamma`` tokens."""
    decoder.sequences.limit[:] = [min(limit, gamma) for limit in decoder.sequences.limit]
    decoder.step()


@dataclass(frozen=True)
class Certificate:
    """Result of an enumeration.

    Attributes:
        tv: total variation between the joint distributions of output and target, 0 for a lossless pair; NaN with a
            constraint.
        expected_tau: E[tau] of each step.
        first_tau: Pr(tau = i) in the first step, i = 0 .. gamma.
        paths: decision paths enumerated.
        coverage: events that were enumerated; without drafts the result proves nothing.
        last_token: before the first enumerated step.
        outputs: their probabilities.
        tolerance: largest TV of a lossless pair.
    """

    tv: float
    expected_tau: list[float]
    first_tau: list[float]
    paths: int
    coverage: Coverage
    last_token: int
    outputs: dict[tuple[int, ...], float]
    tolerance: float = TOLERANCE

    @property
    def lossless(self) -> bool:
        return self.tv <= self.tolerance


class Enumeration:
    """Random source that follows one script of decisions per row and queues the alternatives of open decisions.

    A decision is identified by step, purpose and index, like a random number. ``weight[b]`` is the probability of row
    b's decisions; scripts carry the probability of their outcomes, so numbers that are drawn but not used (of a row
    that stopped drafting) may differ between batches.
    """

    def __init__(self, scripts: np.ndarray, weight: np.ndarray, columns: dict[tuple[int, str, int], int]):
        self.scripts = scripts  # [B, decisions] outcome, -1 = undecided
        self.weight = weight
        self.columns = columns  # decision -> column of scripts, shared by all batches
        self.alternatives: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # parent rows, scripts, weights
        self._step_number = 0
        self._used: set[tuple[str, int]] = set()

    def for_step(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> Enumeration:
        self._step_number += 1
        self._used.clear()
        return self

    def repeat(self, rows: Sequence[int]) -> Enumeration:
        """The decisions of this step again, for some rows."""
        repeated = Enumeration(self.scripts[list(rows)], self.weight[list(rows)], self.columns)
        repeated._step_number = self._step_number
        return repeated

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        h = h.double().clamp(0, 1)
        outcomes = torch.stack([1 - h, h], -1).numpy()
        taken = [self._decide((purpose, index + i), outcomes[:, i]) for i in range(h.shape[1])]
        return torch.from_numpy(np.stack(taken, 1) if taken else np.zeros(h.shape, dtype=np.int64)) == 1

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        w = weights.double()
        if not w.numel() or not float(w.min()) >= -ROUNDING:
            self._check(w.numpy(), (purpose, index))
        mass = w.sum(-1, keepdim=True)
        # All-zero weights yield an arbitrary token: the first.
        probs = torch.where(mass == 0, torch.eye(1, w.shape[1], dtype=w.dtype), w / mass)
        return torch.from_numpy(self._decide((purpose, index), probs.numpy()))

    def _decide(self, key: tuple[str, int], probability: np.ndarray) -> np.ndarray:
        """Take one decision per row: ``probability [B, outcomes]`` -> outcome ``[B]``.

        Raises:
            NumericalError: a probability is NaN, infinite or negative.
            ValueError: the decision was already taken in this step.
        """
        self._check(probability, key)
        if key in self._used:
            raise ValueError(f"random numbers [{key[1]}] for '{key[0]}' were already used this step")
        self._used.add(key)
        column = self.columns.setdefault((self._step_number, *key), len(self.columns))
        self.scripts = _widen(self.scripts, len(self.columns))
        scripted = self.scripts[:, column]
        undecided = scripted < 0
        if not undecided.any():
            return scripted.copy()
        rows, possible = np.arange(len(probability)), probability > 0
        first = possible.argmax(1)
        taken = np.where(undecided, first, scripted)
        others = possible & undecided[:, None]
        others[rows, first] = False
        parent, outcome = np.nonzero(others)
        if len(parent):
            scripts = self.scripts[parent]
            scripts[:, column] = outcome
            self.alternatives.append((parent, scripts, self.weight[parent] * probability[parent, outcome]))
        self.scripts[:, column] = taken
        self.weight = self.weight * np.where(undecided, probability[rows, taken], 1.0)
        return taken

    @staticmethod
    def _check(probability: np.ndarray, key: tuple[str, int]) -> None:
        if not probability.min(initial=0) >= -ROUNDING:
            row = int((~(probability >= -ROUNDING)).any(1).argmax())
            raise NumericalError(
                f"rng received NaN or infinite probabilities, or negative ones, for '{key[0]}' {key[1]} in row {row}: "
                f"{[round(float(x), 6) for x in probability[row][:8]]}"
            )


def _widen(scripts: np.ndarray, columns: int) -> np.ndarray:
    rows, known = scripts.shape
    if known >= columns:
        return scripts
    return np.concatenate([scripts, np.full((rows, columns - known), -1, dtype=scripts.dtype)], 1)


State = tuple[tuple[int, ...], Hashable]
#: The state before the first enumerated step.
START: State = (), None
#: Emitted tokens and verifier state after a step -> probability.
Outcomes = dict[State, float]


def certify(
    toy: Toy,
    build: DrafterFactory,
    verifier: Callable[[], Verifier],
    *,
    steps: int = 1,
    gamma: int | Sequence[int] | None = None,
    temperature: float = 1.0,
    sampling: Sampling | None = None,
    markov: bool = False,
    constraint: Grammar | None = None,
    paths: list[Path] | None = None,
    checks: Checks = "none",
    start: WarmUp | None = None,
) -> Certificate:
    """Enumerate ``steps`` steps of a pair on ``toy``.

    Args:
        build: drafter factory, see :data:`DrafterFactory`.
        verifier: verifier factory, called once per batch of paths.
        steps: number of consecutive steps, at least 1.
        gamma: draft length, by default the toy's; 0 is allowed. With one number per step, the drafter is built for the
            largest and its drafts are truncated in the other steps, as at the end of a sequence.
        temperature: of the target; 0 certifies against the argmax.
        sampling: of the target, in place of ``temperature``.
        markov: the drafter depends on the last token only, as both toy models do: states with equal last token and
            verifier state are enumerated once, with a new drafter in each step. Otherwise one drafter processes all
            steps of a path.
        constraint: language of the output, a grammar over the toy's tokens that never ends; ``markov`` is then
            ignored.
        paths: receives every path; ``markov`` is then ignored.
        checks: faults of the verifier to look for, see `faults`: "all" in the first batches, "quick" whether half of
            the first batch has the same verdicts again, or "none", for verifiers that record their calls.
        start: prompt and steps before the enumerated ones; by default the toy's prompt and no steps.

    Raises:
        TooLargeError: more than `MOST_PATHS` paths.
        FaultError: the verdicts depend on more than the draft, p and rng.
    """
    lengths = _lengths(toy, steps, gamma)
    sampling = Sampling(temperature=temperature) if sampling is None else sampling
    pair = _Pair(toy, build, verifier, sampling, max(lengths), constraint, start)
    pair.recorded, pair.thorough = paths, checks == "all"
    pair.batches_to_check = {"none": 0, "quick": 1, "all": CHECKED_BATCHES}[checks]
    markov = markov and constraint is None
    if markov and paths is None and start is None:
        states, tau_distributions = {START: 1.0}, []
        for length in lengths:
            states, tau_probs = _advance(pair, states, length, True)
            tau_distributions.append(tau_probs)
    else:
        (states,), tau_distributions = pair.enumerate([START], lengths)
    total = sum(lengths) + steps
    count = pair.paths
    while pending := {s: w for s, w in states.items() if s[1] is not None and len(s[0]) < total}:
        # The verifier holds state: complete its output by steps without a draft.
        states = {s: w for s, w in states.items() if s not in pending}
        for state, weight in _advance(pair, pending, 0, markov)[0].items():
            states[state] = states.get(state, 0.0) + weight
    expected = [float((probs * np.arange(len(probs))).sum()) for probs in tau_distributions]
    tv = math.nan
    if constraint is None:
        tv = _total_variation(states, target_rows(toy, sampling, start, pair.text[-1]), total)
    coverage = replace(pair.coverage, share=pair.coverage.unequal / max(pair.coverage.drafted, 1))
    outputs: dict[tuple[int, ...], float] = {}
    for (tokens, _), weight in states.items():
        outputs[tokens] = outputs.get(tokens, 0.0) + weight
    first = [float(x) for x in tau_distributions[0]]
    return Certificate(tv, expected, first, count, coverage, pair.text[-1], outputs, pair.tolerance)


def _lengths(toy: Toy, steps: int, gamma: int | Sequence[int] | None) -> list[int]:
    if gamma is None or isinstance(gamma, int):
        return [toy.gamma if gamma is None else gamma] * steps
    if len(gamma) != steps:
        raise ValueError(f"{len(gamma)} draft lengths for {steps} steps")
    return list(gamma)


def _advance(pair: _Pair, states: Outcomes, length: int, markov: bool) -> tuple[Outcomes, np.ndarray]:
    """Enumerate one step from every state."""
    keys = {state: (state[0][-1:] if markov else state[0], state[1]) for state in states}
    origins = list(dict.fromkeys(keys.values()))
    outcomes = dict(zip(origins, pair.enumerate(origins, [length])[0], strict=True))
    out: Outcomes = {}
    tau_probs = np.zeros(length + 1)
    for state, weight in states.items():
        for (new, snapshot), probability in outcomes[keys[state]].items():
            after = ((*state[0], *new), snapshot)
            out[after] = out.get(after, 0.0) + weight * probability
            tau_probs[len(new) - 1] += weight * probability
    return out, tau_probs


@dataclass(frozen=True)
class Path:
    """A path of decisions: its probability, its steps with the row of each, and the output."""

    weight: float
    row: int
    steps: list[StepEvent]
    output: tuple[int, ...]


class Scripts:
    """Queue of open scripts, last in first out to keep it short."""

    def __init__(self, origins: int):
        self._columns: dict[tuple[int, str, int], int] = {}
        self._open = [(np.arange(origins), np.ones(origins), np.full((origins, 0), -1, dtype=np.int64))]

    def __bool__(self) -> bool:
        return bool(self._open)

    def take(self, maximum: int) -> tuple[np.ndarray, Enumeration]:
        """Pop at most ``maximum`` rows: their origins, and the random source that follows their scripts."""
        batches, remaining = [], maximum
        while self._open and remaining:
            origin, weight, scripts = self._open.pop()
            if len(origin) > remaining:
                self._open.append((origin[remaining:], weight[remaining:], scripts[remaining:]))
            batches.append((origin[:remaining], weight[:remaining], _widen(scripts[:remaining], len(self._columns))))
            remaining -= len(batches[-1][0])
        origin, weight, scripts = (np.concatenate(part) for part in zip(*batches, strict=True))
        return origin, Enumeration(scripts, weight, self._columns)

    def add(self, origin: np.ndarray, rng: Enumeration) -> None:
        """Queue the alternatives recorded by ``rng`` for rows with these origins."""
        self._open += [(origin[parent], weight, scripts) for parent, scripts, weight in rng.alternatives]


class _Continuation:
    """A grammar whose texts follow ``tokens`` of another grammar."""

    def __init__(self, grammar: Grammar, tokens: Sequence[int]):
        self._grammar, self._tokens, self.mask_drafts = grammar, tokens, grammar.mask_drafts

    def matcher(self) -> Matcher:
        matcher = self._grammar.matcher()
        for token in self._tokens:
            matcher.advance(token)
        return matcher


class _Pair:
    """A drafter and a verifier on a toy.

    Attributes:
        coverage: of the steps enumerated so far.
        paths: decision paths enumerated so far.
        text: tokens before the first enumerated step.
        recorded: receives every path, if requested.
        batches_to_check: number of batches whose verdicts are still to be checked, and ``thorough``: for all faults.
    """

    recorded: list[Path] | None = None
    batches_to_check, thorough = 0, False
    tolerance = TOLERANCE

    def __init__(
        self,
        toy: Toy,
        build: DrafterFactory,
        verifier: Callable[[], Verifier],
        sampling: Sampling,
        gamma: int,
        constraint: Grammar | None = None,
        start: WarmUp | None = None,
    ):
        self.toy, self.build, self.verifier, self.sampling, self.gamma = toy, build, verifier, sampling, gamma
        self.constraint, self.start = constraint, WarmUp(tuple(toy.prompt)) if start is None else start
        self.filled = start is not None
        self.text = list(self.start.prompt)
        self.coverage, self.paths = Coverage(), 0
        self._events: list[StepEvent] = []

    def enumerate(self, origins: list[State], lengths: Sequence[int]) -> tuple[list[Outcomes], list[np.ndarray]]:
        """Enumerate steps from each origin with one drafter: outcomes of each, and Pr(tau = i) of each step.

        Rows of a batch share a drafter, unless it remembers earlier sequences.
        """
        scripts, size, unshared = Scripts(len(origins)), BATCH, any(lengths) and (len(lengths) > 1 or self.filled)
        out: list[Outcomes] = [{} for _ in origins]
        tau_distributions = [np.zeros(length + 1) for length in lengths]
        while scripts:
            batch, rng = scripts.take(size)
            decoder = self._decoder(rng, len(batch))
            if unshared and decoder.drafter.remembers(decoder.drafter.config):
                size = 1
            if origins == [START]:
                self.text = self.start.run(decoder)
            else:
                self._continue(decoder, [origins[origin] for origin in batch])
            ends = [[len(history) for history in decoder.sequences.history]]
            for step, length in enumerate(lengths):
                self._step(decoder, length, None if step else [origins[origin][1] for origin in batch])
                ends.append([len(history) for history in decoder.sequences.history])
            for row, weight in enumerate(rng.weight):
                state = (tuple(decoder.sequences.history[row][ends[0][row] :]), decoder.verifier.snapshot(row))
                out[batch[row]][state] = out[batch[row]].get(state, 0.0) + weight
                if self.recorded is not None:
                    self.recorded.append(Path(float(weight), row, self._events, state[0]))
                for tau_probs, before, after in zip(tau_distributions, ends, ends[1:], strict=False):
                    tau_probs[after[row] - before[row] - 1] += weight
            scripts.add(batch, rng)
        return out, tau_distributions

    def _continue(self, decoder: Decoder, states: Sequence[State]) -> None:
        """Start each row after the text of a state."""
        for row, (tokens, snapshot) in enumerate(states):
            continued = None if self.constraint is None else _Continuation(self.constraint, tokens)
            decoder.start(row, [*self.text, *tokens], constraint=continued)
            if snapshot is not None:
                decoder.verifier.restore(row, snapshot)

    def _decoder(self, rng: Enumeration, batch: int) -> Decoder:
        self.paths += batch
        if self.paths > MOST_PATHS:
            raise TooLargeError(
                f"enumeration is limited to {MOST_PATHS:,.0f} decision paths, and there are more; lower the draft "
                "length or the number of steps"
            )
        start = len(self.start.prompt) - 1
        context = ToyContext(
            self.toy.target, self.toy.drafter, self.sampling, batch, start=start, token_texts=self.toy.token_texts
        )
        # An invalid verifier must not raise: its deviation is measured. Shapes and counts are checked nevertheless.
        options = {"rng": rng, "on_step": self._on_step, "validate": "never", "constraint": self.constraint}
        options["max_new_tokens"] = MAX_TOKENS
        verifier = self.verifier()
        verifier.verify = partial(self._verify, verifier, verifier.verify)  # type: ignore[method-assign]
        self._events = []
        return build_decoder(context, lambda context: self.build(context, self.gamma), verifier, **options)

    def _verify(
        self,
        verifier: Verifier,
        verify: Callable[[Draft, Tensor, StepRng], Verdict],
        draft: Draft,
        p: Tensor,
        rng: StepRng,
    ) -> Verdict:
        """``verify``, with a note of the smallest draft on an exception."""
        try:
            with unmodified(name_of(verifier), draft, p):
                return verify(draft, p, rng)
        except Exception as error:
            row = self._smallest_failing(draft, p, rng)
            error.add_note(draft_note(draft, row) + f" (row {row} of {draft.batch_size})" * (draft.batch_size > 1))
            raise

    def _smallest_failing(self, draft: Draft, p: Tensor, rng: StepRng) -> int:
        """The row with the fewest nodes that raises by itself; row 0 if none does."""
        assert isinstance(rng, Enumeration)
        call, count = Verification(draft, p, rng.repeat), draft.count.tolist()
        for row in sorted(range(draft.batch_size), key=lambda row: count[row])[:CHECKED_ROWS]:
            try:
                call.repeat(self.verifier(), [row])
            except Exception:  # third-party code may raise anything
                return row
        return 0

    def _step(self, decoder: Decoder, length: int, states: Sequence[Hashable] | None) -> None:
        """Run a step; ``states``: snapshots of the verifier's state before it, None if they are unknown."""
        enough = CHECKED_ROWS if not self.thorough else 1
        checked = self.batches_to_check > 0 and states is not None and decoder.sequences.batch_size >= enough
        limited_step(decoder, length)
        if not checked:
            return
        assert states is not None
        self.batches_to_check -= 1
        event = self._events[-1]
        draft = event.draft.candidates
        known = states

        def restore(verifier: Verifier, rows: Sequence[int]) -> None:
            for row, number in enumerate(rows):
                if known[number] is not None:
                    verifier.restore(row, known[number])

        # Numbers of the default source: scripts fix outcomes, whatever their probability.
        numbers, device = CounterRng(7), draft.tokens.device
        call = Verification(
            draft,
            event.scores.p[:, : draft.width + 1],
            lambda rows: numbers.for_step(rows, [0] * len(rows), device),
            restore,
        )
        check_quickly(self.verifier, decoder.verifier, call)
        if self.toy.gamma <= 2 and self.toy.vocab_size <= 3:  # a call in a large vocabulary takes 10 ms a row
            _check_wide_quickly(self.verifier, call)
        if self.thorough:
            check_fully(self.verifier, call, self.toy.vocab_size)

    def _on_step(self, event: StepEvent) -> None:
        self.coverage += Coverage.of_step(event)
        if (q := event.draft.q) is not None and q.dtype != torch.float64:
            self.tolerance = SINGLE
        if self.recorded is None:
            self._events.clear()
        self._events.append(event)


def _check_wide_quickly(make: Callable[[], Verifier], call: Verification) -> None:
    """`check_wide` if rows of a call have another verdict in the large vocabulary, with equal random numbers."""
    rows = range(min(call.draft.batch_size, _WIDE_ROWS))
    few = replace(call, draft=call.draft.map_rows(lambda tensor: tensor[: len(rows)]), p=call.p[: len(rows)])
    ids, draft, p = _widened(few.draft, few.p)
    expected = [(tau, int(ids[token]), path) for tau, token, path in few.repeat(make(), rows)]
    if replace(call, draft=draft, p=p).repeat(make(), rows) != expected:
        check_wide(make, few.draft, few.p, name_of(make()))


def check_wide(make: Callable[[], Verifier], draft: Draft, p: Tensor, who: str) -> None:
    """Raise FaultError if verdicts have another distribution in a vocabulary of `WIDE` tokens."""
    ids, wide, wide_p = _widened(draft, p)
    few, many = _distribution(make, draft, p, ids), _distribution(make, wide, wide_p, torch.arange(WIDE))
    for key in {*few, *many}:
        if abs((a := few.get(key, 0.0)) - (b := many.get(key, 0.0))) >= SINGLE:
            raise FaultError(
                f"{who} depends on the size of the vocabulary: it accepts {key[1]} tokens and emits the same one with "
                f"probability {a:.4g} among {p.shape[2]} tokens, and {b:.4g} among {WIDE:,}, of which the others are "
                "impossible"
            )


def _widened(draft: Draft, p: Tensor) -> tuple[Tensor, Draft, Tensor]:
    """Ids of the tokens in a vocabulary of `WIDE`, the first and the last ones; the draft and p over these alone."""
    ids, wide = torch.arange(p.shape[2]) + WIDE - p.shape[2], draft.map_rows(Tensor.clone)
    ids[0] = 0
    p, *q = (x.new_zeros(*x.shape[:-1], WIDE).index_copy(-1, ids, x) for x in (p, draft.q) if x is not None)
    wide.tokens, wide.q = ids[draft.tokens], q[0] if q else None
    return ids, wide, p


def _distribution(
    make: Callable[[], Verifier], draft: Draft, p: Tensor, ids: Tensor
) -> dict[tuple[int, int, int, tuple[int, ...]], float]:
    """Probability of each row, tau, id of the token and path, by enumeration."""
    out: dict[tuple[int, int, int, tuple[int, ...]], float] = {}
    scripts = Scripts(draft.batch_size)
    while scripts:
        rows, rng = scripts.take(16)  # larger tensors are mapped anew by each allocation
        call = Verification(draft, p, lambda _, rng=rng: rng.for_step([], [], p.device))
        verdicts = call.repeat(make(), rows.tolist())
        for row, (tau, token, path), weight in zip(rows.tolist(), verdicts, rng.weight, strict=True):
            key = row, tau, int(ids[token]), tuple(path)
            out[key] = out.get(key, 0.0) + float(weight)
        scripts.add(rows, rng)
    return out


def target_rows(toy: Toy, sampling: Sampling, start: WarmUp | None, last: int) -> Tensor:
    """``[V + 1, V]``: the target's probabilities after each token, and of the first, after ``last`` of a warm-up."""
    rows = sampling.probs(toy.target.log())
    return rows if start is None or not start.steps else torch.cat([rows[:-1], rows[last : last + 1]])


def _total_variation(states: Outcomes, probs: Tensor, length: int) -> float:
    """Total variation of outputs, completed to ``length`` tokens by ``probs [V + 1, V]``, from the target."""
    vocab, rows = probs.shape[1], probs.numpy()
    ended = [np.zeros(vocab**n) for n in range(length + 1)]
    for (tokens, _), weight in states.items():
        n, beyond = min(len(tokens), length), tokens[length:]
        assert not beyond, "an output is longer than steps x (gamma + 1)"
        ended[n][_index(tokens, vocab)] += weight
    output, target = ended[0], np.ones(1)
    for n in range(length):
        last = np.arange(vocab**n) % vocab if n else np.array([vocab])  # row V: probabilities of the first token
        output = (output[:, None] * rows[last]).ravel() + ended[n + 1]
        target = (target[:, None] * rows[last]).ravel()
    return float(np.abs(output - target).sum() / 2)


def _index(tokens: Sequence[int], vocab: int) -> int:
    index = 0
    for token in tokens:
        index = index * vocab + token
    return index
