"""A datastore: the tokens of a corpus and their suffix array, NumPy files that are mapped, not read, and a manifest.

The suffix array lists all places of the corpus in the order of what follows them. So the places where a context occurs
stand side by side in it, found by bisection, and what followed the context stands there in order, too.
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
#: What stands between two documents: no token, so no context goes across it, and nothing is drafted after it.
END = -1
#: Bytes of a manifest, and ids of a vocabulary, at most.
_MANIFEST_BYTES, MOST_IDS = 2**20, 2**31 - 1


def tokenizer_sha256(tokenizer: Any) -> str:
    """The SHA-256 of a tokenizer's vocabulary: every token with its id."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def build(
    documents: Iterable[Sequence[int]], out: Path, *, tokenizer: str = "", about: Mapping[str, Any] | None = None
) -> int:
    """Write the datastore of some documents, each a list of token ids, into a directory that is not there yet.

    Args:
        tokenizer: digest of the tokenizer that made the ids, see `tokenizer_sha256`; empty: nobody knows.
        about: further facts for the manifest, for people.

    Returns:
        how many tokens it holds, ends of documents included. While it is built they take about 40 bytes each.

    Raises:
        UsageError: no token, an id that is none, or a directory that cannot be written.
    """
    from pydivsufsort import divsufsort

    if out.exists():
        raise UsageError(f"{out} exists; a datastore is never changed, so give another --out, or delete it first")
    parts, end = [], np.array([END])
    for document in documents:
        if len(document):
            parts += [np.asarray(document), end]
    if not parts:
        raise UsageError("the corpus holds no tokens")
    every = np.concatenate(parts)
    whole = every.dtype.kind == "i" and every.min() == END and every.max() < MOST_IDS
    if not whole or (every == END).sum() * 2 != len(parts):
        raise UsageError(f"token ids must be whole numbers from 0 to {MOST_IDS - 1}")
    tokens = every.astype(np.int32)
    suffixes = np.asarray(divsufsort(tokens))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as directory:
            aside = Path(directory) / "whole"
            aside.mkdir()
            np.save(aside / TOKENS, tokens, allow_pickle=False)
            np.save(aside / SUFFIXES, suffixes, allow_pickle=False)
            manifest = {
                "format": FORMAT,
                "tokens": len(tokens),
                "ids": int(tokens.max()) + 1,
                "tokenizer": tokenizer,
                "sha256": {name: file_sha256(aside / name) for name in (TOKENS, SUFFIXES)},
                "about": dict(about or {}),
            }
            (aside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            os.rename(aside, out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from None
    return len(tokens)


@dataclass(frozen=True)
class Datastore:
    """An open datastore.

    Attributes:
        tokens: int32 ``[N]``, the documents one after the other, `END` behind each.
        suffixes: int32 or int64 ``[N]``, all places in the order of what stands there.
        ids: one more than the largest token id.
        tokenizer: digest of the tokenizer, empty if nobody knows.
    """

    tokens: np.ndarray
    suffixes: np.ndarray
    ids: int
    tokenizer: str

    @classmethod
    def open(cls, path: Path) -> Datastore:
        """Map the datastore in a directory. Its files are read once, for their digests.

        Raises:
            UsageError: there is none, it is damaged, or another version wrote it.
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
            arrays.append(np.asarray(array))  # a plain view of the same pages, which is faster to index
        return cls(*arrays, ids=ids, tokenizer=tokenizer)

    def find(self, tail: Sequence[int], shortest: int) -> tuple[int, range]:
        """The longest end of ``tail``, of ``shortest`` tokens or more, that occurs; and where in ``suffixes``.

        Returns:
            its length, 0 if none does, and the places in `suffixes` that begin with it.
        """
        found, first = 0, 0
        low, high = shortest, len(tail)
        while low <= high:  # what does not occur does not occur in anything longer
            size = (low + high) // 2
            pattern = list(tail[len(tail) - size :])
            at = bisect_left(range(len(self.suffixes)), pattern, key=lambda i, size=size: self._at(i, size))
            if at < len(self.suffixes) and self._at(at, size) == pattern:
                found, first, low = size, at, size + 1
            else:
                high = size - 1
        if not found:
            return 0, range(0)
        pattern = list(tail[len(tail) - found :])
        every = range(len(self.suffixes))
        return found, range(first, bisect_right(every, pattern, lo=first, key=lambda i: self._at(i, found)))

    def _at(self, i: int, size: int) -> list[int]:
        place = int(self.suffixes[i])
        return self.tokens[place : place + size].tolist()

    def continuations(self, size: int, places: range, most: int, depth: int) -> np.ndarray:
        """int32 ``[n, depth]``: what followed at most ``most`` of the occurrences that `find` found, in order.

        Of more than that so many are taken at equal distances. `END` is where a document ends.
        """
        n = min(len(places), most)
        chosen = places.start + np.arange(n) * len(places) // n
        after = self.suffixes[chosen].astype(np.int64)[:, None] + size + np.arange(depth)
        return np.where(after < len(self.tokens), self.tokens[np.minimum(after, len(self.tokens) - 1)], END)


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        if file.stat().st_size > _MANIFEST_BYTES:
            raise _damaged(path, MANIFEST, f"it is larger than {_MANIFEST_BYTES} bytes")
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"there is no datastore in {path}: {MANIFEST}: {error.strerror}; make one with python -m crossdraft_rest "
            "build"
        ) from None
    except (ValueError, RecursionError):
        raise _damaged(path, MANIFEST, "it is not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _damaged(path, MANIFEST, f"it does not say format {FORMAT!r}")
    return manifest


def _damaged(path: Path, name: str, why: str) -> UsageError:
    return UsageError(f"the datastore {path} is damaged: {name}: {why}; build it again")
