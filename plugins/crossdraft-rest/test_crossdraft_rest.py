"""The contract of a drafter, intact and damaged datastores, and drafts from them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_rest.__main__ import main
from crossdraft_rest.datastore import END, Datastore, build, tokenizer_sha256
from crossdraft_rest.drafter import Rest
from crossdraft_rest.trie import best_path, most_frequent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from crossdraft import DraftContext, Sampling, Sequences, UsageError
from crossdraft.testing import DrafterContract

DOCUMENTS = [[0, 1, 2, 1, 3, 0, 1, 2, 2], [3, 3, 0, 1, 2, 1, 2, 1, 2], [2, 4, 0, 0, 1], [1, 2, 1, 0, 4, 4]]
#: Vocabulary of the smallest exact models.
BITS = [[0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("rest") / "store"
    build(DOCUMENTS, path)
    return path


@pytest.fixture(scope="module")
def bits(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("rest") / "bits"
    build(BITS, path)
    return path


class Stored(DrafterContract):
    drafter = Rest

    @pytest.fixture(autouse=True)
    def _built(self, store: Path, bits: Path) -> None:
        type(self).options = {**type(self).options, "datastore": str(store)}
        self._bits = str(bits)

    def make(self, context: DraftContext) -> Rest:
        known = {} if context.vocab_size >= 5 else {"datastore": self._bits}
        return Rest(self.config.model_copy(update=known), context)


class TestRest(Stored):
    options = {"gamma": 5, "depth": 3, "shortest": 1}  # noqa: RUF012


class TestRestChain(Stored):
    options = {"gamma": 3, "shortest": 1, "tree": False}  # noqa: RUF012


# -- what is found ---------------------------------------------------------------------------------------------

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4).filter(any)


def opened(documents: list[list[int]], tmp_path_factory: Any) -> Datastore:
    path = tmp_path_factory.mktemp("store") / "d"
    build(documents, path)
    return Datastore.open(path)


#: A path from the root of a trie.
Line = tuple[int, ...]


def by_search(documents: list[list[int]], tail: list[int], shortest: int, depth: int) -> tuple[int, list[Line]]:
    """The longest end of ``tail`` that occurs, and what follows it everywhere, by comparing everywhere."""
    for size in range(len(tail), shortest - 1, -1):
        results = []
        for document in documents:
            whole = [*document, END]
            for place in range(len(whole) - size):
                if whole[place : place + size] == tail[len(tail) - size :]:
                    after = whole[place + size :]
                    results.append(tuple(after[: [*after, END].index(END)][:depth]))
        if results:
            return size, sorted(results)
    return 0, []


@settings(max_examples=25, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 4))
def test_all_occurrences_of_longest_context(documents: Any, tail: list[int], shortest: int, depth: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        build(documents, Path(directory) / "d")
        texts = Datastore.open(Path(directory) / "d")
        size, places = texts.find(tail, shortest)
        rows = texts.continuations(size, places, 1000, depth) if size else np.empty((0, depth), dtype=int)
    ended = [tuple(row[: [*row, END].index(END)]) for row in rows.tolist()]
    assert (size, ended) == by_search(documents, tail, shortest, depth)
    counts = Counter(row[: i + 1] for row in ended for i in range(len(row)))
    check_tree(rows, counts, 5)
    path = best_path(rows, 9)
    for i in range(len(path)):
        assert counts[tuple(path[: i + 1])] == max(
            n for c, n in counts.items() if c[:-1] == tuple(path[:i]) and len(c) == i + 1
        )
    assert len(path) == depth or not any(c[:-1] == tuple(path) for c in counts)


def check_tree(rows: np.ndarray, counts: Counter[Line], nodes: int) -> None:
    tokens, parents = most_frequent(rows, nodes)
    paths: list[Line] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    expected = sorted(counts, key=lambda path: (-counts[path], len(path), path))[:nodes]
    assert paths == sorted(expected, key=lambda path: (len(path), path))


def test_more_hits_than_are_counted_are_taken_evenly(tmp_path_factory: Any) -> None:
    texts = opened([[50, i // 10] for i in range(100)], tmp_path_factory)
    size, places = texts.find([50], 1)
    assert (size, len(places)) == (1, 100)
    assert texts.continuations(size, places, 10, 1).ravel().tolist() == list(range(10))


def test_unknown_context_has_no_continuation(tmp_path_factory: Any) -> None:
    texts = opened([[1, 2], [3]], tmp_path_factory)
    assert texts.find([5], 1) == (0, range(0)) and texts.find([1], 2) == (0, range(0))
    assert texts.find([2, 3], 2) == (0, range(0)), "no context goes across two documents"
    size, places = texts.find([1, 2], 1)
    assert size == 2 and texts.continuations(size, places, 9, 3).tolist()[0][0] == END


def test_large_ids(tmp_path_factory: Any) -> None:
    """Beyond 16 bits, where the original's tokens end."""
    texts = opened([[70_000, 5, 131_071, 70_000, 5, 9]], tmp_path_factory)
    size, places = texts.find([5], 1)
    assert texts.continuations(size, places, 9, 1).ravel().tolist() == [9, 131_071] and texts.ids == 131_072


# -- who may use it --------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of letters."""

    def __init__(self, letters: str = "abc"):
        self._ids = {letter: i for i, letter in enumerate(letters)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [self._ids[letter] for letter in text]}


def context(tokenizer: Any = None, vocab_size: int = 5) -> DraftContext:
    return DraftContext(Sampling(), 1, 50, vocab_size, torch.device("cpu"), target_name="a model", tokenizer=tokenizer)


def test_another_tokenizer_is_refused(store: Path, tmp_path: Path) -> None:
    build([[0, 1, 2]], tmp_path / "abc", tokenizer=tokenizer_sha256(Letters()))
    of_letters = Rest.Config(datastore=str(tmp_path / "abc"))
    Rest(of_letters, context(Letters()))
    Rest(of_letters, context())  # nothing is known of the target's
    with pytest.raises(UsageError, match="built with another tokenizer than that of target 'a model'"):
        Rest(of_letters, context(Letters("acb")))
    with pytest.raises(UsageError, match="which may not be those of target 'a model'"):
        Rest(Rest.Config(datastore=str(store)), context(Letters()))
    with pytest.raises(UsageError, match="token ids up to 4, but the target has only 3"):
        Rest(Rest.Config(datastore=str(store)), context(vocab_size=3))


def test_results_depend_on_datastore(store: Path) -> None:
    """A run keeps the digest of the settings that a drafter reads, and the manifest has those of the texts."""
    read: list[str] = []
    context = SimpleNamespace(vocab_size=9, tokenizer=None, load_settings=read.append)
    Rest(Rest.Config(datastore=str(store)), context)  # type: ignore[arg-type]
    assert read == [str(store / "manifest.json")]


def test_damaged_datastore_is_refused(tmp_path: Path) -> None:
    def refused(change: Any, sentence: str) -> None:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        build(DOCUMENTS, path)
        change(path)
        with pytest.raises(UsageError, match=sentence):
            Datastore.open(path)

    def manifest(**changes: Any) -> Any:
        def change(path: Path) -> None:
            whole = json.loads((path / "manifest.json").read_text())
            (path / "manifest.json").write_text(json.dumps({**whole, **changes}))

        return change

    def cut(path: Path) -> None:
        data = (path / "tokens.npy").read_bytes()
        (path / "tokens.npy").write_bytes(data[:-4])

    def swapped(path: Path) -> None:
        suffixes = np.load(path / "suffixes.npy")
        np.save(path / "suffixes.npy", suffixes[::-1].copy())

    def objects(path: Path) -> None:
        np.save(path / "tokens.npy", np.array([{}] * 33, dtype=object))

    refused(cut, "tokens.npy: ")
    refused(swapped, "suffixes.npy: its content is not what was written")
    refused(objects, "tokens.npy: Object arrays cannot be loaded|tokens.npy: Array can't be memory-mapped")
    refused(lambda path: np.save(path / "suffixes.npy", np.zeros(3)), "suffixes.npy: it does not hold 33 numbers")
    refused(lambda path: (path / "suffixes.npy").unlink(), "suffixes.npy: ")
    refused(lambda path: (path / "manifest.json").unlink(), "is not a datastore: .* build")
    refused(lambda path: (path / "manifest.json").write_text("[" * 9), "manifest.json: it is not JSON")
    refused(manifest(format="crossdraft-rest 2"), "its format is not 'crossdraft-rest 1'")
    refused(manifest(tokens=-1), "it lacks a key, or one has a wrong value")
    refused(manifest(sha256={}), "SHA-256 differs")


def test_invalid_corpora_raise(tmp_path: Path) -> None:
    for documents in ([[]], []):
        with pytest.raises(UsageError, match="holds no tokens"):
            build(documents, tmp_path / "d")
    wrong: Any = ([1, -1], [2**31], [1.5])
    for document in wrong:
        with pytest.raises(UsageError, match="must be whole numbers from 0"):
            build([document], tmp_path / "d")
    (tmp_path / "d").mkdir()
    with pytest.raises(UsageError, match=r"exists, and a datastore is never changed"):
        build([[1]], tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_options_that_cannot_be() -> None:
    with pytest.raises(ValidationError, match=r"shortest \(5\) must not exceed longest \(4\)"):
        Rest.Config(datastore="d", shortest=5, longest=4)


def test_draft_depth_respects_limit(store: Path) -> None:
    drafter = Rest(Rest.Config(datastore=str(store), depth=3, shortest=1), context())
    nothing: Any = None
    sequences = Sequences([[3, 0, 1]] * 2, torch.zeros(2, 50, dtype=torch.long), [1, 3], [0, 1])
    draft = drafter.propose(sequences, nothing)
    assert draft.tokens[0, : int(draft.count[0])].tolist() == [2], "[3, 0, 1] is always followed by 2"
    assert draft.depth[1][draft.valid[1]].tolist() == [1, 2, 2, 3] and draft.levels == 3


# -- the command -----------------------------------------------------------------------------------------------


def run(*words: str | Path) -> int:
    return main(["build", *map(str, words)])


def test_corpus_becomes_datastore(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("crossdraft.load_tokenizer", lambda name: SimpleNamespace(tokenizer=Letters()))
    rows = [{"said": "abca"}, {"said": ["ab", "c"]}, {"said": [{"role": "user", "content": "cab"}]}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "c.txt").write_text("abcabc")
    built = {"jsonl": ["--column", "said"], "txt": ["--tokens", "4"]}
    for kind, more in built.items():
        assert run("--tokenizer", "m", "--corpus", tmp_path / f"c.{kind}", "--out", tmp_path / kind, *more) == 0
    assert "14 tokens in" in capsys.readouterr().out
    texts = {kind: Datastore.open(tmp_path / kind) for kind in built}
    assert texts["jsonl"].tokens.tolist() == [0, 1, 2, 0, END, 0, 1, END, 2, END, 2, 0, 1, END]
    assert texts["txt"].tokens.tolist() == [0, 1, 2, 0, END]
    assert texts["txt"].tokenizer == tokenizer_sha256(Letters())


def test_ids_need_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"tokens": [4, 0]}\n\n{"tokens": [1]}\n')
    assert run("--ids", "--corpus", tmp_path / "c.jsonl", "--out", tmp_path / "d") == 0
    result = Datastore.open(tmp_path / "d")
    assert result.tokens.tolist() == [4, 0, END, 1, END] and not result.tokenizer


@pytest.mark.parametrize(
    ("name", "content", "words", "sentence"),
    [
        (
            "c.jsonl",
            b'{"text": "a"}\n{"a": 1}\n',
            ["--tokenizer", "m"],
            "c.jsonl:2: no text in column 'text'; it has a",
        ),
        ("c.jsonl", b"{}\n[]\n", ["--ids"], "c.jsonl:1: 'tokens' must be a list"),
        ("c.jsonl", b"nonsense\n", ["--ids"], "c.jsonl:1: not a JSON object"),
        ("c.txt", b"abc\n\xff", ["--tokenizer", "m"], "it is not UTF-8 text"),
        ("c.txt", b"abx", ["--tokenizer", "m"], "the text cannot be tokenized: KeyError"),
        ("c.txt", b"abc", [], "give --tokenizer MODEL for texts, or --ids"),
        ("c.txt", b"abc", ["--tokenizer", "m", "--tokens", "0"], "must be at least 1"),
        ("other", b"", ["--ids"], "does not exist; give a file"),
    ],
)
def test_bad_corpus_is_named(
    name: str, content: bytes, words: list[str], sentence: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr("crossdraft.load_tokenizer", lambda name: SimpleNamespace(tokenizer=Letters()))
    corpus = tmp_path / "c"
    if name != "other":
        corpus = tmp_path / name
        corpus.write_bytes(content)
    assert run("--corpus", corpus, "--out", tmp_path / "d", *words) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "d").exists()


def test_directory_is_read_by_datasets(tmp_path: Path) -> None:
    from datasets import Dataset

    (tmp_path / "set").mkdir()
    Dataset.from_dict({"tokens": [[1, 2], [3]]}).to_parquet(tmp_path / "set" / "train.parquet")
    assert run("--ids", "--corpus", tmp_path / "set", "--out", tmp_path / "d", "--split", "train") == 0
    assert Datastore.open(tmp_path / "d").tokens.tolist() == [1, 2, END, 3, END]
