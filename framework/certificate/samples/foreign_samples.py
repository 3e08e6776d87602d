"""Somebody else's sampler against the target: draws of an engine after given prefixes, and the decision about them.

A speculative engine is lossless if what it emits is distributed as the target's own samples. Enumeration needs its
code; this needs only what came out of it: counts of next tokens, and sequences. Each token of a sequence is a draw
after the tokens before it. The first one comes from an engine's prefill pass, before anything is drafted, so it is
tested by itself and has no part in the verdict, unless that is requested or no other token is there.
The statistics and the decision: `sampler_verdict`.
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

from ...errors import UsageError, quoted
from ...util.input_files import BROKEN, flaw, parse_json, read_lines
from ...util.limits import LINE_BYTES, MOST_WIDTH, PROMPT_FILE_BYTES
from .equivalence import AT_ONCE
from .sampler_verdict import Evidence, PrefixDraws, Verdict
from .token_tree import TokenTree

#: Distributions ``[n, V]``, and (index of the prefix, node of its tree) of each.
Distributions = Iterable[tuple[Tensor, list[tuple[int, int]]]]


@dataclass
class Draws:
    """Draws after one prefix.

    Attributes:
        where: file and line.
        prefix: text, or token ids; empty if the distribution is given.
        counts: how often each token came next.
        sequences: drawn token ids, one list a draw.
        law: float64 [V], the distribution of the next token, if the file gives it.
    """

    where: str
    prefix: str | list[int]
    counts: Counter[int] = field(default_factory=Counter)
    sequences: list[list[int]] = field(default_factory=list)
    law: np.ndarray | None = None

    def tree(self) -> TokenTree:
        """All drawn tokens."""
        tree = TokenTree()
        for token, n in self.counts.items():
            tree.add([token], n)
        for sequence in self.sequences:
            tree.add(sequence)
        return tree

    @property
    def largest(self) -> int:
        """The largest drawn token id."""
        return max(max(self.counts, default=0), max(map(max, self.sequences), default=0))


@dataclass(frozen=True)
class Decision:
    """The verdict, and that about the first tokens of sequences if they have no part in it."""

    verdict: Verdict
    first_tokens: Verdict | None
    has_next_tokens: bool


# -- reading ---------------------------------------------------------------------------------------------------


def read_draws(path: Path) -> list[Draws]:
    """Read a JSONL file: ``prompt`` (text) or ``prefix`` (ids) or ``law``, with ``counts`` or ``samples``.

    ``counts`` maps ids to numbers; ``samples`` is a list of ids (draws of the next token) or of lists of ids
    (sequences); ``law`` lists the probability of every id, and takes no prefix. Lines of one prefix are draws of one
    law.

    Raises:
        UsageError: with file, line and key.
    """
    found: dict[tuple[str, str | bytes], Draws] = {}
    for number, line in read_lines(path, PROMPT_FILE_BYTES, LINE_BYTES):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = parse_json(line, path, line=number)
        if not isinstance(row, dict):
            raise UsageError(f"{where}: a line must hold a JSON object")
        if unknown := sorted(set(row) - {"prompt", "prefix", "law", "counts", "samples"}):
            raise UsageError(
                f"{where}: unknown key {quoted(unknown[0])}; there are prompt, prefix, law, counts, samples"
            )
        given = [key for key in ("prompt", "prefix", "law") if key in row]
        if len(given) != 1 or ("counts" in row) == ("samples" in row):
            raise UsageError(f"{where}: give one of prompt, prefix and law, and one of counts and samples")
        draws = _prefix(where, given[0], row[given[0]])
        key = (given[0], draws.law.tobytes() if draws.law is not None else repr(draws.prefix))
        draws = found.setdefault(key, draws)
        if "counts" in row:
            _counts(where, row["counts"], draws)
        else:
            _samples(where, row["samples"], draws)
    if not found:
        raise UsageError(f"{path} is empty; it needs one JSON object a line")
    for draws in found.values():
        if draws.law is not None and draws.sequences:
            raise UsageError(f"{draws.where}: samples of a given law must be single tokens, not sequences")
        if draws.law is not None:
            check_vocabulary(draws, len(draws.law))
    return list(found.values())


def check_vocabulary(draws: Draws, size: int) -> None:
    """Raise UsageError for a drawn token beyond a vocabulary."""
    if draws.largest >= size:
        raise UsageError(f"{draws.where}: token {draws.largest} is beyond the vocabulary, which has {size}")


def _prefix(where: str, key: str, value: Any) -> Draws:
    if key == "prompt":
        if not isinstance(value, str) or not value:
            raise UsageError(f"{where}: prompt must be a text")
        if reason := flaw(value, BROKEN):
            raise UsageError(f"{where}: prompt holds {reason}, which no tokenizer reads; leave it out")
        return Draws(where, value)
    if key == "prefix":
        if not isinstance(value, list) or not value:
            raise UsageError(f"{where}: prefix must be a list of token ids, with at least one")
        return Draws(where, [_id(where, "prefix", one) for one in value])
    refused = UsageError(f"{where}: law must be a list of at least two probabilities that sum to 1")
    if not isinstance(value, list) or len(value) < 2 or not set(map(type, value)) <= {int, float}:
        raise refused
    try:
        law = np.array(value, dtype=np.float64)
    except OverflowError:
        raise refused from None
    total = law.sum()
    if not (law >= 0).all() or not abs(total - 1) <= 1e-3:
        raise refused
    return Draws(where, [], law=law / total)


def _id(where: str, key: str, value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:  # keys of JSON objects
        value = int(value)
    if type(value) is not int or not 0 <= value < MOST_WIDTH:
        raise UsageError(f"{where}: {key} holds {quoted(value)}, which is no token id")
    return value


def _counts(where: str, counts: Any, draws: Draws) -> None:
    if not isinstance(counts, dict) or not counts:
        raise UsageError(f"{where}: counts must map token ids to how often they came")
    for token, n in counts.items():
        if type(n) is not int or not 0 <= n < 2**53:
            raise UsageError(f"{where}: counts says {quoted(n)} of token {quoted(token)}, which is no number of draws")
        draws.counts[_id(where, "counts", token)] += n
    if not draws.counts.total():
        raise UsageError(f"{where}: counts has no draws")


def _samples(where: str, samples: Any, draws: Draws) -> None:
    if not isinstance(samples, list) or not samples:
        raise UsageError(f"{where}: samples must be a list of token ids, or of lists of them")
    for sample in samples:
        if isinstance(sample, list):
            if not sample:
                raise UsageError(f"{where}: samples holds a sequence without tokens")
            draws.sequences.append([_id(where, "samples", token) for token in sample])
        else:
            draws.counts[_id(where, "samples", sample)] += 1


# -- testing ---------------------------------------------------------------------------------------------------


def given_distributions(every: Sequence[Draws]) -> Distributions:
    """Distributions of a file whose lines all give their own; equally long ones together."""
    by_size: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for i, draws in enumerate(every):
        assert draws.law is not None
        by_size[len(draws.law)].append((i, draws.law))
    for size, laws in by_size.items():
        step = max(1, AT_ONCE // size)
        for start in range(0, len(laws), step):
            part = laws[start : start + step]
            yield torch.from_numpy(np.stack([law for _, law in part])), [(i, 0) for i, _ in part]


def judge(
    every: Sequence[Draws],
    trees: Sequence[TokenTree],
    distributions: Distributions,
    *,
    deviation: float,
    seed: int = 0,
    first_tokens: bool = False,
    progress: Callable[[int], Any] = lambda done: None,
) -> Decision:
    """Decide about draws.

    Args:
        trees: of each of ``every``, see `Draws.tree`.
        distributions: of the target after every node of them.
        deviation: the TV in question.
        seed: of the places within a token's share.
        first_tokens: first tokens of sequences have a part in the verdict.
        progress: called with the number of distributions done.

    Raises:
        UsageError: there are no draws to test.
    """
    together = first_tokens or not any(len(sequence) > 1 for draws in every for sequence in draws.sequences)
    tested, apart = Evidence(seed), Evidence(seed)
    firsts = [Counter(sequence[0] for sequence in draws.sequences) for draws in every]
    for probs, places in distributions:
        rows: list[list[PrefixDraws]] = [[], []]
        chosen: list[list[int]] = [[], []]
        for row, (i, node) in enumerate(places):
            counts = trees[i].counts[node]
            if node == 0 and not together:
                _put(rows[1], chosen[1], row, every[i].where, firsts[i])
                counts = every[i].counts
            _put(rows[0], chosen[0], row, every[i].where, counts)
        for evidence, draws, which in zip((tested, apart), rows, chosen, strict=True):
            if draws:
                evidence.add(probs if len(which) == len(probs) else probs[which], draws)
        progress(len(places))
    return Decision(
        tested.verdict(deviation),
        apart.verdict(deviation) if apart.draws else None,
        any(draws.law is None and draws.counts for draws in every) or (together and bool(sum(map(len, firsts)))),
    )


def _put(rows: list[PrefixDraws], chosen: list[int], row: int, where: str, counts: Counter[int]) -> None:
    if counts.total():
        rows.append(PrefixDraws(where, list(counts.keys()), list(counts.values())))
        chosen.append(row)
