"""Toys: tables selected by position, and invalid files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import certify
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.table_lm import TableLM, Toy
from crossdraft.framework.certificate.toys import LARGEST_FILE, built_in_toys, read_toys
from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError

GOOD = {
    "V": 2,
    "gamma": 1,
    "target_start": ["1/2", 0.5],
    "target_rows": [[1, 0], ["1e-3", ".999"]],
    "draft_start": [1, 0],
    "draft_rows": [[1, 0], [1, 0]],
}


def written(path: Path, text: str | bytes) -> Path:
    file = path / "toys.json"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def changed(**keys: Any) -> str:
    return json.dumps({"a": {"model": GOOD | keys}})


# -- tables --------------------------------------------------------------------------------------------------


def test_first_token_distribution() -> None:
    """Wherever the prompt's last token is fed: alone, with what follows it, in trees, in one call or in several."""
    table = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], dtype=torch.float64)

    def distributions(lm: TableLM, tokens: list[int], parents: list[int] | None = None) -> list[float]:
        return (
            lm.forward(torch.tensor([tokens]), None if parents is None else torch.tensor([parents]))[0]
            .exp()[0, :, 0]
            .tolist()
        )

    lm = TableLM(table, 1, start=2)
    lm.start(0, [0, 0, 1])
    assert distributions(lm, [1, 0, 1]) == pytest.approx([0.6, 0.9, 0.2])
    assert distributions(lm, [0]) == pytest.approx([0.9])
    lm.commit([1])
    assert distributions(lm, [1, 0], [-1, -1]) == pytest.approx([0.2, 0.9])  # two children of what was kept
    lm.start(0, [1])
    lm.commit([0])
    assert distributions(lm, [1, 0, 1, 1], [-1, 0, 0, 1]) == pytest.approx(
        [0.2, 0.9, 0.2, 0.6]
    )  # the prompt, fed as a tree
    assert distributions(lm, [1, 0], [2, 3]) == pytest.approx([0.6, 0.9])
    rows = TableLM(table, 1)
    rows.start(0, [0, 0, 1])
    assert distributions(rows, [1]) == pytest.approx([0.2])


@pytest.mark.parametrize("label", ["chain", "iid-2", "tree-wor-2-1"])
def test_every_id_is_token_of_vocabulary(toys: dict[str, Toy], label: str) -> None:
    """Large V, also of prompts: strategies allocate tables and indices of size V."""
    kind, ids = DRAFTS[label], set()

    class Spy(plugins.get("drafters", kind.drafter)):
        def propose(self, sequences: Any, rng: Any) -> Any:
            ids.update(token for history in sequences.history for token in history)
            return super().propose(sequences, rng)

    g1 = toys["G1"]
    rule = plugins.get("verifiers", "sample-match")
    certificate = certify(g1, lambda context, gamma: Spy(kind.config(gamma)[1], context), rule, steps=2, gamma=1)
    assert certificate.lossless and certificate.coverage.drafted
    assert ids == {0, 1, 2} == set(range(g1.vocab_size))


def test_prompts_fit_any_vocabulary() -> None:
    one = torch.ones(2, 1, dtype=torch.float64)
    assert Toy("one", 1, one, one).prompt == [0] * 5
    assert all(set(toy.prompt) == {0, 1} for toy in built_in_toys())


# -- files ---------------------------------------------------------------------------------------------------


def test_numbers_are_read_exactly(tmp_path: Path) -> None:
    (toy,) = read_toys(written(tmp_path, changed()))
    assert toy.target.tolist() == [[1, 0], [0.001, 0.999], [0.5, 0.5]]


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("{", "not JSON"),
        (b"\xff\xfe\x00", "not UTF-8"),
        ("[" * 3000 + "]" * 3000, "toys.json"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a": ' * 200_000, "nested too deeply"),
        ("[]", "must hold a JSON object, not a list"),
        ("null", "must hold a JSON object, not null"),
        ("NaN", "must hold a JSON object"),
        ("{}", "must hold toys"),
        ('{"a": 1}', 'a has no "model" object'),
        ('{"a": null}', 'a has no "model" object'),
        ('{"a": {"model": [1]}}', 'a has no "model" object'),
        ('{"": {"model": {}}}', "is empty or not printable"),
        ('{"\\ud800": {"model": {}}}', "is empty or not printable"),
        ('{"a": {"model": {"V": 2}}}', "lacks gamma, target_start"),
        (changed(V=True), "V must be a positive integer"),
        (changed(V="2"), "V must be a positive integer"),
        (changed(gamma=1.5), "V must be a positive integer and gamma a non-negative one"),
        (changed(gamma=None), "V must be a positive integer and gamma a non-negative one"),
        (changed(V=10**30), "(V + 1) V entries, at most 250,000"),
        (changed(target_rows=[[1, 0]]), "a.model.target_rows must have V = 2 rows"),
        (changed(target_rows={"0": [1, 0]}), "a.model.target_rows must have V = 2 rows"),
        (changed(target_start=["1/2", "1/3"]), "a.model.target_start must hold V = 2 probabilities that sum to 1"),
        (changed(target_start=[2, -1]), "must hold V = 2 probabilities that sum to 1"),
        (changed(target_start=[1]), "must hold V = 2 probabilities that sum to 1"),
        (changed(target_start="10"), "must be a list of numbers or fractions"),
        (changed(target_start=None), "must be a list of numbers or fractions"),
        (changed(target_start=[None, 1]), "must be a list of numbers or fractions"),
        (changed(target_start=[True, False]), "must be a list of numbers or fractions"),
        (changed(target_start=[[1], [0]]), "must be a list of numbers or fractions"),
        (changed(target_start=["1/0", 1]), "must be a list of numbers or fractions"),
        (changed(target_start=["one", 0]), "must be a list of numbers or fractions"),
        (changed(target_start=[float("nan"), 1]), "must be a list of numbers or fractions"),
        (changed(target_start=[float("inf"), 0]), "must be a list of numbers or fractions"),
        (changed(target_start=["1e999999999", 0]), "must be a list of numbers or fractions"),
        (changed(target_start=["1" * 5000, 0]), "must be a list of numbers or fractions"),
        (changed(target_start=["0." + "0" * 5000 + "1", 1]), "must be a list of numbers or fractions"),
        (changed(target_start=[1, 0]).replace("[1, 0]", "[" + "1" * 5000 + ", 0]", 1), "has 5000 digits"),
        (changed(draft_start=list(range(1000))), "must hold V = 2 probabilities that sum to 1, got [0, 1, 2"),
    ],
)
def test_bad_files_are_one_short_sentence(capsys: Any, tmp_path: Path, text: str | bytes, sentence: str) -> None:
    path = written(tmp_path, text)
    assert cli.main(["certify", "--toy", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and sentence in err
    assert err.count("\n") == 1 and len(err) < 400 + len(str(path))


def test_invalid_files_raise(tmp_path: Path, capsys: Any) -> None:
    for name in (str(tmp_path), str(tmp_path / "missing")):
        assert cli.main(["certify", "--toy", name]) == 2
        assert "cannot read toy file" in capsys.readouterr().err
    with pytest.raises(UsageError, match="toys are small"):
        read_toys(written(tmp_path, " " * (LARGEST_FILE + 1)))


@pytest.mark.parametrize(
    "keys, sentence",
    [
        ({"gamma": 10**30}, "2 to the power of about 10^30 outputs"),
        ({"gamma": 40}, "about 10^12 outputs of steps x (gamma + 1) = 41 tokens"),
        (
            {
                "V": 1,
                "gamma": 10**9,
                "target_start": [1],
                "target_rows": [[1]],
                "draft_start": [1],
                "draft_rows": [[1]],
            },
            "outputs of steps x (gamma + 1) = 1,000,000,001 tokens exceed the maximum of 64",
        ),
    ],
)
def test_toys_with_drafts_that_are_too_long(capsys: Any, tmp_path: Path, keys: dict, sentence: str) -> None:
    assert cli.main(["certify", "--toy", str(written(tmp_path, changed(**keys)))]) == 2
    out, err = capsys.readouterr()
    assert not out and sentence in err and err.count("\n") == 1


def test_effort_of_large_vocabularies(capsys: Any, tmp_path: Path) -> None:
    """V = 330: a chain of one token may have V^3 paths, which is reported before any is enumerated."""
    row = [1] + [0] * 329
    keys = {"V": 330, "target_start": row, "target_rows": [row] * 330, "draft_start": row, "draft_rows": [row] * 330}
    options = ["--toy", str(written(tmp_path, changed(**keys))), "--draft", "chain", "--verifier", "token"]
    assert cli.main(["certify", *options]) == 2
    out, err = capsys.readouterr()
    assert not out and "there may be 35,937,000 decision paths, more than the maximum of 33,554,432" in err
