"""Checks of an engine's responses against the target and the drafter, without the engine.

Steps are compared with those that replay derives from the responses. Given the response, a step that starts at a token
accepts a number of drafted tokens that only the drafts and the verifier's coins decide. Where drafts are deterministic,
so is that number, and the engine must accept exactly as many. Otherwise the accepted tokens of all steps must agree
with their expectation: their difference is a martingale over the steps, whose variance is the sum of the steps'
variances.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from crossdraft import LoadedModel, Sampling, StepEvent, UsageError, generate, printable
from crossdraft.framework import plugins
from crossdraft.models import tie_of
from crossdraft.runs import CellConfig, CellResult, StepRecord, Strategy

from ..engines.counter_definitions import CounterDefinition
from ..engines.engine_cell import AFTER, BEFORE, RESPONSES
from ..engines.engine_log import Source
from ..engines.prometheus import ACCEPTED, summed, totals_by_model
from ..engines.server import response_flaw
from ..replay.acceptance_formulas import survival
from ..replay.candidates import candidates_of
from ..replay.engine_counts import EngineCounts
from ..replay.response import Response
from ..replay.responses import Reader
from .sampler_verdict import LEVEL as SHOWN
from .sampler_verdict import Evidence, PrefixDraws, Verdict
from .token_tree import first_beyond, positions, token_gaps

LEVEL = 1e-3  # verdicts about steps are at this level
_Z = 3.29  # standard deviations of that level
_ROUNDING = 1e-3  # rounding error of a sum of probabilities


@dataclass(frozen=True)
class CounterCheck:
    """Accepted tokens that the server counted, and those that replay expects by the engine's definition."""

    accepted: float
    expected: float
    unknown: float  # accepted tokens past the end of responses, at most; engines that count them do not return them
    deviation: float  # standard deviation of ``accepted``

    def bounds(self, z: float) -> tuple[float, float]:
        """The expected range, with ``z`` standard deviations on either side."""
        return self.expected - z * self.deviation, self.expected + self.unknown + z * self.deviation

    @property
    def agrees(self) -> bool:
        """False if the counter is outside of the range at `LEVEL`."""
        low, high = self.bounds(_Z)
        return low - _ROUNDING <= self.accepted <= high + _ROUNDING


@dataclass
class GreedyText:
    """Greedy responses against the target's argmax."""

    equal: int = 0  # responses that are the argmax at every token
    tied: int = 0  # responses that are not, by ties within rounding only
    # prompt, token and logit gap of the first token beyond a tie, of every other response
    other: list[tuple[str, int, float]] = field(default_factory=list)
    tokens: int = 0  # number of compared tokens
    largest: float = 0.0  # largest logit gap

    def add(self, name: str, gaps: np.ndarray, tie: float) -> None:
        """Add a response with the logit gap of each token, see `token_gaps`."""
        self.tokens += len(gaps)
        self.largest = max(self.largest, float(gaps.max(initial=0.0)))
        if (first := first_beyond(gaps, tie)) is not None:
            self.other.append((name, first, float(gaps[first])))
        elif (gaps > 0).any():
            self.tied += 1
        else:
            self.equal += 1


@dataclass(frozen=True)
class UnequalStep:
    """A step that accepted another number of tokens than replay."""

    index: int  # number of the response
    token: int  # index of the step's first token in it
    emitted: Sequence[int]  # tokens of the response from there on, at most one more than a draft has
    drafted: Sequence[int]  # tokens that the drafter proposes there; empty if they depend on random numbers
    # the other requests in the step, and those in the step before it, at whose end the engine drafted, each with the
    # token that it was at
    others: tuple[Sequence[str], Sequence[str]]


@dataclass
class CellCheck:
    """Results of the checks of one cell; None for one that does not apply."""

    config: CellConfig
    steps: ServedSteps | None = None
    counters: CounterCheck | None = None
    distribution: Verdict | None = None
    text: GreedyText | None = None
    # if the check of the distribution failed, the number of draws after which the difference showed
    draws_to_show: int | None = None
    first: UnequalStep | None = None  # the first step that differs from replay
    # see `Metrics.other_traffic`; the counters are not compared then
    other_traffic: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """``yes``, ``no`` or ``undecided``."""
        if self.text is not None and self.text.other:
            return "no"
        if self.steps is not None and (self.steps.equal < self.steps.decided or self.steps.p_value < LEVEL):
            return "no"
        if self.counters is not None and not self.counters.agrees:
            return "no"
        return "yes" if self.distribution is None else self.distribution.outcome


def check_cell(
    result: CellResult,
    cell: Path,
    scrapes: Path,
    target: LoadedModel,
    *,
    deviation: float,
    seed: int,
    trust: Iterable[str],
) -> CellCheck:
    """Run all checks of a finished cell in the directory ``cell``; ``scrapes``: the directory of the server's counters.

    The target is loaded in the dtype of the engine; ``deviation`` is the allowed total variation of sampled tokens.
    Raises UsageError if the drafter cannot be replayed.
    """
    config = result.config
    responses = list(Reader(target=config.target, sampling=config.sampling).read([str(cell)]))
    check = CellCheck(config)
    refuse_impossible(result, responses, target, cell)
    if config.sampling.temperature == 0:
        gaps = token_gaps([r.prompt for r in responses], [r.tokens for r in responses], target)
        check.text, (_, tie) = GreedyText(), tie_of(target)
        for response, of_response in zip(responses, gaps, strict=True):
            check.text.add(response.id, of_response[:, 0], tie)
    else:
        check.distribution, check.draws_to_show = distribution(responses, target, config.sampling, deviation, seed)
    if not config.is_baseline:
        check.steps, counts, first = served_steps(result, responses, trust)
        if result.metrics is not None:
            check.other_traffic = result.metrics.other_traffic
        accepted = None if check.other_traffic else counted(config, scrapes, len(responses))
        if first is not None:
            check.first = describe(result, responses, first, check.steps.unequal[0][1], target)
        if accepted is not None and counts is not None:
            deviation = math.sqrt(check.steps.variance)
            check.counters = CounterCheck(accepted, counts.accepted, counts.unknown, deviation)
    return check


def refuse_impossible(result: CellResult, responses: Sequence[Response], target: LoadedModel, cell: Path) -> None:
    """Raise UsageError for a recorded response that no server can return, see `response_flaw`."""
    config = result.config
    size = target.model.get_output_embeddings().weight.shape[0]
    for line, response, steps in zip(result.responses, responses, _emitted(result), strict=True):
        maximum = config.max_new_tokens
        if target.context_length is not None:
            maximum = min(maximum, target.context_length - len(response.prompt))
        flaw = response_flaw(
            line["tokens"],
            [len(line["tokens"]) - sum(steps), *steps],
            line["finish_reason"],
            gamma=result.metrics.depth if result.metrics else 0,
            max_tokens=maximum,
            end_tokens=target.eos_token_ids,
            vocab_size=size,
        )
        if flaw:
            name = printable(str(line["question_id"]))
            raise UsageError(f"{cell}: the response to prompt {name!r} is impossible: {flaw}; measure the cell again")


def describe(
    result: CellResult, responses: Sequence[Response], index: int, token: int, target: LoadedModel
) -> UnequalStep:
    """Describe the step of response ``index`` that emitted ``token`` first: its draft, and the requests beside it."""
    config, depth = result.config, result.metrics.depth if result.metrics else 1
    response, drafts = responses[index], list[list[int]]()

    def record(event: StepEvent) -> None:
        drafts.append(event.draft.tokens[0, : int(event.draft.count[0])].tolist())

    if not config.sampling.temperature:  # else the draft depends on random numbers
        definition, prefix = _definition(config), [*response.prompt, *response.tokens[:token]]
        options = definition.drafter_options.get(config.drafter.name, {}) if definition is not None else {}
        drafter = {"name": config.drafter.name, **config.drafter.config, **options}
        generate(target, [prefix], drafter=drafter, temperature=0, max_new_tokens=depth + 1, on_step=record)
    others = step_mates(result.responses, first_tokens(result), index, token)
    emitted = response.tokens[token : token + depth + 1]
    return UnequalStep(index, token, emitted, drafts[0] if drafts else [], others)


def first_tokens(result: CellResult) -> list[list[int]]:
    """Index of the first token of every step, the prefill included, by response."""
    emitted = _emitted(result)
    return [
        [0, *accumulate(steps[:-1], initial=len(line["tokens"]) - sum(steps))] if steps else [0]
        for line, steps in zip(result.responses, emitted, strict=True)
    ]


def _emitted(result: CellResult) -> list[list[int]]:
    """Tokens of every step after the prefill, by response."""
    records = _records(result)
    return [[r.emitted for r in records[str(line["question_id"]), line["turn"]]] for line in result.responses]


def _records(result: CellResult) -> dict[tuple[str, int], list[StepRecord]]:
    """The steps by prompt and turn."""
    records: dict[tuple[str, int], list[StepRecord]] = defaultdict(list)
    for record in result.records:
        records[record.question_id, record.turn].append(record)
    return records


def step_mates(
    lines: Sequence[Mapping[str, Any]], firsts: Sequence[Sequence[int]], index: int, token: int
) -> tuple[list[str], list[str]]:
    """The other requests in the step of response ``index`` that emitted ``token`` first, and in the step before it.

    The tokens of one step arrive at about the same time, within half of that step. Empty if times are unknown.

    ``lines``: responses as recorded, with ``arrivals``; ``firsts``: index of the first token of every step, by
    response.
    """
    arrivals = [line.get("arrivals", []) for line in lines]
    if token not in firsts[index][1:] or len(arrivals[index]) != len(firsts[index]):
        return [], []
    step = firsts[index].index(token)
    before, now = arrivals[index][step - 1 : step + 1]
    sides: tuple[list[str], list[str]] = [], []
    for side, moment in zip(sides, (now, before), strict=True):
        for i, times in enumerate(arrivals):
            if i == index or not times or len(times) != len(firsts[i]):
                continue
            distances = [abs(time - moment) for time in times]
            k = distances.index(min(distances))
            if distances[k] <= (now - before) / 2:
                events = ["joins"] * (k == 0) + ["ends"] * (k == len(times) - 1) or [f"token {firsts[i][k]}"]
                side.append(f"{lines[i]['question_id']} ({', '.join(events)})")
    return sides


def counted(config: CellConfig, scrapes: Path, responses: int) -> float | None:
    """Accepted tokens between two scrapes of a server's counters; None if it has none, or they miss responses."""
    definition = _definition(config)
    try:
        before, after = ((scrapes / name).read_text(encoding="utf-8") for name in (BEFORE, AFTER))
    except FileNotFoundError:
        return None
    if definition is None or not after.startswith(f"{RESPONSES}{responses}\n"):
        return None
    later, earlier = Source(after, str(scrapes / AFTER)), Source(before, str(scrapes / BEFORE))
    accepted = summed(totals_by_model(definition, later, earlier), ACCEPTED)
    return None if accepted is None else accepted.value


def _definition(config: CellConfig) -> CounterDefinition | None:
    """Definition of the counters of a cell's engine."""
    assert config.engine is not None
    settings = plugins.get("servers", config.engine.name).settings
    return plugins.get("engines", settings)().counters_of(config.drafter.name) if settings else None


def served_steps(
    result: CellResult, responses: Sequence[Response], trust: Iterable[str]
) -> tuple[ServedSteps, EngineCounts | None, int | None]:
    """Compare the steps of a cell with replay; count them by the engine's definition, if there is one.

    The first token of a response comes from the engine's prefill. The last value is the index of the first response
    with a step that differs; None without one.
    """
    config = result.config
    own = [i for i, response in enumerate(responses) if len(response.tokens) > 1]
    later = [
        replace(
            response,
            prompt=[*response.prompt, response.tokens[0]],
            tokens=response.tokens[1:],
            log_p=None,
            maximum=None if response.maximum is None else response.maximum - 1,
        )
        for response in (responses[i] for i in own)
    ]
    records, definition = _records(result), _definition(config)
    drafter = Strategy.model_validate({"name": config.drafter.name, **config.drafter.config})
    (candidate,) = candidates_of(
        [drafter.model_dump_json()],
        [config.verifier.name],
        [result.metrics.depth if result.metrics else 1],
        sampling=config.sampling,
        target=config.target,
        dtype=config.dtype,
        trust_remote_code=set(trust),
        drafter_options=definition.drafter_options if definition is not None else {},
    )
    (verifier,) = candidate.verifiers
    turns: dict[str, int] = defaultdict(int)
    inferred = plugins.get("servers", config.engine.name).tokens_per_event if config.engine else False
    steps = ServedSteps()
    counts = None if definition is None else EngineCounts(definition, candidate.depth)
    first: int | None = None
    for i, response, scores in zip(own, later, candidate.scores(later), strict=True):
        turn = turns[response.id]
        turns[response.id] += 1
        at_least = survival(verifier, scores)[1]
        steps.add(response.id, records[response.id, turn], at_least, inferred)
        if first is None and steps.unequal:
            first = i
        if counts is not None:  # no step starts at the prefill's token
            padded, lengths = np.pad(at_least, ((1, 0), (0, 0))), np.pad(scores.lengths, (1, 0))
            counts.add(padded, lengths, len(response.tokens) + 1, config.max_new_tokens)
    return steps, counts, first


def distribution(
    responses: Sequence[Response], target: LoadedModel, sampling: Sampling, deviation: float, seed: int
) -> tuple[Verdict, int | None]:
    """Verdict on the later tokens of sampled responses, and the smallest number of draws that showed a difference."""
    evidence, shown = Evidence(seed), None
    for probs, rows in positions([r.prompt for r in responses], [r.tokens for r in responses], target, sampling):
        draws = [PrefixDraws(responses[i].place, [token], [1]) for i, _, token in rows]
        later = [i for i, (_, t, _) in enumerate(rows) if t]
        if later:
            evidence.add(probs[later], [draws[i] for i in later])
            if shown is None and evidence.verdict(deviation).p_value < SHOWN:
                shown = evidence.draws
    verdict = evidence.verdict(deviation)
    return verdict, shown if verdict.outcome == "no" else None


@dataclass
class ServedSteps:
    """Counts of the steps of one cell."""

    # steps whose number of accepted tokens follows from the response; ``equal``: those that accepted it
    decided: int = 0
    equal: int = 0
    # accepted, expected: accepted tokens of all steps, and their expectation
    accepted: float = 0.0
    expected: float = 0.0
    variance: float = 0.0  # of ``accepted``
    steps: int = 0  # number of compared steps
    # at_least, expected_at_least: number of steps that accepted at least i = 1, 2, ... tokens, and its expectation.
    at_least: np.ndarray = field(default_factory=lambda: np.zeros(0))
    expected_at_least: np.ndarray = field(default_factory=lambda: np.zeros(0))
    # place of the first steps that differ: prompt, token, accepted tokens, those of replay
    unequal: list[tuple[str, int, int, int]] = field(default_factory=list)

    def add(self, name: str, records: Sequence[StepRecord], survival: np.ndarray, inferred: bool = False) -> None:
        """Add the steps of one response, the last of which emitted its end, and Pr(tau >= i), ``survival [T, G]``.

        ``inferred``: the ends of steps were inferred from arrival times. Then the number of steps decides, if the
        response determines it.
        """
        depth = survival.shape[1]
        start = len(survival) - sum(record.emitted for record in records)  # the prefill's tokens belong to no step
        if start < 0:
            return
        if not self.steps:
            self.at_least, self.expected_at_least = np.zeros(depth), np.zeros(depth)
        before = self.accepted, self.expected, self.decided, self.equal, len(self.unequal)
        as_replayed = inferred and records and len(records) in _steps_from(start, survival, records[0].limit)
        for record in records:
            end = start + record.emitted
            # An engine that ends a response inside a draft reports the accepted tokens beyond the end, or none of them.
            if start >= len(survival) or end >= len(survival):
                break
            probs = survival[start, : record.limit] if record.limit < depth else survival[start]
            self.steps += 1
            self.accepted += record.tau
            mean = float(probs.sum())
            self.expected += mean
            # E[tau^2] = sum over i of (2i - 1) Pr(tau >= i)
            self.variance += max(float((probs * (2 * np.arange(len(probs)) + 1)).sum()) - mean**2, 0.0)
            self.at_least[: record.tau] += 1
            self.expected_at_least[: len(probs)] += probs
            if np.all((probs < 1e-6) | (probs > 1 - 1e-6)):
                self.decided += 1
                if record.tau == round(mean):
                    self.equal += 1
                else:
                    self.unequal.append((name, start + 1, record.tau, round(mean)))
            start = end
        accepted, expected, decided, equal, differing = before
        if as_replayed:
            self.expected = expected + self.accepted - accepted
            self.equal = equal + self.decided - decided
            del self.unequal[differing:]

    @property
    def z(self) -> float:
        """Standard score of the accepted tokens; infinite if they differ without variance."""
        difference = self.accepted - self.expected
        if self.variance < 1e-9:
            return 0.0 if abs(difference) < 1e-6 else math.copysign(math.inf, difference)
        return difference / math.sqrt(self.variance)

    @property
    def p_value(self) -> float:
        """Two-sided p-value of `z` under the normal approximation."""
        return math.erfc(abs(self.z) / math.sqrt(2))


def _steps_from(start: int, survival: np.ndarray, limit: int) -> tuple[int, ...]:
    """Possible numbers of steps from ``start`` to the end of the response; empty if they are not deterministic.

    If the last token is an accepted one, the last step has no bonus token, and an engine that counts that acceptance
    seems to have taken a step less.
    """
    depth, end_of_limit, steps = survival.shape[1], start + limit, 0
    while start < len(survival):
        probs = survival[start, : min(max(end_of_limit - start, 0), depth)]
        if np.any((probs >= 1e-6) & (probs <= 1 - 1e-6)):
            return ()
        start, steps = start + round(float(probs.sum())) + 1, steps + 1
    return (steps - 1, steps) if start > len(survival) else (steps,)
