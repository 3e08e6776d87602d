"""The most frequent continuations of a context, as a tree or a chain."""

from __future__ import annotations

import numpy as np

from .datastore import END


def most_frequent(rows: np.ndarray, nodes: int) -> tuple[list[int], list[int]]:
    """Return the ``nodes`` most frequent prefixes of continuations, a tree: none is more frequent than its parent.

    Args:
        rows: ``[n, depth]`` in ascending order; a continuation ends with its first `END`.

    Returns:
        tokens and the indices of their parents (-1 = the root), level by level. Ties go to the shorter prefix, then to
        the smaller id.
    """
    n, depth = rows.shape
    if not n or not depth or not nodes:
        return [], []
    new = np.ones((n, depth), dtype=bool)  # True if a new prefix of this length starts in this row
    np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1, out=new[1:])
    alive = np.logical_and.accumulate(rows != END, axis=1)
    level, start = np.nonzero(new.T)
    end = np.append(start[1:], n)
    end[np.append(level[1:] != level[:-1], True)] = n
    real = alive[start, level]
    level, start, count = level[real], start[real], (end - start)[real]
    if len(count) > nodes:
        rank = count * len(count) - np.arange(len(count))  # all distinct
        chosen = np.sort(np.argpartition(-rank, nodes - 1)[:nodes])
        level, start = level[chosen], start[chosen]
    tokens = rows[start, level].tolist()
    # The parent is the last node of the previous level that starts no later.
    key = level * n + start
    parents = np.where(level > 0, np.searchsorted(key, key - n, side="right") - 1, -1)
    return tokens, parents.tolist()


def best_path(rows: np.ndarray, nodes: int) -> list[int]:
    """Follow the most frequent next token, ties by smaller id; ``rows`` as in `most_frequent`."""
    path: list[int] = []
    while len(rows) and len(path) < min(nodes, rows.shape[1]):
        column = rows[:, len(path)]
        starts = np.flatnonzero(np.append(True, column[1:] != column[:-1]))
        counts = np.diff(np.append(starts, len(column))) * (column[starts] != END)
        best = int(counts.argmax())
        if not counts[best]:
            break
        rows = rows[starts[best] : starts[best] + counts[best]]
        path.append(int(column[starts[best]]))
    return path
