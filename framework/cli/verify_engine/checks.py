"""Checks of an engine's responses against the target and the drafter, without the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...certificate.greedy_text import GreedyText, positions, tie_of, token_gaps
from ...contracts.sampling import Sampling

if TYPE_CHECKING:
    from ...certificate.samples.sampler_verdict import Verdict
    from ...contracts.models import LoadedModel
    from ...recipe.recipe import CellConfig
    from ...replay.response import Response
    from ...replay.served_steps import ServedSteps
    from ...runs.records import CellResult

#: Verdicts about steps are at this level.
LEVEL = 1e-3


@dataclass
class CellCheck:
    """Results of the checks of one cell; None for one that does not apply.

    Attributes:
        draws_to_show: if the check of the distribution failed, the number of draws after which the difference showed.
    """

    config: CellConfig
    steps: ServedSteps | None = None
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
        return "yes" if self.distribution is None else self.distribution.outcome


def responses_of(cell: Path, config: CellConfig) -> list[Response]:
    """Responses of a cell on disk."""
    from ...replay.responses import Reader

    return list(Reader(target=config.target, sampling=config.sampling).read([str(cell)]))


def check_cell(
    result: CellResult, cell: Path, target: LoadedModel, *, deviation: float, seed: int, trust: Iterable[str]
) -> CellCheck:
    """Run all checks of a finished cell.

    Args:
        cell: its directory.
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
        check.steps = served_steps(result, responses, trust)
    return check


def served_steps(result: CellResult, responses: Sequence[Response], trust: Iterable[str]) -> ServedSteps:
    """Compare the steps of a cell with replay. The first token of a response comes from the engine's prefill."""
    from ...recipe.recipe import Strategy
    from ...replay.acceptance_formulas import survival
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
    drafter = Strategy.model_validate({"name": config.drafter.name, **config.drafter.config})
    (candidate,) = candidates_of(
        [drafter.model_dump_json()],
        [config.verifier.name],
        [result.metrics.depth if result.metrics else 1],
        sampling=config.sampling,
        target=config.target,
        dtype=config.dtype,
        trust_remote_code=set(trust),
    )
    (verifier,) = candidate.verifiers
    turns: dict[str, int] = defaultdict(int)
    steps = ServedSteps()
    for response, scores in zip(later, candidate.scores(later), strict=True):
        turn = turns[response.id]
        turns[response.id] += 1
        steps.add(response.id, records[response.id, turn], survival(verifier, scores)[1])
    return steps


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
