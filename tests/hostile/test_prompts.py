"""Hostile prompt files and prompt sources."""

# ruff: noqa: E501 (an input and its words on one line can be read)

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.errors import UsageError
from crossdraft.framework.recipe.prompts import load_prompts

FINE = b'{"question_id": 1, "turns": ["fine"]}\n'

#: The second line of a file whose first is fine, and words of the sentence.
ROWS: dict[str, tuple[bytes, list[str]]] = {
    "a list": (b"[]", ["a prompt must be a JSON object, not list"]),
    "a number": (b"3", ["not int"]),
    "null": (b"null", ["not NoneType"]),
    "an empty object": (b"{}", ["needs one of the keys turns, question, prompt"]),
    "no JSON": (b"{", ["not JSON"]),
    "a comma": (b'{"prompt": "a",}', ["not JSON"]),
    "two objects": (b'{"prompt": "a"} {"prompt": "b"}', ["not JSON"]),
    "single quotes": (b"{'prompt': 'a'}", ["not JSON"]),
    "NUL": (b'{"prompt": "a\0b"}', ["not JSON"]),
    "deep nesting": (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "prompt": "a"}', ["nested too deeply"]),
    "5,000 digits": (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", ["5000 digits", "the maximum is 40"]),
    "Latin-1": (b'{"prompt": "\xe9"}', ["not UTF-8 text (line 2)"]),
    "UTF-16 in the middle": ('{"prompt": "a"}'.encode("utf-16"), ["not UTF-8 text (line 2)"]),
    "a byte order mark in the middle": (b'\xef\xbb\xbf{"prompt": "a"}', ["not JSON"]),
    "turns a text": (b'{"turns": "a"}', ["'turns' must be a list of texts"]),
    "turns of nothing": (b'{"turns": []}', ["'turns' must be a list of texts"]),
    "turns of blanks": (b'{"turns": ["a", " "]}', ["must not be empty"]),
    "turns of numbers": (b'{"turns": [1]}', ["'turns' must be a list of texts"]),
    "turns of lists": (b'{"turns": [["a"]]}', ["'turns' must be a list of texts"]),
    "turns of objects": (b'{"turns": [{"role": "user", "content": "a"}]}', ["'turns' must be a list of texts"]),
    "a thousand turns": (json.dumps({"turns": ["a"] * 1000}).encode(), ["1000 turns", "the maximum is 16"]),
    "a turn with NUL": (b'{"turns": ["a", "b\\u0000c"]}', ["turn 2 contains the character U+0000", "tokenizers cannot encode"]),
    "half a pair": (b'{"prompt": "\\ud800"}', ["turn 1 contains the character U+D800, half of a surrogate pair"]),
    "the other half": (b'{"prompt": "a\\udfff"}', ["U+DFFF"]),
    "a question that is a number": (b'{"question": 42}', ["'question' must be a text"]),
    "a question that is a list": (b'{"question": ["a"]}', ["'question' must be a text"]),
    "an empty prompt": (b'{"prompt": ""}', ["'prompt' must be a text and must not be empty"]),
    "a prompt that is true": (b'{"prompt": true}', ["'prompt' must be a text"]),
    "an answer that is a number": (b'{"question": "q", "answer": 42}', ["'answer' must be a text or a list of texts, not 42"]),
    "an answer that is an object": (b'{"question": "q", "answer": {"a": 1}}', ["'answer' must be a text"]),
    "an answer that is true": (b'{"question": "q", "answer": true}', ["'answer' must be a text", "True"]),
    "references that are numbers": (b'{"turns": ["a"], "reference": [1]}', ["'reference' must be a text or a list of texts"]),
    "a reference of half a pair": (b'{"turns": ["a"], "reference": ["\\ud800"]}', ["'reference' contains", "U+D800"]),
    "a solution that is a number": (b'{"prompt": "a", "canonical_solution": 1.5}', ["'canonical_solution' must be a text"]),
    "an id that is a list": (b'{"prompt": "a", "question_id": [1]}', ["'question_id' must be a text or a number, not [1]"]),
    "an id that is an object": (b'{"prompt": "a", "question_id": {"a": 1}}', ["'question_id' must be a text or a number"]),
    "an id that is a float": (b'{"prompt": "a", "question_id": 1.5}', ["'question_id' must be", "not 1.5"]),
    "an id that is NaN": (b'{"prompt": "a", "question_id": NaN}', ["'question_id' must be", "not nan"]),
    "an id that is infinite": (b'{"prompt": "a", "question_id": Infinity}', ["'question_id' must be", "not inf"]),
    "an id that is true": (b'{"prompt": "a", "question_id": true}', ["'question_id' must be", "not True"]),
    "an id used before": (b'{"prompt": "a", "question_id": 1}', ["question_id 1 was already used in", "p.jsonl:1"]),
    "an id used before as a number": (b'{"prompt": "a", "question_id": "1"}', ["question_id '1' was already used in"]),
    "an id with half a pair": (b'{"prompt": "a", "question_id": "\\ud800"}', ["'question_id' contains", "U+D800"]),
    "an id with escape codes": (b'{"prompt": "a", "question_id": "\\u001b[31m"}', ["'question_id' contains", "U+001B"]),
    "an id of two lines": (b'{"prompt": "a", "question_id": "a\\nb"}', ["'question_id' contains", "U+000A"]),
    "an id of 5,000 characters": (json.dumps({"prompt": "a", "question_id": "i" * 5000}).encode(), ["5000 characters", "the maximum is 200"]),
    "a task that is a list": (b'{"prompt": "a", "task_id": []}', ["'task_id' must be a text or a number"]),
    "a category that is a number": (b'{"prompt": "a", "category": 3}', ["'category' must be a text, not 3"]),
    "a category that is a list": (b'{"prompt": "a", "category": ["x"]}', ["'category' must be a text"]),
    "a category that is false": (b'{"prompt": "a", "category": false}', ["'category' must be a text, not False"]),
    "a category with escape codes": (b'{"prompt": "a", "category": "\\u009b31m"}', ["'category' contains", "U+009B"]),
    "a category of 5,000 characters": (json.dumps({"prompt": "a", "category": "c" * 5000}).encode(), ["5000 characters"]),
    "a row of unknown keys": (json.dumps({f"key{i}": i for i in range(5000)}).encode(), ["it has: key0, key1"]),
    "a key with escape codes": (b'{"\\u001b[31m": 1}', ["it has: \\x1b[31m"]),
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path, target: str) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"target: {target}\ndrafters: [prompt-lookup]\nverifiers: [token]\nprompts: p.jsonl\n", encoding="utf-8"
    )
    return str(file)


@pytest.mark.parametrize("subject", ROWS)
def test_row(subject: str, refused: Any, recipe: str, tmp_path: Path) -> None:
    row, words = ROWS[subject]
    (tmp_path / "p.jsonl").write_bytes(FINE + row)
    outputs = refused(["run", recipe], "p.jsonl", *words)
    assert "p.jsonl:2" in outputs or "(line 2)" in outputs


FILES: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["p.jsonl is empty"]),
    "blank": (b"\n \n\t\n", ["p.jsonl is empty"]),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), ["UTF-16", "save it as UTF-8"]),
    "binary": (bytes(range(128, 256)), ["not UTF-8 text (line 1)"]),
    "one array": (b'[{"prompt": "a"}]', ["p.jsonl:1", "a prompt must be a JSON object"]),
    "an array over lines": (b'[\n{"prompt": "a"}\n]', ["p.jsonl:1: not JSON"]),
    "a line of 11 MB": (b'{"prompt": "' + b"a" * (11 * 2**20) + b'"}', ["p.jsonl:1: the line is too long"]),
    "a line of 11 MB that never ends": (b"a" * (11 * 2**20), ["p.jsonl:1: the line is too long"]),
    "CSV": (b"question,answer\na,b\n", ["p.jsonl:1: not JSON"]),
}


@pytest.mark.parametrize("subject", FILES)
def test_file(subject: str, refused: Any, recipe: str, tmp_path: Path) -> None:
    content, words = FILES[subject]
    (tmp_path / "p.jsonl").write_bytes(content)
    refused(["run", recipe], *words)


def test_paths_that_are_not_files(refused: Any, recipe: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    refused(["run", recipe], "p.jsonl: it is a device, a pipe or a socket")
    refused(["run", recipe, "--set", "prompts=/dev/zero"], "/dev/zero: it is a device, a pipe or a socket")
    refused(["run", recipe, "--set", "prompts=/dev/null"], "/dev/null: it is a device, a pipe or a socket")
    (tmp_path / "here" / "empty").mkdir(parents=True)
    refused(["run", recipe, "--set", "prompts=./empty"], "the dataset ./empty is not readable")
    (tmp_path / "here" / "loop.jsonl").symlink_to(tmp_path / "here" / "loop.jsonl")
    refused(["run", recipe, "--set", "prompts=loop.jsonl"], "loop.jsonl", "symbolic links")
    with (tmp_path / "here" / "large.jsonl").open("wb") as opened:
        opened.truncate(2 * 2**30)  # of holes: it takes no room
    refused(["run", recipe, "--set", "prompts=large.jsonl"], "2147483648 bytes", "the maximum is 1073741824")
    (tmp_path / "here" / "none.jsonl").symlink_to(tmp_path / "here" / "gone")
    refused(["run", recipe, "--set", "prompts=none.jsonl"], "prompt file none.jsonl does not exist")
    refused(["run", recipe, "--set", "prompts=hf:a?nonsense=1"], "unknown option 'nonsense'")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_that_may_not_be_read(refused: Any, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(FINE)
    (tmp_path / "p.jsonl").chmod(0)
    refused(["run", recipe], "p.jsonl: Permission denied")


def test_file_that_disk_refuses(refused: Any, recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "p.jsonl").write_bytes(FINE)

    def denied(path: Any, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    opened = os.open
    monkeypatch.setattr(os, "open", lambda p, *a, **k: (denied if str(p).endswith(".jsonl") else opened)(p, *a, **k))
    refused(["run", recipe], "cannot read", "p.jsonl: Permission denied")


def test_name_of_bytes(tmp_path: Path, refused: Any, recipe: str) -> None:
    name = os.fsencode(tmp_path / "p") + b"\xff.jsonl"
    Path(os.fsdecode(name)).write_bytes(FINE)
    assert len(load_prompts(os.fsdecode(name))) == 1
    refused(["run", recipe, "--set", f"prompts={os.fsdecode(name)}"], "U+DCFF, half of a surrogate pair")


def test_unusual_valid_prompts_are_read(tmp_path: Path) -> None:
    rows = [
        b'\xef\xbb\xbf{"question": "a\\u2028b", "answer": "42", "x": NaN}\r\n',
        b"\r\n",
        b'{"prompt": "\\ud83d\\ude00", "task_id": "t/1", "category": ""}\n',
        b'{"turns": ["\x7f"], "question_id": -5, "category": null}',
    ]
    (tmp_path / "p.jsonl").write_bytes(b"".join(rows))
    result = load_prompts(str(tmp_path / "p.jsonl"))
    assert [p.turns for p in result] == [("a\u2028b",), ("\U0001f600",), ("\x7f",)]
    assert [(p.question_id, p.category) for p in result] == [(1, "question"), ("t/1", "completion"), (-5, "all")]
    assert result[0].reference == ("42",)


# -- registered sources --------------------------------------------------------------------------------------


def raising(error: BaseException) -> Any:
    def source() -> Any:
        raise error

    return source


def rows_then(error: BaseException) -> Any:
    def source() -> Iterator[Any]:
        yield {"prompt": "a"}
        raise error

    return source


class _Odd(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


SOURCES: dict[str, tuple[Any, int, list[str]]] = {
    "raises": (raising(RuntimeError("boom")), 1, ["RuntimeError: boom"]),
    "exits": (raising(SystemExit(0)), 1, ["SystemExit: 0"]),
    "is cancelled": (raising(GeneratorExit()), 1, ["GeneratorExit"]),
    "raises what cannot be said": (raising(_Odd()), 1, ["_Odd"]),
    "says a lot": (raising(RuntimeError("x" * 100_000)), 1, ["RuntimeError: xxx", "…"]),
    "says escape codes": (raising(RuntimeError("\x1b[31mred")), 1, ["RuntimeError: \\x1b[31mred"]),
    "gives nothing": (lambda: None, 1, ["'NoneType' object is not iterable"]),
    "gives a number": (lambda: 3, 1, ["'int' object is not iterable"]),
    "wants an argument": (lambda x: x, 1, ["TypeError"]),
    "raises later": (rows_then(RuntimeError("boom")), 1, ["its row 2", "RuntimeError: boom"]),
    "exits later": (rows_then(SystemExit(0)), 1, ["its row 2", "SystemExit: 0"]),
    "gives no rows": (list, 2, ["has no prompts; give a source with at least one"]),
    "gives texts": (lambda: ["a", "b"], 2, ["row 1", "a prompt must be a JSON object, not str"]),
    "gives a text": (lambda: "abc", 2, ["row 1", "a prompt must be a JSON object, not str"]),
    "gives numbers for keys": (lambda: [{1: 2}], 2, ["row 1", "it has: 1"]),
    "gives the same rows": (lambda: itertools.repeat({"prompt": "a", "question_id": "same"}), 2, ["row 2", "already used"]),
    "gives a file that is not there": (lambda: Path("/no/where.jsonl"), 2, ["cannot read /no/where.jsonl: No such file"]),
    "gives a directory": (lambda: Path("/tmp"), 2, ["cannot read /tmp: it is a directory"]),
    "is a device": (Path("/dev/zero"), 2, ["it is a device, a pipe or a socket"]),
    "is a number": (3, 1, ["'int' object is not iterable"]),
    "is of a module that is not there": ("no_such_module:x", 1, ["ModuleNotFoundError"]),
}  # fmt: skip


@pytest.mark.parametrize("subject", SOURCES)
def test_source(subject: str, refused: Any, recipe: str, install: Any) -> None:
    source, code, words = SOURCES[subject]
    install("prompts", ("theirs", source))
    refused(
        ["run", recipe, "--set", "prompts=theirs"],
        *(["'theirs' of test-prompts"] if code == 1 else []),
        *words,
        code=code,
    )


def test_source_that_never_ends(install: Any) -> None:
    install("prompts", ("endless", lambda: ({"prompt": f"p {i}"} for i in itertools.count())))
    assert len(load_prompts("endless", limit=3)) == 3
    with pytest.raises(UsageError, match="row 50001: too many prompts; the maximum is 50000"):
        load_prompts("endless")
    with pytest.raises(UsageError, match="row 50001: too many prompts"):
        load_prompts("endless", categories=["nothing"])


def test_source_prints_go_to_stderr(install: Any, capsys: Any) -> None:
    def source() -> Iterator[Any]:
        print("loading")
        for i in range(2):
            print("row", i)
            yield {"prompt": str(i)}

    install("prompts", ("chatty", source))
    assert len(load_prompts("chatty")) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "loading\nrow 0\nrow 1\n"
    assert sys.stdout is not sys.stderr
