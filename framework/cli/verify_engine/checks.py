"""Checks of an engine's responses against the target and the drafter, without the engine."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import plugins
from ...certificate.greedy_text import GreedyText, positions, token_gaps
from ...contracts.sampling import Sampling
from ...models.rounding import tie_of

if TYPE_CHECKING:
    from ...certificate.samples.sampler_verdict import Verdict
    from ...contracts.models import LoadedModel
    from ...metrics.counter_definitions import CounterDefinition
    from ...recipe.recipe import CellConfig
    from ...replay.engine_counts import EngineCounts
    from ...replay.response import Response
    from ...replay.served_steps import ServedSteps
    from ...runs.records import CellResult

#: Verdicts about steps are at this level.
LEVEL = 1e-3
#: Standard deviations of that level.
_Z = 3.29
#: Rounding error of a sum of probabilities.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class CounterCheck:
    """Accepted tokens that the server counted, and those that replay expects by the engine's definition.

    Attributes:
        unknown: accepted tokens past the end of responses, at most; engines that count them do not return them.
        deviation: standard deviation of ``accepted``.
    """

    accepted: float
    expected: float
    unknown: float
    deviation: float

    def bounds(self, z: float) -> tuple[float, float]:
        """The expected range, with ``z`` standard deviations on either side."""
        return self.expected - z * self.deviation, self.expected + self.unknown + z * self.deviation

    @property
    def agrees(self) -> bool:
        """False if the counter is outside of the range at `LEVEL`."""
        low, high = self.bounds(_Z)
        return low - _ROUNDING <= self.accepted <= high + _ROUNDING


@dataclass
class CellCheck:
    """Results of the checks of one cell; None for one that does not apply.

    Attributes:
        draws_to_show: if the check of the distribution failed, the number of draws after which the difference showed.
    """

    config: CellConfig
    steps: ServedSteps | None = None
    counters: CounterCheck | None = None
    distribution: Verdict | None = None
    text: GreedyText | None = None
    draws_to_show: int | None = None

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


def responses_of(cell: Path, config: CellConfig) -> list[Response]:
    """Responses of a cell on disk."""
    from ...replay.responses import Reader

    return list(Reader(target=config.target, sampling=config.sampling).read([str(cell)]))


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
    """Run all checks of a finished cell.

    Args:
        cell: its directory.
        scrapes: directory of the server's counters.
        target: the loaded target, in the dtype of the engine.
        deviation: allowed total variation of the sampled tokens.
        trust: models that may run their own Python code.

    Raises:
        UsageError: the drafter cannot be replayed.
    """
    config, responses = result.config, responses_of(cell, result.config)
    check = CellCheck(config)
    if config.sampling.temperature == 0:
        check.text = greedy_text(responses, target)
    else:
        check.distribution, check.draws_to_show = distribution(responses, target, config.sampling, deviation, seed)
    if not config.is_baseline:
        check.steps, counts = served_steps(result, responses, trust)
        # Counters that contain other requests are not compared.
        foreign = result.metrics is not None and result.metrics.other_traffic
        accepted = None if foreign else counted(config, scrapes, len(responses))
        if accepted is not None and counts is not None:
            deviation = math.sqrt(check.steps.variance)
            check.counters = CounterCheck(accepted, counts.accepted, counts.unknown, deviation)
    return check


def counted(config: CellConfig, scrapes: Path, responses: int) -> float | None:
    """Accepted tokens between two scrapes of a server's counters; None if it has none, or they miss responses."""
    from ...bench.cells.engine_cell import AFTER, BEFORE, RESPONSES
    from ...engines.engine_log import Source
    from ...engines.prometheus import samples, since

    definition = _definition(config)
    try:
        before, after = ((scrapes / name).read_text(encoding="utf-8") for name in (BEFORE, AFTER))
    except FileNotFoundError:
        return None
    if definition is None or not after.startswith(f"{RESPONSES}{responses}\n"):
        return None
    names = {f"{definition.prefix}spec_decode_num_accepted_tokens_total"}
    later, earlier = Source(after, str(scrapes / AFTER)), Source(before, str(scrapes / BEFORE))
    series = since(samples(later, names), samples(earlier, names), later, earlier)
    return sum(sample.value for sample in series.values()) if series else None


def _definition(config: CellConfig) -> CounterDefinition | None:
    """Definition of the counters of a cell's engine."""
    assert config.engine is not None
    settings = plugins.get("servers", config.engine.name).settings
    return plugins.get("engines", settings)().counters_of(config.drafter.name) if settings else None


def served_steps(
    result: CellResult, responses: Sequence[Response], trust: Iterable[str]
) -> tuple[ServedSteps, EngineCounts | None]:
    """Compare the steps of a cell with replay; count them by the engine's definition, if there is one.

    The first token of a response comes from the engine's prefill.
    """
    from ...recipe.recipe import Strategy
    from ...replay.acceptance_formulas import survival
    from ...replay.engine_counts import EngineCounts
    from ...replay.served_steps import ServedSteps
    from ..replay.candidates import candidates_of

    config = result.config
    later = [
        replace(
            response,
            prompt=[*response.prompt, response.tokens[0]],
            tokens=response.tokens[1:],
            log_p=None,
            most=None if response.most is None else response.most - 1,
        )
        for response in responses
        if len(response.tokens) > 1
    ]
    records = defaultdict(list)
    for record in result.records:
        records[record.question_id, record.turn].append(record)
    definition = _definition(config)
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
    for response, scores in zip(later, candidate.scores(later), strict=True):
        turn = turns[response.id]
        turns[response.id] += 1
        at_least = survival(verifier, scores)[1]
        steps.add(response.id, records[response.id, turn], at_least, inferred)
        if counts is not None:  # no step starts at the prefill's token
            padded, lengths = np.pad(at_least, ((1, 0), (0, 0))), np.pad(scores.lengths, (1, 0))
            counts.add(padded, lengths, len(response.tokens) + 1, config.max_new_tokens)
    return steps, counts


def distribution(
    responses: Sequence[Response], target: LoadedModel, sampling: Sampling, deviation: float, seed: int
) -> tuple[Verdict, int | None]:
    """Verdict on the later tokens of sampled responses, and the smallest number of draws that showed a difference."""
    from ...certificate.samples.sampler_verdict import LEVEL as SHOWN
    from ...certificate.samples.sampler_verdict import Evidence, PrefixDraws

    evidence, shown = Evidence(seed), None
    for probs, rows in positions([r.prompt for r in responses], [r.tokens for r in responses], target, sampling):
        draws = [PrefixDraws(responses[i].where, [token], [1]) for i, _, token in rows]
        later = [i for i, (_, t, _) in enumerate(rows) if t]
        if later:
            evidence.add(probs[later], [draws[i] for i in later])
            if shown is None and evidence.verdict(deviation).p_value < SHOWN:
                shown = evidence.draws
    verdict = evidence.verdict(deviation)
    return verdict, shown if verdict.outcome == "no" else None


def greedy_text(responses: Sequence[Response], target: LoadedModel) -> GreedyText:
    """Compare greedy responses with the target's argmax, given the tokens before."""
    gaps = token_gaps([r.prompt for r in responses], [r.tokens for r in responses], target)
    text, (_, tie) = GreedyText(), tie_of(target)
    for response, of_response in zip(responses, gaps, strict=True):
        text.add(response.id, of_response[:, 0], tie)
    return text
