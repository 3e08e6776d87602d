"""``crossdraft certify-samples``: draws of an external sampler, correct and wrong."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_advisor.samples.sampler_verdict import Evidence, PrefixDraws, _cell_ends
from crossdraft_advisor.samples.token_tree import TokenTree, subtrees
from simulated_samplers import ROWS, markov_decision, markov_sequences, power_law_probs, tempered, verdict_of
from tiny_models import save_model
from transformers import AutoModelForCausalLM

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
    wrong = write(tmp_path / "wrong.jsonl", {"probs": [0.6, 0.4], "samples": noise_used_twice(uniform)})
    assert main(["certify-samples", wrong, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == "no" and record["p_value"] < 1e-9
    right = write(tmp_path / "right.jsonl", {"probs": [0.6, 0.4], "samples": np.where(uniform < 0.6, 0, 1).tolist()})
    assert main(["certify-samples", right]) == 0
    assert "yes: within TV 0.02 at 95 %" in capsys.readouterr().out


def test_too_few_draws_are_answered_with_number(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path / "few.jsonl", {"probs": [0.6, 0.4], "counts": {"0": 61, "1": 39}})
    assert main(["certify-samples", file]) == 3
    out = capsys.readouterr().out
    more = int(out.split("too few draws: ")[1].split(" more draws needed")[0].replace(",", ""))
    assert main(["certify-samples", file, "--deviation", "0.35"]) == 0
    # As many more are enough for an exact sampler.
    n = 100 + more
    file = write(
        tmp_path / "enough.jsonl", {"probs": [0.6, 0.4], "counts": {"0": round(0.6 * n), "1": n - round(0.6 * n)}}
    )
    assert main(["certify-samples", file]) == 0


@pytest.mark.parametrize(("temperature", "outcome"), [(0.9, "no"), (1.1, "no"), (1.0, "yes")])
def test_another_temperature_at_nine_prefixes_is_seen_in_both_directions(temperature: float, outcome: str) -> None:
    """256 draws at each: 0.09 apart in total variation. A deviation of 0.1 can be decided with that many."""
    probs = power_law_probs(9, 2000, seed=0)
    for seed in range(5):
        assert (
            verdict_of(probs, tempered(probs, temperature), 256, 0.1 if outcome == "yes" else 0.05, seed).outcome
            == outcome
        )


def test_correct_sampler_at_nine_prefixes_reports_missing_draws() -> None:
    probs = power_law_probs(9, 2000, seed=0)
    few = verdict_of(probs, probs, 256, 0.02, 1)
    assert few.outcome == "undecided" and 9 * 256 < few.more_draws < 200_000
    each = 256 + -(-few.more_draws // 9)
    enough = [verdict_of(probs, probs, each, 0.02, seed).outcome for seed in range(20)]
    assert enough.count("yes") >= 15 and "no" not in enough


def test_speculation_at_undefined_temperature_is_seen_in_few_sequences() -> None:
    """A defect of one engine: drafted positions, here every second one, were sampled far too hot."""
    rng = np.random.default_rng(0)
    for seed in range(5):
        evidence, probs = Evidence(seed), power_law_probs(40, 5000, seed)
        for i, row in enumerate(probs):
            wrong = tempered(row[None], 8.0)[0] if i % 2 else row
            token = int(rng.choice(len(row), p=wrong))
            evidence.add(torch.from_numpy(row[None]), [PrefixDraws("f:1", [token], [1])])
        verdict = evidence.verdict(0.05)
        assert verdict.outcome == "no" and verdict.p_value < 1e-6
        assert verdict.log_p < verdict.expected_log_p - 1.5


def test_first_tokens_have_no_part_in_verdict_unless_requested() -> None:
    random = np.random.default_rng(1)
    cold = ROWS**3 / (ROWS**3).sum(1, keepdims=True)
    draws = markov_sequences(random, ROWS, 600)
    for sequence in draws.sequences:  # only the first tokens are wrong, and later ones follow from them
        later = [int(random.choice(4, p=cold[0]))]
        for _ in sequence[1:]:
            later.append(int(random.choice(4, p=ROWS[later[-1]])))
        sequence[:] = later
    apart = markov_decision([draws], 0.1)
    assert apart.verdict.outcome == "yes" and apart.verdict.draws == 600 * 11
    assert apart.first_tokens is not None and apart.first_tokens.outcome == "no" and apart.first_tokens.draws == 600
    batched = markov_decision([draws], 0.1, first_tokens=True)
    assert batched.first_tokens is None and batched.verdict.draws == 600 * 12


def test_sequences_at_another_temperature_are_caught() -> None:
    cold = ROWS**1.4 / (ROWS**1.4).sum(1, keepdims=True)
    random = np.random.default_rng(1)
    draws = markov_sequences(random, cold, 150)
    for sequence in draws.sequences:  # the first token comes from the right distribution
        sequence[0] = int(random.choice(4, p=ROWS[0]))
    result = markov_decision([draws], 0.1)
    assert result.verdict.outcome == "no" and result.first_tokens is not None and result.first_tokens.outcome != "no"


def test_opposite_deviations_are_detected() -> None:
    """Statistics pooled over prefixes agree; the cells of each prefix do not."""
    probs, wrong = np.full((40, 4), 0.25), np.full((40, 4), 0.25)
    for i, row in enumerate(wrong):
        row[i % 4] += 0.1
        row[(i + 1) % 4] -= 0.1
    verdict = verdict_of(probs, wrong, 400, 0.05, 0)
    pooled = next(item for item in verdict.statistics if item.name == "pooled cells")
    assert pooled.tv_at_most is not None and pooled.tv_at_most < 0.05
    assert verdict.outcome == "no" and verdict.each_prefix and 0.06 < verdict.tv_at_least < 0.1


def test_million_tokens_and_many_lines(tmp_path: Path, capsys: Any) -> None:
    size = 10**6
    next_probs = np.full(size, 1 / size)
    verdict = verdict_of(next_probs[None], next_probs[None], 2000, 0.1, 0)
    assert verdict.outcome == "yes" and verdict.draws == 2000
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(1000):
        p = rng.dirichlet(np.ones(3))
        rows.append({"probs": p.tolist(), "samples": rng.choice(3, 3, p=p).tolist()})
    assert main(["certify-samples", write(tmp_path / "many.jsonl", *rows), "--deviation", "0.1"]) == 0
    assert "3,000 draws after 1,000 prefixes" in capsys.readouterr().out


def test_cells_hold_at_least_their_mass() -> None:
    for seed, mass in ((0, 1 / 16), (1, 0.2), (2, 0.5)):
        reached = np.sort(power_law_probs(1, 300, seed)[0])[::-1].cumsum()
        ends = _cell_ends(reached / reached[-1], mass)
        shares = np.diff(reached[ends - 1] / reached[-1], prepend=0.0)
        assert ends[-1] == 300 and (shares >= mass - 1e-9).all() and len(ends) <= 1 / mass + 1e-9


@pytest.mark.parametrize("maximum", [4, 7, 100])
def test_token_tree_is_cut_into_subtrees_that_score_every_node_once(maximum: int) -> None:
    random, tree, sequences = np.random.default_rng(3), TokenTree(), []
    for _ in range(40):
        sequences.append(random.integers(0, 3, random.integers(1, 5)).tolist())
        tree.add(sequences[-1])
    paths: dict[int, list[int]] = {}
    for part in subtrees(tree, maximum):
        assert len(part.nodes) <= maximum
        for i, (node, parent, expected) in enumerate(zip(part.nodes, part.parents, part.is_output, strict=True)):
            assert parent < i and (parent >= 0) == (node > 0)
            assert parent < 0 or part.nodes[parent] == tree.parents[node]
            if expected:
                assert node not in paths
                path, at = [], node
                while at:
                    path.insert(0, tree.tokens[at])
                    at = tree.parents[at]
                paths[node] = path
    assert sorted(paths) == list(range(len(tree.tokens)))
    for node, path in paths.items():
        following = Counter(s[len(path)] for s in sequences if s[: len(path)] == path and len(s) > len(path))
        assert tree.counts[node] == following


@pytest.mark.slow
def test_error_rates(capsys: Any) -> None:
    """At most 5 % wrong "yes" for a sampler that is off by d, at most 5 % wrong "no" for an exact one; printed."""
    from simulated_samplers import SHAPES, error_rates

    lines = []
    for shape in SHAPES:
        for name, rates in error_rates(shape, 300):
            lines.append(f"{shape.name:34} {name:24} " + "  ".join(f"{k} {v:6.1%}" for k, v in rates.items()))
            # Three standard errors of 300 simulations at 5 %.
            assert rates["no" if name == "exact" else "yes"] <= 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5, lines[-1]
    with capsys.disabled():
        print("", *lines, sep="\n")


def test_token_of_probability_zero(capsys: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "it.jsonl", {"probs": [1, 0], "counts": {"0": 50, "1": 1}})
    assert main(["certify-samples", file]) == 1
    assert "1 draws have probability 0" in capsys.readouterr().out
    assert main(["certify-samples", write(tmp_path / "it.jsonl", {"probs": [1, 0], "counts": {"0": 50}})]) == 3
    assert "99 more draws needed" in capsys.readouterr().out
    assert main(["certify-samples", write(tmp_path / "it.jsonl", {"probs": [1, 0], "counts": {"0": 150}})]) == 0


def test_on_model(tmp_path: Path, capsys: Any) -> None:
    """Prefixes as text and ids, next tokens and sequences, all in one file."""
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "target")).double()
    torch.manual_seed(0)

    def drawn(prefix: list[int], n: int, length: int, power: float) -> list[list[int]]:
        tokens = torch.tensor([prefix] * n)
        with torch.no_grad():
            for _ in range(length):
                next_probs = (power * model(tokens).logits[:, -1]).softmax(-1)
                tokens = torch.cat([tokens, next_probs.multinomial(1)], 1)
        return tokens[:, len(prefix) :].tolist()

    def file(power: float) -> str:
        counts = Counter(token for (token,) in drawn([5, 6], N, 1, power))
        rows = [
            {"prompt": "w5 w6", "counts": counts},
            {"prefix": [7, 8, 9], "samples": drawn([7, 8, 9], 60, 5, power)},
            {"prefix": [7, 8, 9], "samples": drawn([7, 8, 9], 20, 5, power)},
        ]
        return write(tmp_path / "draws.jsonl", *rows)

    model_of = ["--model", str(tmp_path / "target"), "--dtype", "float32", "--raw", "--json", "--deviation", "0.15"]
    assert main(["certify-samples", file(1.0), *model_of]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["draws"], record["first_tokens"]["draws"]) == (N + 80 * 4, 80)
    assert record["p_value"] > 0.01 and record["log_p"] == pytest.approx(record["expected_log_p"], abs=0.05)
    assert main(["certify-samples", file(1.5), *model_of[:-1], "0.05"]) == 1
    capsys.readouterr()
    assert main(["certify-samples", file(1.5), *model_of, "--temperature", repr(1 / 1.5)]) == 0
    assert json.loads(capsys.readouterr().out)["p_value"] > 0.01


def test_distributions_of_tree_are_those_of_model(tmp_path: Path) -> None:
    """Prompts of several lengths, sequences that share beginnings, subtrees smaller than the trees."""
    from crossdraft_advisor.samples import token_tree

    from crossdraft.framework.api.build import make_slots
    from crossdraft.framework.contracts.sampling import Sampling
    from crossdraft.framework.models.load import load_model

    name = save_model(tmp_path / "target")
    model, loaded = AutoModelForCausalLM.from_pretrained(name), load_model(name, dtype="float32")
    random = np.random.default_rng(0)
    prompts = [random.integers(5, 60, n).tolist() for n in (1, 7, 3, 12, 5, 2, 9, 4, 6, 30)]
    trees = []
    for _ in prompts:
        tree = TokenTree()
        for _ in range(30):
            tree.add(random.integers(5, 8, random.integers(1, 6)).tolist())
        trees.append(tree)
    count = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_tree, "NODES", 16)
        patch.setattr(token_tree, "WIDTH", 5)
        patch.setattr(token_tree, "ROWS", 4)
        parts = token_tree.distributions(
            lambda rows, length: make_slots(loaded, rows, length), prompts, trees, Sampling(), "target", 96
        )
        for probs, places in parts:
            for row, (i, node) in zip(probs, places, strict=True):
                path, at = [], node
                while at:
                    path.insert(0, trees[i].tokens[at])
                    at = trees[i].parents[at]
                with torch.no_grad():
                    expected = model(torch.tensor([prompts[i] + path])).logits[0, -1].softmax(-1)
                torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-3)
                count += 1
    assert count == sum(len(tree.tokens) for tree in trees)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("[]", "must be a JSON object"),
        ("{", "not JSON"),
        ('{"probs": [0.5, 0.5]}', "one of counts and samples"),
        ('{"probs": [0.5, 0.6], "samples": [0]}', "probabilities that sum to 1"),
        ('{"probs": [NaN, 1], "samples": [0]}', "probabilities that sum to 1"),
        ('{"probs": [1' + "0" * 30 + ', 1], "samples": [0]}', "probabilities that sum to 1"),
        ('{"probs": [0.5, 0.5], "samples": [2]}', "token 2 is outside of the vocabulary of 2"),
        ('{"probs": [0.5, 0.5], "samples": [[1, 1]]}', "must be single tokens"),
        ('{"probs": [0.5, 0.5], "samples": [-1]}', "which is not a valid token id"),
        ('{"probs": [0.5, 0.5], "samples": [true]}', "which is not a valid token id"),
        ('{"probs": [0.5, 0.5], "counts": {"0": -1}}', "not a valid number of draws"),
        ('{"probs": [0.5, 0.5], "counts": {"0": 0}}', "at least one draw"),
        ('{"probs": [0.5, 0.5], "counts": {"a": 1}}', "'a', which is not a valid token id"),
        ('{"prompt": "", "samples": [1]}', "prompt must be a text"),
        (r'{"prompt": "\ud800", "samples": [1]}', "half of a surrogate pair"),
        ('{"prefix": [], "samples": [1]}', "prefix must be a non-empty list"),
        ('{"prefix": [1], "samples": [[]]}', "an empty sequence"),
        ('{"prefix": [1], "samples": [1], "token": 1}', "unknown key 'token'"),
        ('{"prefix": [1], "samples": [1]}', "--model"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, capsys: Any, line: str, sentence: str) -> None:
    file = tmp_path / "draws.jsonl"
    file.write_text("\n" + line + "\n")
    assert main(["certify-samples", str(file)]) == 2
    outputs = capsys.readouterr().err
    assert sentence in outputs and f"{file}:2" in outputs and outputs.count("\n") == 1


def test_model_for_lines_with_probs_is_refused(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path / "it.jsonl", {"probs": [0.6, 0.4], "samples": [0]})
    assert main(["certify-samples", file, "--model", "x"]) == 2
    assert "has its own probs; remove --model" in capsys.readouterr().err
