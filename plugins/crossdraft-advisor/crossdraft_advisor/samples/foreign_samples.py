"""Test of an external sampler against the target: draws of an engine after given prefixes, and the decision.

A speculative engine is lossless if its output is distributed as samples of the target. Enumeration needs the engine's
code; this test needs only its output: counts of next tokens, or sequences, each token of which is a draw after the
tokens before it. The first token comes from the prefill pass, before drafting, so it is tested separately and excluded
from the verdict, unless that is requested or there are no other tokens. Statistics and decision: `sampler_verdict`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossdraft import UsageError, quoted
from crossdraft.commands import (
    LINE_BYTES,
    MOST_WIDTH,
    PROMPT_FILE_BYTES,
    describe_forbidden_char,
    parse_json,
    read_lines,
)
from crossdraft.framework.util.input_files import BROKEN

from .equivalence import BATCH_ELEMENTS
from .sampler_verdict import Evidence, PrefixDraws, Verdict
from .token_tree import TokenTree

#: Distributions ``[n, V]``, and (index of the prefix, node of its tree) of each.
Distributions = Iterable[tuple[Tensor, list[tuple[int, int]]]]


@dataclass
class Draws:
    """Draws after one prefix."""

    place: str  # file and line
    prefix: str | list[int]  # text, or token ids; empty if the file contains the distribution
    counts: Counter[int] = field(default_factory=Counter)  # next token -> number of draws
    sequences: list[list[int]] = field(default_factory=list)  # drawn token ids, one list per draw
    probs: np.ndarray | None = None  # float64 [V], next-token distribution from the file, or None

    def tree(self) -> TokenTree:
        tree = TokenTree()
        for token, n in self.counts.items():
            tree.add([token], n)
        for sequence in self.sequences:
            tree.add(sequence)
        return tree

    @property
    def largest(self) -> int:
        """Largest drawn token id."""
        return max(max(self.counts, default=0), max(map(max, self.sequences), default=0))


@dataclass(frozen=True)
class Decision:
    """The verdict, and that about first tokens of sequences if they are excluded from it."""

    verdict: Verdict
    first_tokens: Verdict | None
    has_next_tokens: bool


def read_draws(path: Path) -> list[Draws]:
    """Read a JSONL file: ``prompt`` (text) or ``prefix`` (ids) or ``probs``, with ``counts`` or ``samples``.

    ``counts`` maps ids to numbers; ``samples`` is a list of ids (draws of the next token) or of lists of ids
    (sequences); ``probs`` lists the probability of every id, instead of a prefix. Lines with equal prefixes are pooled.

    Raises UsageError: with file, line and key.
    """
    draws_by_key: dict[tuple[str, str | bytes], Draws] = {}
    for number, line in read_lines(path, PROMPT_FILE_BYTES, LINE_BYTES):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        row = parse_json(line, path, line=number)
        if not isinstance(row, dict):
            raise UsageError(f"{place}: a line must be a JSON object")
        if unknown := sorted(set(row) - {"prompt", "prefix", "probs", "counts", "samples"}):
            raise UsageError(
                f"{place}: unknown key {quoted(unknown[0])}; allowed keys: prompt, prefix, probs, counts, samples"
            )
        prefix_keys = [key for key in ("prompt", "prefix", "probs") if key in row]
        if len(prefix_keys) != 1 or ("counts" in row) == ("samples" in row):
            raise UsageError(f"{place}: give one of prompt, prefix and probs, and one of counts and samples")
        draws = _prefix(place, prefix_keys[0], row[prefix_keys[0]])
        key = (prefix_keys[0], draws.probs.tobytes() if draws.probs is not None else repr(draws.prefix))
        draws = draws_by_key.setdefault(key, draws)
        if "counts" in row:
            _counts(place, row["counts"], draws)
        else:
            _samples(place, row["samples"], draws)
    if not draws_by_key:
        raise UsageError(f"{path} is empty; it needs one JSON object per line")
    for draws in draws_by_key.values():
        if draws.probs is not None and draws.sequences:
            raise UsageError(f"{draws.place}: samples with probs must be single tokens, not sequences")
        if draws.probs is not None:
            check_vocabulary(draws, len(draws.probs))
    return list(draws_by_key.values())


def check_vocabulary(draws: Draws, size: int) -> None:
    """Raise UsageError for a drawn token beyond a vocabulary."""
    if draws.largest >= size:
        raise UsageError(f"{draws.place}: token {draws.largest} is outside of the vocabulary of {size}")


def _prefix(place: str, key: str, value: Any) -> Draws:
    if key == "prompt":
        if not isinstance(value, str) or not value:
            raise UsageError(f"{place}: prompt must be a text")
        if reason := describe_forbidden_char(value, BROKEN):
            raise UsageError(f"{place}: prompt contains {reason}, which cannot be tokenized; remove it")
        return Draws(place, value)
    if key == "prefix":
        if not isinstance(value, list) or not value:
            raise UsageError(f"{place}: prefix must be a non-empty list of token ids")
        return Draws(place, [_token_id(place, "prefix", token) for token in value])
    error = UsageError(f"{place}: probs must be a list of at least two probabilities that sum to 1")
    if not isinstance(value, list) or len(value) < 2 or not set(map(type, value)) <= {int, float}:
        raise error
    try:
        probs = np.array(value, dtype=np.float64)
    except OverflowError:
        raise error from None
    total = probs.sum()
    if not (probs >= 0).all() or not abs(total - 1) <= 1e-3:
        raise error
    return Draws(place, [], probs=probs / total)


def _token_id(place: str, key: str, value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:  # keys of JSON objects
        value = int(value)
    if type(value) is not int or not 0 <= value < MOST_WIDTH:
        raise UsageError(f"{place}: {key} contains {quoted(value)}, which is not a valid token id")
    return value


def _counts(place: str, counts: Any, draws: Draws) -> None:
    if not isinstance(counts, dict) or not counts:
        raise UsageError(f"{place}: counts must map token ids to numbers of draws")
    for token, n in counts.items():
        if type(n) is not int or not 0 <= n < 2**53:
            raise UsageError(
                f"{place}: counts has {quoted(n)} for token {quoted(token)}, which is not a valid number of draws"
            )
        draws.counts[_token_id(place, "counts", token)] += n
    if not draws.counts.total():
        raise UsageError(f"{place}: counts must have at least one draw")


def _samples(place: str, samples: Any, draws: Draws) -> None:
    if not isinstance(samples, list) or not samples:
        raise UsageError(f"{place}: samples must be a list of token ids, or of lists of token ids")
    for sample in samples:
        if isinstance(sample, list):
            if not sample:
                raise UsageError(f"{place}: samples contains an empty sequence")
            draws.sequences.append([_token_id(place, "samples", token) for token in sample])
        else:
            draws.counts[_token_id(place, "samples", sample)] += 1


def file_distributions(draws_list: Sequence[Draws]) -> Distributions:
    """Distributions of a file whose lines all contain ``probs``, batched by vocabulary size."""
    by_size: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for i, draws in enumerate(draws_list):
        assert draws.probs is not None
        by_size[len(draws.probs)].append((i, draws.probs))
    for size, rows_of_size in by_size.items():
        step = max(1, BATCH_ELEMENTS // size)
        for start in range(0, len(rows_of_size), step):
            part = rows_of_size[start : start + step]
            yield torch.from_numpy(np.stack([probs for _, probs in part])), [(i, 0) for i, _ in part]


def decide(
    draws_list: Sequence[Draws],
    trees: Sequence[TokenTree],
    distributions: Distributions,
    *,
    deviation: float,
    seed: int = 0,
    first_tokens: bool = False,
    progress: Callable[[int], Any] = lambda done: None,
) -> Decision:
    """Decide whether draws come from the target: ``distributions`` of it after every node of the trees of the draws.

    ``seed``: of the random positions within a token's share; ``first_tokens``: include those of sequences in the
    verdict; ``progress``: called with the number of distributions done. Raises UsageError without draws.
    """
    include_first = first_tokens or not any(len(sequence) > 1 for draws in draws_list for sequence in draws.sequences)
    tested, first_evidence = Evidence(seed), Evidence(seed)
    firsts = [Counter(sequence[0] for sequence in draws.sequences) for draws in draws_list]
    for probs, places in distributions:
        rows: list[list[PrefixDraws]] = [[], []]
        chosen: list[list[int]] = [[], []]
        for row, (i, node) in enumerate(places):
            counts = trees[i].counts[node]
            if node == 0 and not include_first:
                _append(rows[1], chosen[1], row, draws_list[i].place, firsts[i])
                counts = draws_list[i].counts
            _append(rows[0], chosen[0], row, draws_list[i].place, counts)
        for evidence, draws, selected in zip((tested, first_evidence), rows, chosen, strict=True):
            if draws:
                evidence.add(probs if len(selected) == len(probs) else probs[selected], draws)
        progress(len(places))
    return Decision(
        tested.verdict(deviation),
        first_evidence.verdict(deviation) if first_evidence.draws else None,
        any(draws.probs is None and draws.counts for draws in draws_list)
        or (include_first and bool(sum(map(len, firsts)))),
    )


def _append(rows: list[PrefixDraws], chosen: list[int], row: int, place: str, counts: Counter[int]) -> None:
    if counts.total():
        rows.append(PrefixDraws(place, list(counts.keys()), list(counts.values())))
        chosen.append(row)
