"""Toys whose drafter has tokens of its own: files of them, and which drafts they are for."""

import json
from pathlib import Path
from typing import Any

import pytest
from companions import needs_drafter

from crossdraft.framework.certificate.toys import built_in_toys, read_toys, toys_of_two_vocabularies
from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError

MODEL = {
    "V": 2,
    "gamma": 1,
    "target_tokens": ["a", "b"],
    "draft_tokens": ["b", "c", "a"],
    "target_start": ["1/3", "2/3"],
    "target_rows": [["1/3", "2/3"], ["1/2", "1/2"]],
    "draft_start": ["1/3", "1/3", "1/3"],
    "draft_rows": [["1/2", "1/4", "1/4"], ["1/3", "1/3", "1/3"], ["1/5", "3/5", "1/5"]],
}


def written(directory: Path, **changes: Any) -> Path:
    model = {key: value for key, value in (MODEL | changes).items() if value is not None}
    path = directory / "toys.json"
    path.write_text(json.dumps({"mine": {"model": model}}), encoding="utf-8")
    return path


def test_drafter_has_as_many_rows_as_tokens(tmp_path: Path) -> None:
    (toy,) = read_toys(written(tmp_path))
    assert toy.token_texts == (("a", "b"), ("b", "c", "a"))
    assert toy.target.shape == (3, 2) and toy.drafter.shape == (4, 3)
    assert all(toy.token_texts is None for toy in built_in_toys())
    assert [toy.name for toy in toys_of_two_vocabularies() if toy.token_texts] == ["W1", "W2"]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"draft_tokens": None}, "draft_tokens must be a list of texts"),
        ({"target_tokens": ["a", 5]}, "target_tokens must be a list of texts"),
        ({"target_tokens": ["a", ""]}, "target_tokens must be a list of texts"),
        ({"draft_tokens": ["b", "b", "a"]}, "draft_tokens must be distinct texts"),
        ({"target_tokens": ["a"]}, "target_tokens must have V = 2 texts"),
        ({"draft_tokens": ["b", "a"]}, "draft_rows must have V = 2 rows"),
        ({"draft_start": ["1/2", "1/2"]}, "draft_start must hold V = 3 probabilities"),
    ],
)
def test_nonsense_is_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        read_toys(written(tmp_path, **changes))


@needs_drafter("universal")
def test_other_drafts_are_for_other_toys(tmp_path: Path, capsys: Any) -> None:
    file = str(written(tmp_path))
    argv = ["certify", "--drafter", "{name: universal, gamma: 1}", "--verifier", "token", "--toy"]
    assert cli.main([*argv, file]) == 0
    out = capsys.readouterr().out
    assert " yes\n" in out and "lossless: 1 pair certified" in out
    assert cli.main(["certify", "--toy", file, "--draft", "chain"]) == 2
    assert "toy mine: chain does not support a drafter with another vocabulary" in capsys.readouterr().err
    plain = str(written(tmp_path, target_tokens=None, draft_tokens=None, draft_start=[0, 1], draft_rows=[[1, 0]] * 2))
    assert cli.main([*argv, plain]) == 2
    assert "toy mine: universal requires a drafter with another vocabulary" in capsys.readouterr().err
