"""Replay: what drafters and rules would have made of recorded responses, in one pass over them.

Candidates with their rules go along the same responses side by side, a window of them at a time; nothing but sums is
kept, and a line of Parquet for every token where they are asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from itertools import islice, tee
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from .. import plugins
from ..api.build import Configured, configured
from ..contracts.draft_kind import INDEPENDENT_SEQUENCES
from ..contracts.sampling import Sampling
from ..contracts.verifier import incompatible
from ..errors import ContractError, UsageError
from ..util.output_files import writing_output
from .acceptance_formulas import RULES, SEQUENCES, certain, no_identity, survival
from .aggregate import Pieces, Tally
from .recorded_logprobs import RecordedLogP
from .response import Response
from .step_chain import Acceptance, Steps, expected
from .teacher_forcing.forced_draft import Forced

#: Responses that are added up together.
WINDOW = 256
#: In the file's metadata: `util.output_files.check_output` recognises it by that.
MARK = b"crossdraft replay"
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
    """A drafter with the rules and draft lengths that it is replayed with.

    Attributes:
        title: what tables call it.
        drafter: class and config; its own gamma is at least the largest of ``gammas``.
        rules: names, and for each the numbers of sequences K. Rules of a point mass accept alike and share a tally.
        gammas: draft lengths.
        forced: gives its `Forced` for each of some texts, in order; asks for them as it needs them.
        drafted: the same of how many tokens it drafts, int64 [T], where that hangs on what it draws; None = as many as
            `Forced` says.
        steps: expectations over steps from what is accepted of each; another policy of lengths has its own.
        tallies: what came out, by rule and K.
    """

    title: str
    drafter: Configured
    rules: dict[str, tuple[int, ...]]
    gammas: tuple[int, ...]
    forced: Callable[[Iterable[Response]], Iterator[Forced]]
    drafted: Callable[[Iterable[Response]], Iterator[np.ndarray]] | None = None
    steps: Callable[[Sequence[Acceptance], Sequence[int]], Steps] = expected
    tallies: dict[tuple[str, int], Tally] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return max(self.gammas)

    def tally(self, found: Replayed, rule: str, k: int) -> Tally:
        """That of a rule and K, made when it is first asked for."""
        return self.tallies.setdefault((rule, k), Tally(found.pieces, self.gammas, k, found.by_prompt))


@dataclass
class Replayed:
    """Result of a replay: counts, candidates with their tallies, and the plausibility of recorded log P."""

    candidates: list[Candidate]
    pieces: Pieces
    responses: int = 0
    tokens: int = 0
    by_prompt: bool = False
    log_p: RecordedLogP = field(default_factory=RecordedLogP)


def rules_for(
    title: str, drafter: Configured, names: Sequence[str], ks: Sequence[int], sampling: Sampling
) -> dict[str, tuple[int, ...]]:
    """The rules to replay a drafter with, and for each the numbers of sequences: ``names``, or those that fit.

    Raises UsageError for a pair that cannot run, and for a rule or a draft without an identity.
    """
    cls, config = drafter
    traits = plugins.traits_of("drafters", cls, config, sampling)
    if traits.kind is None:
        raise UsageError(f"drafter '{title}' never drafts; there is nothing to replay")
    if INDEPENDENT_SEQUENCES not in traits.kind.capabilities:
        raise UsageError(
            f"drafter '{title}' drafts trees ('{traits.kind}'), of which no identity is known; measure it with "
            "crossdraft run"
        )
    several = traits.kind.merged_sequences
    if not names:
        # Of a point mass every rule accepts the same.
        single = ("token",) if traits.point_mass else ("token", "block")
        names = SEQUENCES if several else ("greedy",) if sampling.temperature == 0 else single
    for name in names:
        if name not in RULES:
            plugins.get("verifiers", name)
            raise UsageError(no_identity(name))
        verifier, options = configured("verifiers", name)
        if reason := incompatible(title, traits, name, plugins.traits_of("verifiers", verifier, options), sampling):
            raise UsageError(reason)
    return {name: tuple(ks) if several else (1,) for name in dict.fromkeys(names)}


def replay(
    responses: Iterable[Response], candidates: Sequence[Candidate], out: Path | None = None, by_prompt: bool = False
) -> Replayed:
    """Replay ``candidates`` along ``responses``, which are asked for once.

    Args:
        out: write a line for every token, drafter, rule and K there (Parquet): ``drafted`` tokens, and ``survival``,
            Pr(tau >= i | the rest of the response) for i = 1, 2, .. of a step that starts there.
        by_prompt: keep acceptance by prompt, too, see `Tally.by_prompt`.

    Raises:
        UsageError: no responses; what the sources and the candidates raise.
    """
    found = Replayed(list(candidates), Pieces(), by_prompt=by_prompt)
    mine, *others = tee(responses, 1 + 2 * len(candidates))
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # a plug-in's code may print
        sources = [_of(one, *others[2 * i : 2 * i + 2]) for i, one in enumerate(candidates)]
        del others  # what nobody reads would be kept
        writer = None
        if out is not None:
            file = stack.enter_context(writing_output(out, "--out"))
            writer = _Positions(stack.enter_context(parquet.ParquetWriter(file, _POSITIONS)))
        while window := list(islice(mine, WINDOW)):
            numbers = [found.pieces.number(one.category, one.id) for one in window]
            compared: dict[int, Forced] = {}
            for candidate, source in zip(candidates, sources, strict=True):
                forced = list(islice(source, len(window)))
                if len(forced) != len(window):
                    raise ContractError(f"drafter '{candidate.title}' gave fewer drafts than there are responses")
                _add(found, candidate, window, forced, numbers, writer)
                for i, (one, _) in enumerate(forced):
                    if i not in compared or one.own_log_p is not None:
                        compared[i] = one
            for i, one in compared.items():
                found.log_p.add(window[i], one)
            found.responses += len(window)
            found.tokens += sum(len(one.tokens) for one in window)
    if not found.responses:
        raise UsageError("there is no response to replay")
    return found


def _of(
    candidate: Candidate, texts: Iterable[Response], again: Iterable[Response]
) -> Iterator[tuple[Forced, np.ndarray]]:
    """What a candidate would draft along each text if it drew the text, and how many tokens it drafts."""
    if candidate.drafted is None:
        del again
        return ((one, one.lengths) for one in candidate.forced(texts))
    return zip(candidate.forced(texts), candidate.drafted(again), strict=True)


def _add(
    found: Replayed,
    candidate: Candidate,
    window: Sequence[Response],
    replayed: Sequence[tuple[Forced, np.ndarray]],
    numbers: Sequence[int],
    writer: _Positions | None,
) -> None:
    forced, lengths = zip(*replayed, strict=True)
    point_mass, steps = certain(forced), {}
    for rule, ks in candidate.rules.items():
        if point_mass is None:
            steps = {}
            at_least = [survival(rule, one, ks) for one in forced]
        else:  # every rule accepts the same of it, whatever K is
            at_least = [dict.fromkeys(ks, one) for one in point_mass]
        for k in ks:
            if k not in steps:
                given = [
                    Acceptance(values[k], drafted, response.limit)
                    for values, drafted, response in zip(at_least, lengths, window, strict=True)
                ]
                steps[k] = candidate.steps(given, candidate.gammas)
            candidate.tally(found, rule, k).add(steps[k], numbers)
            if writer is not None:
                writer.add(found.responses, candidate.title, rule, k, window, lengths, [one[k] for one in at_least])


class _Positions:
    """Writes the numbers of every position to a Parquet file."""

    def __init__(self, writer: parquet.ParquetWriter):
        self._writer = writer

    def add(
        self,
        first: int,
        drafter: str,
        rule: str,
        k: int,
        window: Sequence[Response],
        lengths: Sequence[np.ndarray],
        at_least: Sequence[np.ndarray],
    ) -> None:
        sizes = [len(one.tokens) for one in window]
        n, depth = sum(sizes), at_least[0].shape[1]
        values = pa.array(np.concatenate(at_least).ravel())
        columns = {
            "response": np.repeat(np.arange(first, first + len(window)), sizes),
            "prompt": pa.array([one.id for one in window]).take(pa.array(np.repeat(np.arange(len(window)), sizes))),
            "category": [one.category for one, size in zip(window, sizes, strict=True) for _ in range(size)],
            "position": np.concatenate([np.arange(size) for size in sizes]),
            "token": np.concatenate([np.asarray(one.tokens, dtype=np.int64) for one in window]),
            "drafter": [drafter] * n,
            "rule": [rule] * n,
            "k": np.full(n, k),
            "drafted": np.concatenate(lengths),
            "survival": pa.ListArray.from_arrays(pa.array(np.arange(0, n * depth + 1, depth, dtype=np.int32)), values),
        }
        self._writer.write_table(pa.table(columns, schema=_POSITIONS))
