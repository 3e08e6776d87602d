"""``crossdraft certify --samples``: draws of somebody else's sampler, right ones and wrong ones."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_model
from transformers import AutoModelForCausalLM

from crossdraft.framework.certificate.foreign_samples import LEVEL, POWER, Draws, judge, visible
from crossdraft.framework.certificate.goodness_of_fit import goodness_of_fit
from crossdraft.framework.cli.main import main

N = 20_000


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def noise_used_twice(uniform: np.ndarray) -> list[int]:
    """An engine's mistake: a drafted token is accepted by the very number that drew it. P = (0.6, 0.4) turns into Q."""
    p, q = (0.6, 0.4), (0.634, 0.366)
    drafted = np.where(uniform < q[0], 0, 1)
    accepted = uniform < np.minimum(1, np.take(p, drafted) / np.take(q, drafted))
    return np.where(accepted, drafted, 1).tolist()  # what is rejected is a 0, of which Q has too many


@pytest.mark.parametrize("seed", range(3))
def test_draft_noise_used_twice_is_caught(tmp_path: Path, capsys: Any, seed: int) -> None:
    uniform = np.random.default_rng(seed).random(N)
    wrong = write(tmp_path / "wrong.jsonl", {"law": [0.6, 0.4], "samples": noise_used_twice(uniform)})
    assert main(["certify", "--samples", wrong, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["kept"] and found["p_value"] < 1e-9
    right = write(tmp_path / "right.jsonl", {"law": [0.6, 0.4], "samples": np.where(uniform < 0.6, 0, 1).tolist()})
    assert main(["certify", "--samples", right]) == 0
    assert "The target's law, as far as 0.02 goes" in capsys.readouterr().out


def test_too_few_draws_prove_nothing(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path / "few.jsonl", {"law": [0.6, 0.4], "counts": {"0": 61, "1": 39}})
    assert main(["certify", "--samples", file]) == 1
    assert "Unknown: the draws fit" in capsys.readouterr().out
    assert main(["certify", "--samples", file, "--deviation", "0.35"]) == 0


def test_what_is_called_visible_is_seen_that_often() -> None:
    law, random = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), np.random.default_rng(0)
    shift = visible(4000, law, LEVEL, 2)
    assert shift is not None
    moved = np.array([0.5 + shift, *(0.5 - shift) * np.array([0.6, 0.4])])
    seen = [goodness_of_fit(torch.from_numpy(random.multinomial(4000, moved)), law).p_value < LEVEL for _ in range(600)]
    assert np.mean(seen) == pytest.approx(POWER, abs=0.04)


def markov(random: Any, rows: np.ndarray, length: int) -> list[int]:
    tokens, last = [], 0
    for _ in range(length):
        last = int(random.choice(len(rows), p=rows[last]))
        tokens.append(last)
    return tokens


ROWS = np.array([[0.5, 0.2, 0.2, 0.1], [0.1, 0.7, 0.1, 0.1], [0.25, 0.25, 0.4, 0.1], [0.4, 0.3, 0.2, 0.1]])


def laws(_: Draws, tokens: Any) -> torch.Tensor:
    return torch.from_numpy(ROWS[[0, *tokens]])


def sequences(random: Any, rows: np.ndarray, n: int = 150) -> Draws:
    return Draws("f:1", [0], sequences=[markov(random, rows, 12) for _ in range(n)])


def test_a_right_sampler_is_called_wrong_no_more_often_than_promised() -> None:
    """Of 30 files at a level of 0.001: one at most, and p-values all over."""
    random, found = np.random.default_rng(5), []
    for seed in range(30):
        found.append(judge([sequences(random, ROWS, 40)], laws, seed=seed).p_value)
    assert sum(p < LEVEL for p in found) <= 1 and 0.15 < np.mean([p < 0.5 for p in found]) < 0.75


def test_sequences_at_another_temperature_are_caught() -> None:
    cold = ROWS**1.4 / (ROWS**1.4).sum(1, keepdims=True)
    random = np.random.default_rng(1)
    # The first token comes from the right law: what follows it gives it away.
    draws = sequences(random, cold)
    for sequence in draws.sequences:
        sequence[0] = int(random.choice(4, p=ROWS[0]))
    verdict = judge([draws], laws, deviation=0.1)
    assert not verdict.kept
    assert sorted(test.fit.p_value < LEVEL for test in verdict.tests) == [False, True]


def test_a_token_that_the_law_cannot_say(capsys: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "it.jsonl", {"law": [1, 0], "counts": {"0": 50, "1": 1}})
    assert main(["certify", "--samples", file]) == 1
    assert "impossible token" in capsys.readouterr().out
    assert main(["certify", "--samples", write(tmp_path / "it.jsonl", {"law": [1, 0], "counts": {"0": 50}})]) == 0


def test_on_a_model(tmp_path: Path, capsys: Any) -> None:
    """Prefixes as text and ids, next tokens and sequences, all in one file."""
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "target")).double()
    torch.manual_seed(0)

    def drawn(prefix: list[int], n: int, length: int, power: float) -> list[list[int]]:
        tokens = torch.tensor([prefix] * n)
        with torch.no_grad():
            for _ in range(length):
                law = (power * model(tokens).logits[:, -1]).softmax(-1)
                tokens = torch.cat([tokens, law.multinomial(1)], 1)
        return tokens[:, len(prefix) :].tolist()

    def file(power: float) -> str:
        counts = Counter(token for (token,) in drawn([5, 6], N, 1, power))
        rows = [
            {"prompt": "w5 w6", "counts": counts},
            {"prefix": [7, 8, 9], "samples": drawn([7, 8, 9], 60, 5, power)},
            {"prefix": [7, 8, 9], "samples": drawn([7, 8, 9], 20, 5, power)},
        ]
        return write(tmp_path / "draws.jsonl", *rows)

    model_of = ["--model", str(tmp_path / "target"), "--dtype", "float32", "--raw", "--json", "--deviation", "0.05"]
    assert main(["certify", "--samples", file(1.0), *model_of]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(test["n"] for test in found["tests"]) == [80, 80 * 4, N]
    assert main(["certify", "--samples", file(1.25), *model_of]) == 1
    capsys.readouterr()
    assert main(["certify", "--samples", file(1.25), *model_of, "--temperature", "0.8"]) == 0


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("[]", "must hold a JSON object"),
        ("{", "not JSON"),
        ('{"law": [0.5, 0.5]}', "one of counts and samples"),
        ('{"law": [0.5, 0.6], "samples": [0]}', "probabilities that sum to 1"),
        ('{"law": [NaN, 1], "samples": [0]}', "probabilities that sum to 1"),
        ('{"law": [0.5, 0.5], "samples": [2]}', "token 2 is beyond the vocabulary, which has 2"),
        ('{"law": [0.5, 0.5], "samples": [[1, 1]]}', "must be single tokens"),
        ('{"law": [0.5, 0.5], "samples": [-1]}', "which is no token id"),
        ('{"law": [0.5, 0.5], "samples": [true]}', "which is no token id"),
        ('{"law": [0.5, 0.5], "counts": {"0": -1}}', "no number of draws"),
        ('{"law": [0.5, 0.5], "counts": {"0": 0}}', "no draws"),
        ('{"law": [0.5, 0.5], "counts": {"a": 1}}', "'a', which is no token id"),
        ('{"prompt": "", "samples": [1]}', "prompt must be a text"),
        ('{"prefix": [], "samples": [1]}', "prefix must be a list"),
        ('{"prefix": [1], "samples": [[]]}', "a sequence without tokens"),
        ('{"prefix": [1], "samples": [1], "token": 1}', "unknown key 'token'"),
        ('{"prefix": [1], "samples": [1]}', "Name the target with --model"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, capsys: Any, line: str, sentence: str) -> None:
    file = tmp_path / "draws.jsonl"
    file.write_text("\n" + line + "\n")
    assert main(["certify", "--samples", str(file)]) == 2
    said = capsys.readouterr().err
    assert sentence in said and f"{file}:2" in said and said.count("\n") == 1


def test_options_that_mean_nothing_here_are_refused(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path / "it.jsonl", {"law": [0.6, 0.4], "samples": [0]})
    for option in (["--gamma", "3"], ["--draws", "5"], ["--bounds"], ["--prompt", "x"], ["--verifier", "token"]):
        assert main(["certify", "--samples", file, *option]) == 2
        assert f"{option[0]} means nothing with --samples" in capsys.readouterr().err
    assert main(["certify", "--samples", file, "--deviation", "0.5"]) == 2
    assert main(["certify", "--deviation", "0.1"]) == 2
    assert main(["certify", "--samples", file, "--model", "x"]) == 2
    assert "gives its own law; leave it out" in capsys.readouterr().err
