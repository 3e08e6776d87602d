"""A datastore: the tokens of a corpus and their suffix array, memory-mapped NumPy files, and a manifest.

The suffix array lists all positions of the corpus, sorted by their suffixes. The occurrences of a context are adjacent,
found by bisection, and sorted by their continuations.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crossdraft import UsageError, file_sha256

FORMAT = "crossdraft-rest 1"
MANIFEST, TOKENS, SUFFIXES = "manifest.json", "tokens.npy", "suffixes.npy"
#: Separator of documents, not a token: contexts and continuations end there.
END = -1
#: Maximum size of a manifest in bytes, and maximum size of a vocabulary.
_MANIFEST_BYTES, MOST_IDS = 2**20, 2**31 - 1


def tokenizer_sha256(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary, every token with its id."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def build(
    documents: Iterable[Sequence[int]], out: Path, *, tokenizer: str = "", about: Mapping[str, Any] | None = None
) -> int:
    """Write a datastore of ``documents``, each a list of token ids, to the new directory ``out``.

    Args:
        tokenizer: digest of the tokenizer of the ids, see `tokenizer_sha256`; empty = unknown.
        about: further entries for the manifest.

    Returns:
        the number of tokens, including separators. Building takes about 40 bytes per token.

    Raises:
        UsageError: no tokens, an invalid id, or the directory exists or cannot be written.
    """
    from pydivsufsort import divsufsort

    if out.exists():
        raise UsageError(f"{out} exists, and a datastore is never changed; give another --out, or delete it first")
    parts, end = [], np.array([END])
    for document in documents:
        if len(document):
            parts += [np.asarray(document), end]
    if not parts:
        raise UsageError("the corpus holds no tokens")
    ids = np.concatenate(parts)
    valid = ids.dtype.kind == "i" and ids.min() == END and ids.max() < MOST_IDS
    if not valid or (ids == END).sum() * 2 != len(parts):
        raise UsageError(f"token ids must be whole numbers from 0 to {MOST_IDS - 1}")
    tokens = ids.astype(np.int32)
    suffixes = np.asarray(divsufsort(tokens))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as directory:
            temporary = Path(directory) / "whole"
            temporary.mkdir()
            np.save(temporary / TOKENS, tokens, allow_pickle=False)
            np.save(temporary / SUFFIXES, suffixes, allow_pickle=False)
            manifest = {
                "format": FORMAT,
                "tokens": len(tokens),
                "ids": int(tokens.max()) + 1,
                "tokenizer": tokenizer,
                "sha256": {name: file_sha256(temporary / name) for name in (TOKENS, SUFFIXES)},
                "about": dict(about or {}),
            }
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            os.rename(temporary, out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from None
    return len(tokens)


@dataclass(frozen=True)
class Datastore:
    """An open datastore.

    Attributes:
        tokens: int32 ``[N]``, the concatenated documents, each followed by `END`.
        suffixes: int32 or int64 ``[N]``, the suffix array.
        ids: one more than the largest token id.
        tokenizer: digest of the tokenizer, empty if unknown.
    """

    tokens: np.ndarray
    suffixes: np.ndarray
    ids: int
    tokenizer: str

    @classmethod
    def open(cls, path: Path) -> Datastore:
        """Map the datastore of a directory; its files are read once, for their digests.

        Raises:
            UsageError: it does not exist, is damaged, or has another format.
        """
        manifest = _manifest(path)
        n, ids, tokenizer, digests = (manifest.get(key) for key in ("tokens", "ids", "tokenizer", "sha256"))
        if type(n) is not int or type(ids) is not int or n < 1 or not 0 < ids <= MOST_IDS:
            raise _damaged(path, MANIFEST, "it lacks a key, or one has a wrong value")
        if not isinstance(tokenizer, str) or not isinstance(digests, dict):
            raise _damaged(path, MANIFEST, "it lacks a key, or one has a wrong value")
        arrays = []
        for name, kinds in ((TOKENS, (np.int32,)), (SUFFIXES, (np.int32, np.int64))):
            file = path / name
            try:
                array = np.load(file, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError, SyntaxError) as error:
                raise _damaged(path, name, str(error).partition("\n")[0]) from None
            if not isinstance(array, np.ndarray) or array.shape != (n,) or array.dtype not in kinds:
                raise _damaged(path, name, f"it does not hold {n} numbers of the right kind")
            if file_sha256(file) != digests.get(name):
                raise _damaged(path, name, "its content is not what was written (the SHA-256 differs)")
            arrays.append(np.asarray(array))  # a plain array on the same pages is faster to index
        return cls(*arrays, ids=ids, tokenizer=tokenizer)

    def find(self, tail: Sequence[int], shortest: int) -> tuple[int, range]:
        """Find the longest suffix of ``tail``, of at least ``shortest`` tokens, that occurs.

        Returns:
            its length, 0 if none occurs, and the range of its occurrences in `suffixes`.
        """
        length, first = 0, 0
        low, high = shortest, len(tail)
        while low <= high:  # if a suffix does not occur, no longer one does
            size = (low + high) // 2
            pattern = list(tail[len(tail) - size :])
            rank = bisect_left(range(len(self.suffixes)), pattern, key=lambda i, size=size: self._prefix(i, size))
            if rank < len(self.suffixes) and self._prefix(rank, size) == pattern:
                length, first, low = size, rank, size + 1
            else:
                high = size - 1
        if not length:
            return 0, range(0)
        pattern = list(tail[len(tail) - length :])
        ranks = range(len(self.suffixes))
        return length, range(first, bisect_right(ranks, pattern, lo=first, key=lambda i: self._prefix(i, length)))

    def _prefix(self, i: int, size: int) -> list[int]:
        start = int(self.suffixes[i])
        return self.tokens[start : start + size].tolist()

    def continuations(self, size: int, ranks: range, maximum: int, depth: int) -> np.ndarray:
        """int32 ``[n, depth]``: sorted continuations of at most ``maximum`` of the occurrences that `find` returned.

        More occurrences are sampled at equal distances. `END` marks the end of a document.
        """
        n = min(len(ranks), maximum)
        chosen = ranks.start + np.arange(n) * len(ranks) // n
        index = self.suffixes[chosen].astype(np.int64)[:, None] + size + np.arange(depth)
        return np.where(index < len(self.tokens), self.tokens[np.minimum(index, len(self.tokens) - 1)], END)


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        if file.stat().st_size > _MANIFEST_BYTES:
            raise _damaged(path, MANIFEST, f"it is larger than {_MANIFEST_BYTES} bytes")
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path} is not a datastore: {MANIFEST}: {error.strerror}; build one with python -m crossdraft_rest build"
        ) from None
    except (ValueError, RecursionError):
        raise _damaged(path, MANIFEST, "it is not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _damaged(path, MANIFEST, f"its format is not {FORMAT!r}")
    return manifest


def _damaged(path: Path, name: str, why: str) -> UsageError:
    return UsageError(f"the datastore {path} is damaged: {name}: {why}; build it again")
