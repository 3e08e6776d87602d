"""Plausibility checks of recorded log-probabilities: acceptance is Q / P, so their errors carry over to the replay.

Replay of drafters and verifiers on recorded responses, in one pass.

All candidates read the same responses, one window at a time. Only sums are kept; optionally, one Parquet row per token
is written.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from itertools import islice, tee
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from crossdraft import INDEPENDENT_SEQUENCES, ContractError, Sampling, UsageError, incompatible
from crossdraft.commands import writing_output
from crossdraft.framework import plugins
from crossdraft.models import Configured, configured

from ..engines.counter_definitions import CounterDefinition
from .acceptance_formulas import IID_VERIFIERS, VERIFIERS, no_formula, point_mass_survival, survival
from .aggregate import PromptGroups, Tally
from .engine_counts import EngineCounts, with_continuation
from .response import MIN_LOG_P, Response
from .step_chain import StepAcceptance, Steps, expected_steps
from .teacher_forcing.scoring import DraftScores

#: Lowest plausible mean log P per token at temperatures up to 1. The mean is minus the entropy of the sampled
#: distributions, 1 to 4 nats for language models; 6 is a perplexity of 400.
FLOOR = -6.0
#: The same at higher temperatures, where distributions may be nearly uniform over the vocabulary: e^12 is 160,000.
FLOOR_HOT = -12.0
MIN_TOKENS = 16  # fewest recorded tokens for a warning
#: Largest mean absolute difference per token from the target's log P; bfloat16 rounding changes single ones by 0.3.
MAX_DIFFERENCE = 0.25


@dataclass
class RecordedLogP:
    """Sums of recorded log-probabilities, and of the target's if it was run on the same tokens."""

    tokens: int = 0
    total: float = 0.0
    compared: int = 0
    compared_total: float = 0.0
    own: float = 0.0
    difference: float = 0.0
    hot: bool = False

    def add(self, response: Response, scores: DraftScores) -> None:
        """Add a response; those at temperature 0 or without log-probabilities are ignored."""
        sampling = response.sampling or Sampling()
        if response.log_p is None or not sampling.temperature:
            return
        recorded = np.maximum(np.asarray(response.log_p, dtype=np.float64), MIN_LOG_P)
        self.hot |= sampling.temperature > 1
        self.tokens += len(recorded)
        self.total += float(recorded.sum())
        if scores.own_log_p is not None:
            own = np.maximum(scores.own_log_p, MIN_LOG_P)
            self.compared += len(own)
            self.compared_total += float(recorded.sum())
            self.own += float(own.sum())
            self.difference += float(np.abs(recorded - own).sum())

    @property
    def warning(self) -> str | None:
        """Message if the log-probabilities are not plausible, else None."""
        if self.compared >= MIN_TOKENS and self.difference / self.compared > MAX_DIFFERENCE:
            return (
                "the recorded log-probabilities differ from the target's: "
                f"{self.compared_total / self.compared:.2f} per token instead of "
                f"{self.own / self.compared:.2f} (mean absolute difference "
                f"{self.difference / self.compared:.2f}); check the model, the sampling parameters and the engine that "
                "recorded them, and do not rely on these numbers"
            )
        mean, floor = self.total / max(1, self.tokens), FLOOR_HOT if self.hot else FLOOR
        if self.tokens >= MIN_TOKENS and mean < floor:
            return (
                f"the recorded log-probabilities are implausible: {mean:.2f} per token is below {floor:g}, the minimum "
                "for samples of a language model; check the engine that recorded them with "
                "crossdraft certify-samples, and do not rely on these numbers"
            )
        return None


WINDOW = 256  # responses per window
MARK = b"crossdraft replay"  # marker in the file's metadata, recognised by `util.output_files.check_output`
_POSITIONS = pa.schema(
    [
        ("response", pa.int64()),
        ("prompt", pa.string()),
        ("category", pa.string()),
        ("position", pa.int64()),
        ("token", pa.int64()),
        ("drafter", pa.string()),
        ("rule", pa.string()),
        ("k", pa.int64()),
        ("drafted", pa.int64()),
        ("survival", pa.list_(pa.float64())),
    ],
    metadata={"generator": MARK},
)


@dataclass
class Candidate:
    """A drafter with the verifiers and draft lengths to replay it with."""

    title: str  # name in tables
    drafter: Configured  # class and config; its gamma is at least the largest of ``gammas``
    verifiers: dict[str, tuple[int, ...]]  # name -> numbers of sequences K
    gammas: tuple[int, ...]  # draft lengths
    # yields the `DraftScores` of each response, in order
    scores: Callable[[Iterable[Response]], Iterator[DraftScores]]
    # yields the number of drafted tokens of each response, int64 [T], if it depends on the sampled tokens; None =
    # `DraftScores.lengths`
    lengths: Callable[[Iterable[Response]], Iterator[np.ndarray]] | None = None
    # computes `Steps` from acceptance; depends on the length policy
    steps: Callable[[Sequence[StepAcceptance], Sequence[int]], Steps] = expected_steps
    # results by verifier and K; ``by_segment``: those by segment of the responses, if it was requested
    tallies: dict[tuple[str, int], Tally] = field(default_factory=dict)
    by_segment: dict[tuple[str, int], Tally] = field(default_factory=dict)
    # counters of an engine by verifier and draft length, if they were requested; ``variants``: those by other
    # definitions, in the order of the request
    counts: dict[tuple[str, int], EngineCounts] = field(default_factory=dict)
    variants: dict[tuple[str, int], list[EngineCounts]] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return max(self.gammas)

    def tally(self, result: ReplayResult, verifier: str, k: int) -> Tally:
        """Return the tally of a verifier and K, created on first use."""
        return self.tallies.setdefault((verifier, k), Tally(result.groups, self.gammas, k, result.by_prompt))


@dataclass
class ReplayResult:
    """Result of a replay: counts, candidates with their tallies, and the check of recorded log P.

    ``segments``: prompts by segment, whose names take the place of categories; ``segment_tokens``: their tokens.
    """

    candidates: list[Candidate]
    groups: PromptGroups
    segments: PromptGroups = field(default_factory=PromptGroups)
    segment_tokens: Counter[str] = field(default_factory=Counter)
    responses: int = 0
    tokens: int = 0
    by_prompt: bool = False
    log_p: RecordedLogP = field(default_factory=RecordedLogP)
    definition: CounterDefinition | None = None
    variants: Sequence[CounterDefinition] = ()


def verifiers_for(
    title: str, drafter: Configured, names: Sequence[str], ks: Sequence[int], sampling: Sampling
) -> dict[str, tuple[int, ...]]:
    """Verifiers to replay a drafter with -> numbers of sequences K; ``names``, by default all that are compatible.

    Raises UsageError for an incompatible pair, and for a verifier or drafter that cannot be replayed.
    """
    cls, config = drafter
    traits = plugins.traits_of("drafters", cls, config, sampling)
    if traits.kind is None:
        raise UsageError(f"drafter '{title}' does not draft with these options, so it cannot be replayed")
    if INDEPENDENT_SEQUENCES not in traits.kind.capabilities:
        raise UsageError(
            f"drafter '{title}' drafts trees ('{traits.kind}'), which cannot be replayed; measure it with crossdraft "
            "run"
        )
    multi = traits.kind.merged_sequences
    if not names:
        # All verifiers accept a point mass alike.
        single = ("token",) if traits.point_mass else ("token", "block")
        names = IID_VERIFIERS if multi else ("greedy",) if sampling.temperature == 0 else single
    for name in names:
        if name not in VERIFIERS:
            plugins.get("verifiers", name)
            raise UsageError(no_formula(name))
        verifier, options = configured("verifiers", name)
        if reason := incompatible(title, traits, name, plugins.traits_of("verifiers", verifier, options), sampling):
            raise UsageError(reason)
    return {name: tuple(ks) if multi else (1,) for name in dict.fromkeys(names)}


def replay(
    responses: Iterable[Response],
    candidates: Sequence[Candidate],
    out: Path | None = None,
    by_prompt: bool = False,
    definition: CounterDefinition | None = None,
    variants: Sequence[CounterDefinition] = (),
    segments: Callable[[Sequence[int], Sequence[int]], Sequence[str]] | None = None,
) -> ReplayResult:
    """Replay ``candidates`` on ``responses``, which are iterated once.

    Args:
        out: Parquet file with a row for each token, drafter, verifier and K: ``drafted`` tokens, and ``survival``,
            Pr(tau >= i | the rest of the response) for i = 1, 2, .. of a step that starts there.
        by_prompt: keep acceptance by prompt, see `Tally.by_prompt`.
        definition: also compute the counters of this engine, see `Candidate.counts`.
        variants: other definitions to compute the counters by, see `Candidate.variants`.
        segments: the segment of each token of a response, from prompt and tokens, for `Candidate.by_segment`.

    Raises:
        UsageError: without responses, several sequences with ``definition``, and for errors of the sources and
            candidates.
    """
    result = ReplayResult(
        list(candidates), PromptGroups(), by_prompt=by_prompt, definition=definition, variants=variants
    )
    remaining, *others = tee(responses, 1 + 2 * len(candidates))
    if definition is not None:
        others = [
            other if item.drafter[0].remembers(item.drafter[1]) else map(with_continuation, other)
            for item in candidates
            for other in (others.pop(0), others.pop(0))
        ]
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # plug-in code may print
        sources = [_scores_and_lengths(item, *others[2 * i : 2 * i + 2]) for i, item in enumerate(candidates)]
        del others  # an unread iterator would keep all responses alive
        writer = None
        if out is not None:
            file = stack.enter_context(writing_output(out, "--out"))
            writer = stack.enter_context(parquet.ParquetWriter(file, _POSITIONS))
        while window := list(islice(remaining, WINDOW)):
            numbers = [result.groups.number(item.category, item.id) for item in window]
            labels = [] if segments is None else [np.array(segments(item.prompt, item.tokens)) for item in window]
            for of_response in labels:
                result.segment_tokens.update(of_response.tolist())
            compared: dict[int, DraftScores] = {}
            for candidate, source in zip(candidates, sources, strict=True):
                scores = list(islice(source, len(window)))
                if len(scores) != len(window):
                    raise ContractError(
                        f"drafter '{candidate.title}' returned {len(scores)} drafts for {len(window)} responses"
                    )
                _add(result, candidate, window, scores, numbers, labels, writer)
                for i, (item, _) in enumerate(scores):
                    if i not in compared or item.own_log_p is not None:
                        compared[i] = item
            for i, item in compared.items():
                result.log_p.add(window[i], item)
            result.responses += len(window)
            result.tokens += sum(len(item.tokens) for item in window)
    if not result.responses:
        raise UsageError("the sources do not contain a response to replay")
    return result


def _scores_and_lengths(
    candidate: Candidate, texts: Iterable[Response], responses_again: Iterable[Response]
) -> Iterator[tuple[DraftScores, np.ndarray]]:
    """`DraftScores` of a candidate for each response, and the number of drafted tokens at each position."""
    if candidate.lengths is None:
        del responses_again
        return ((scores, scores.lengths) for scores in candidate.scores(texts))
    return zip(candidate.scores(texts), candidate.lengths(responses_again), strict=True)


def _add(
    result: ReplayResult,
    candidate: Candidate,
    window: Sequence[Response],
    scored: Sequence[tuple[DraftScores, np.ndarray]],
    numbers: Sequence[int],
    labels: Sequence[np.ndarray],
    writer: parquet.ParquetWriter | None,
) -> None:
    scores, lengths = zip(*scored, strict=True)
    sizes = [len(response.tokens) for response in window]  # scores may cover the continuations, too
    own_lengths = [drafted[:size] for drafted, size in zip(lengths, sizes, strict=True)]
    point_mass, steps, parts = point_mass_survival(scores), {}, {}
    for verifier, ks in candidate.verifiers.items():
        if point_mass is None:
            steps, parts = {}, {}
            at_least = [survival(verifier, item, ks) for item in scores]
        else:  # all verifiers accept point masses alike, for any K
            at_least = [dict.fromkeys(ks, item) for item in point_mass]
        for k in ks:
            if result.definition is not None:
                for gamma in candidate.gammas:
                    counts = candidate.counts.setdefault((verifier, gamma), EngineCounts(result.definition, gamma))
                    others = [EngineCounts(other, gamma) for other in result.variants]
                    for each in (counts, *candidate.variants.setdefault((verifier, gamma), others)):
                        for response, values, drafted in zip(window, at_least, lengths, strict=True):
                            each.add(values[k], drafted, len(response.tokens), response.limit)
            if k not in steps:
                acceptances = [
                    StepAcceptance(values[k][: len(drafted)], drafted, response.limit)
                    for values, drafted, response in zip(at_least, own_lengths, window, strict=True)
                ]
                steps[k] = candidate.steps(acceptances, candidate.gammas)
                parts[k] = []
                for name in dict.fromkeys(name for of_response in labels for name in of_response.tolist()):
                    rows = [i for i, of_response in enumerate(labels) if (of_response == name).any()]
                    # A step is of the segment of its first token.
                    own = [replace(acceptances[i], starts=labels[i] == name) for i in rows]
                    groups = [result.segments.number(name, f"{window[i].category}: {window[i].id}") for i in rows]
                    parts[k].append((candidate.steps(own, candidate.gammas), groups))
            candidate.tally(result, verifier, k).add(steps[k], numbers)
            for part in parts[k]:
                tally = Tally(result.segments, candidate.gammas, k)
                candidate.by_segment.setdefault((verifier, k), tally).add(*part)
            if writer is not None:
                values = [item[k][:size] for item, size in zip(at_least, sizes, strict=True)]
                columns = result.responses, candidate.title, verifier, k, window, own_lengths, values
                writer.write_table(_positions(*columns))


def _positions(
    first: int,
    drafter: str,
    verifier: str,
    k: int,
    window: Sequence[Response],
    lengths: Sequence[np.ndarray],
    at_least: Sequence[np.ndarray],
) -> pa.Table:
    """The acceptance at every position of a window whose first response has the number ``first``."""
    sizes = [len(response.tokens) for response in window]
    n, depth = sum(sizes), at_least[0].shape[1]
    values = pa.array(np.concatenate(at_least).ravel())
    columns = {
        "response": np.repeat(np.arange(first, first + len(window)), sizes),
        "prompt": pa.array([response.id for response in window]).take(
            pa.array(np.repeat(np.arange(len(window)), sizes))
        ),
        "category": [response.category for response, size in zip(window, sizes, strict=True) for _ in range(size)],
        "position": np.concatenate([np.arange(size) for size in sizes]),
        "token": np.concatenate([np.asarray(response.tokens, dtype=np.int64) for response in window]),
        "drafter": [drafter] * n,
        "rule": [verifier] * n,
        "k": np.full(n, k),
        "drafted": np.concatenate(lengths),
        "survival": pa.ListArray.from_arrays(pa.array(np.arange(0, n * depth + 1, depth, dtype=np.int32)), values),
    }
    return pa.table(columns, schema=_POSITIONS)
