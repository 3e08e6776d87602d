"""The law of the first token on a real model: right rules pass, wrong ones and the control are seen."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from crossdraft.framework import model_law, plugins
from crossdraft.framework.decoding.sampling import Sampling
from crossdraft.framework.draft import Draft, Verdict
from crossdraft.framework.errors import (
    ContractError,
    CrossdraftError,
    ModelError,
    NumericalError,
    UnknownNameError,
    UsageError,
)
from crossdraft.framework.hookspecs import hookimpl
from crossdraft.framework.model_law import Case, Fit, Prompt, choose, first_token, goodness_of_fit, judge, sample
from crossdraft.framework.rng import CounterRng

#: Two laws of ten tokens; each calls one token impossible that the other knows, and neither knows the last.
P = torch.tensor([0.30, 0.20, 0.15, 0.12, 0.08, 0.08, 0.05, 0.02, 0.0, 0.0], dtype=torch.float64)
Q = torch.tensor([0.10, 0.25, 0.30, 0.02, 0.08, 0.12, 0.00, 0.08, 0.05, 0.0], dtype=torch.float64)


def case(verifier: str | type, draft: str = "chain", gamma: int = 1) -> Case:
    (found,), _ = choose(["token"] if isinstance(verifier, type) else [verifier], [draft], "free", gamma)
    return found if isinstance(verifier, str) else Case(found.draft, found.drafter, found.config, verifier)


def counted(*cases: Case, samples: int = 20_000, p: torch.Tensor = P, q: torch.Tensor = Q, **more: Any) -> list:
    found = sample(p, q, cases, samples, rng=CounterRng(5), **more)
    assert all(int(counts.sum()) == samples for counts in found)
    return [judge(one, counts, Prompt("", 1, p, q)) for one, counts in zip(cases, found, strict=True)]


# -- the law -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verifier, draft",
    [
        ("greedy-block", "chain"),
        ("token", "point-mass"),
        ("specinfer", "iid-2"),
        ("spectr", "iid-2"),
        ("multipath-block", "iid-2"),
        ("traversal", "iid-3"),
        ("sample-match", "tree-top-2-1"),
        ("specinfer", "tree-wor-2-1"),
        ("greedy-draft-optimal", "tree-greedy-2-1"),
    ],
)
def test_lossless_rules_pass_and_the_control_is_rejected(verifier: str, draft: str) -> None:
    (result,) = counted(case(verifier, draft))
    assert result.target.p_value > 1e-3
    assert result.target.sd < 3 * result.target.expected_sd
    assert result.control.p_value < 1e-12
    assert result.verdict == "yes" and not result.bad


def test_a_hundred_thousand_samples() -> None:
    for result in counted(case("token"), case("block"), samples=100_000):
        assert result.target.p_value > 1e-3
        assert result.target.sd < 3 * result.target.expected_sd
        assert result.control.p_value == 0


@pytest.mark.parametrize("verifier, draft", [("block", "chain"), ("traversal", "iid-2"), ("spectr", "iid-3")])
def test_longer_drafts(verifier: str, draft: str) -> None:
    """Block rules look past the first token before they settle it: its law must be P_0 all the same."""
    (result,) = counted(case(verifier, draft, gamma=3))
    assert result.target.p_value > 1e-3


def test_one_batch_or_many(monkeypatch: Any) -> None:
    """Each sample has its own stream, so where batches end changes nothing."""
    cases = [case("token"), case("spectr", "iid-2")]
    at_once, in_parts = (sample(P, Q, cases, 5000, rng=CounterRng(1), batch=b) for b in (5000, 777))
    assert all(torch.equal(a, b) for a, b in zip(at_once, in_parts, strict=True))
    monkeypatch.setattr(model_law, "BATCH_BYTES_CPU", 1)  # smaller than a single row
    assert torch.equal(sample(P, Q, cases[:1], 20, rng=CounterRng(1))[0].sum(), torch.tensor(20))


def test_prompts_get_numbers_of_their_own() -> None:
    one, other, again = (
        sample(P, Q, [case("token")], 3000, rng=CounterRng(1), first_stream=first)[0] for first in (0, 3000, 0)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_impossible_tokens_change_nothing() -> None:
    """Left out of the vocabulary or not, wherever they stand: the same samples."""
    where = torch.tensor([3, 5, 6, 7, 20, 21, 30, 33, 47, 49])
    p, q = (torch.zeros(60, dtype=torch.float64).scatter_(0, where, law) for law in (P, Q))
    for one in (case("token"), case("multipath-block", "iid-2"), case("specinfer", "tree-wor-2-1")):
        (dense,) = sample(P, Q, [one], 5000, rng=CounterRng(2))
        (sparse,) = sample(p, q, [one], 5000, rng=CounterRng(2))
        assert torch.equal(sparse[where], dense)
        assert int(sparse.sum()) == 5000


def test_rules_see_only_possible_tokens() -> None:
    widths = set()

    class Looks(plugins.get("verifiers", "token")):
        def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
            assert draft.q is not None
            widths.add((p.shape[2], draft.q.shape[2]))
            return super().verify(draft, p, rng)

    sample(P, Q, [case(Looks)], 10, rng=CounterRng(0))
    assert widths == {(9, 9)}


# -- what must be seen ---------------------------------------------------------------------------------------


class Inverted(plugins.get("verifiers", "token")):
    """Token verification with Q / P for P / Q."""

    name = "inverted"

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        assert draft.q is not None
        verdict = super().verify(Draft(**{**vars(draft), "q": p[:, :1]}), draft.q.expand_as(p), rng)
        return Verdict(verdict.length, verdict.token)


class NoResidual(plugins.get("verifiers", "token")):
    """Draws the correction from P itself."""

    name = "no-residual"

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        verdict = super().verify(draft, p, rng)
        return Verdict(verdict.length, rng.draw(p[:, 0], index=1))


class AcceptsAll(plugins.get("verifiers", "token")):
    """Says what the drafter says."""

    name = "accepts-all"

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        return Verdict(torch.ones_like(draft.count), torch.zeros_like(draft.count))


@pytest.mark.parametrize("wrong", [Inverted, NoResidual])
def test_wrong_rules_are_rejected(wrong: type) -> None:
    (result,) = counted(case(wrong))
    assert result.target.p_value < 1e-12
    assert result.verdict == "NO" and result.bad


def test_a_rule_that_parrots_the_drafter_is_seen_twice() -> None:
    (result,) = counted(case(AcceptsAll))
    assert result.target.p_value == 0  # it says a token that the target never says
    assert result.control.p_value > 1e-3
    assert result.verdict == "NO" and result.bad


def test_equal_laws_decide_nothing() -> None:
    (result,) = counted(case("token"), samples=2000, q=P)
    assert result.verdict == "unknown: the control is not rejected" and result.bad
    assert result.as_json()["target_kept"] is None


def test_what_is_no_token_is_an_error() -> None:
    class Outside(AcceptsAll):
        def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
            return Verdict(torch.zeros_like(draft.count), torch.full_like(draft.count, p.shape[2]))

    with pytest.raises(ContractError, match="'accepts-all' emitted something that is no token"):
        sample(P, Q, [case(Outside)], 10, rng=CounterRng(0))


# -- pieces --------------------------------------------------------------------------------------------------


def test_first_token() -> None:
    chain = Draft.chain(torch.tensor([[4, 5], [6, 7]]), torch.tensor([2, 2]))
    zero_one = Verdict(torch.tensor([0, 1]), torch.tensor([8, 9]))
    assert first_token(chain, zero_one).tolist() == [8, 6]
    assert first_token(Draft.empty(2), zero_one).tolist() == [8, 9]
    children = torch.full((2, 2), -1)
    tree = Draft(chain.tokens, children, torch.ones(2, 2, dtype=torch.bool), drawn="deterministic")
    younger = Verdict(torch.tensor([1, 0]), torch.tensor([8, 9]), path=torch.tensor([[1, -1], [-1, -1]]))
    assert first_token(tree, younger).tolist() == [5, 9]


def test_chi_square_is_scipys() -> None:
    counts = torch.tensor([480, 310, 205, 3, 2])
    law = torch.tensor([0.5, 0.3, 0.194, 0.0035, 0.0025])
    fit = goodness_of_fit(counts, law)  # 3.5 + 2.5 are expected in the last two cells, which are pooled
    theirs = chisquare([480, 310, 205, 5], [500, 300, 194, 6])
    assert fit.chi_square == pytest.approx(theirs.statistic, rel=1e-5)
    assert fit.p_value == pytest.approx(theirs.pvalue, rel=1e-5)
    assert fit.degrees == 3
    off = torch.tensor([-0.02, 0.01, 0.011, -0.0005, -0.0005])
    assert fit.sd == pytest.approx(float(off.square().mean().sqrt()), rel=1e-5)
    assert fit.expected_sd == pytest.approx(float((law * (1 - law) / 1000).mean().sqrt()), rel=1e-5)


def test_many_cells() -> None:
    """The incomplete gamma function is right at the sizes a vocabulary has, far into the tail."""
    law = torch.full((20_000,), 1 / 20_000, dtype=torch.float64)
    counts = torch.full((20_000,), 20).index_add(0, torch.arange(10_000), torch.tensor([1, -1]).repeat(5000) * 6)
    fit, theirs = goodness_of_fit(counts, law), chisquare(counts.numpy())
    assert fit.chi_square == pytest.approx(18_000)
    assert fit.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    lopsided = counts + torch.arange(20_000) % 8
    assert goodness_of_fit(lopsided, law).p_value == pytest.approx(chisquare(lopsided.numpy()).pvalue, rel=1e-6)


@pytest.mark.parametrize(
    "counts, law, expected",
    [
        ([90, 10, 0], [0.9, 0.1, 0.0], (0.0, 1, 1.0)),  # an impossible token that never came
        ([90, 9, 1], [0.9, 0.1, 0.0], (float("inf"), 1, 0.0)),  # .. and one that came
        ([4, 0], [1.0, 0.0], (0.0, 0, 1.0)),  # a single cell tests nothing
        ([60, 40], [0.98, 0.02], (0.0, 0, 1.0)),  # two expected: they join the only other cell
    ],
)
def test_chi_square_at_the_edges(counts: list[int], law: list[float], expected: tuple) -> None:
    fit = goodness_of_fit(torch.tensor(counts), torch.tensor(law, dtype=torch.float64))
    assert (fit.chi_square, fit.degrees, fit.p_value) == pytest.approx(expected)


def test_infinity_is_no_json() -> None:
    assert model_law._fit_as_json(Fit(0.1, 0.1, float("inf"), 3, 0.0))["chi_square"] is None


def test_which_drafts_verifiers_get() -> None:
    cases, skipped = choose(None, None, "free", 1)
    drafts = {one.verifier.name: one.draft for one in cases}
    assert len(drafts) == len(cases), "one pair a verifier"
    some = {"token": "chain", "block": "chain", "spectr": "iid-2", "greedy-draft-optimal": "tree-greedy-2-1"}
    assert some.items() <= drafts.items()
    assert "greedy" not in drafts and not skipped
    cases, skipped = choose(["greedy"], None, "free", 1)
    assert not cases and "needs temperature 0" in skipped[0]
    cases, skipped = choose(["token", "spectr"], ["chain", "iid-2"], "free", 4)
    assert [(one.verifier.name, one.draft) for one in cases] == [
        ("token", "chain"),
        ("spectr", "chain"),
        ("spectr", "iid-2"),
    ]
    assert {one.config.gamma for one in cases} == {4} and {one.config.model for one in cases} == {"free"}
    cases, skipped = choose(["token"], ["iid-2"], "free", 1)
    assert not cases and "'token' accepts only: chain" in skipped[0]


# -- the command ---------------------------------------------------------------------------------------------

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 40)}}


def run(capsys: Any, options: str, *more: str) -> tuple[int, str]:
    """Exit code and standard output of a command that has these options."""
    parser = argparse.ArgumentParser()
    model_law.add_arguments(parser)
    code = model_law.main(parser.parse_args([*options.split(), *more]))
    return code, capsys.readouterr().out


@pytest.fixture
def pair(tmp_path: Path, tiny_model: Callable) -> list[str]:
    """Options that name a target and a drafter on disk."""
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    for name, noise in (("target", 0.0), ("drafter", 0.3)):
        tiny_model("llama", vocab_size=len(WORDS), noise=noise).save_pretrained(tmp_path / name)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
        fast.save_pretrained(tmp_path / name)
    return ["--model", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--dtype", "float32"]


def test_the_law_on_models(capsys: Any, pair: list[str], tiny_model: Callable) -> None:
    code, out = run(capsys, "--samples 5000 --temperature 3 --json", *pair, "--prompt", "w5 w6 w7", "--prompt", "w9")
    found = json.loads(out)
    assert code == 0
    assert [record["prompt"] for record in found["prompts"]] == ["w5 w6 w7", "w9"]
    with torch.no_grad():
        law = (tiny_model("llama", vocab_size=len(WORDS))(torch.tensor([[5, 6, 7]])).logits[0, -1] / 3).softmax(0)
    record = found["prompts"][0]
    assert (record["prompt_tokens"], record["vocab_size"], record["possible_tokens"]) == (3, 40, 40)
    shown = record["shown"]
    assert [token["id"] for token in shown] == law.topk(30).indices.tolist()
    assert [token["target"] for token in shown] == pytest.approx(law.topk(30).values.tolist(), abs=1e-5)
    assert all(token["text"] == f"w{token['id']}" for token in shown if token["id"] > 2)
    for one in record["pairs"]:
        assert one["declared_lossless"] and one["target_kept"]
        assert one["target"]["p_value"] > 1e-4 and one["control"]["p_value"] < 1e-12
    assert {"token", "block", "spectr", "traversal"} <= {one["verifier"] for one in record["pairs"]}


def test_top_k_leaves_few_tokens(capsys: Any, pair: list[str]) -> None:
    code, out = run(capsys, "--samples 5000 --top-k 4 --temperature 3 --prompt w5 --verifier token", *pair)
    assert code == 0
    assert "5,000 first tokens" in out
    assert 4 <= int(out.split(" possible ones")[0].split()[-1]) <= 8
    assert out.splitlines()[-2].split()[:2] == ["token", "chain"] and out.splitlines()[-2].endswith("yes")


def test_a_wrong_rule_fails_the_command(capsys: Any, pair: list[str]) -> None:
    plugin = SimpleNamespace(crossdraft_register_verifiers=hookimpl(lambda register: register("inverted", Inverted)))
    plugins.manager().register(plugin, "inverted")
    try:
        code, out = run(capsys, "--samples 5000 --temperature 3 --prompt w5 --verifier inverted", *pair)
    finally:
        plugins.manager().unregister(plugin)
    assert code == 1
    assert out.splitlines()[-2].endswith("NO")


def test_a_drafter_that_is_the_target_tests_nothing(capsys: Any, pair: list[str]) -> None:
    code, out = run(capsys, "--samples 2000 --prompt w5 --verifier token", *pair, "--drafter", pair[1])
    assert code == 1
    assert "the control is not rejected" in out


def test_histograms(capsys: Any, pair: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "plots"
    code, printed = run(
        capsys, "--samples 2000 --temperature 3 --verifier token --json", *pair,
        "--prompt", "w5 $ $ w6", "--prompt", "w7", "--out", str(out),
    )  # fmt: skip
    assert code == 0
    assert sorted(file.name for file in out.iterdir()) == ["model_law.json", "prompt-1.png", "prompt-2.png"]
    assert (out / "prompt-1.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "model_law.json").read_text(encoding="utf-8")) == json.loads(printed)


def test_without_matplotlib(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'crossdraft\[plots\]'"):
        run(capsys, "--model m --drafter d --prompt x --out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, error, sentence",
    [
        ("--prompt x", UsageError, "--model is missing"),
        ("--model m", UsageError, "--prompt is missing"),
        ("--model m --prompt x", UsageError, "--drafter is missing: name a model that shares the tokenizer of m"),
        ("--model m --drafter d --prompt x --samples 0", UsageError, "--samples must be at least 1, got 0"),
        ("--model m --drafter d --prompt x --gamma 0", UsageError, "--gamma must be at least 1, got 0"),
        ("--model m --drafter d --prompt x --batch -2", UsageError, "--batch must be at least 1, got -2"),
        ("--model m --drafter d --prompt x --temperature 0", UsageError, "--temperature must be above 0"),
        ("--model m --drafter d --prompt x --top-p 1.5", UsageError, "--top-p: Input should be less than"),
        ("--model m --drafter d --prompt x --verifier tokne", UnknownNameError, "did you mean 'token'"),
        ("--model m --drafter d --prompt x --draft chian", UnknownNameError, "did you mean 'chain'"),
        ("--model m --drafter d --prompt x --verifier greedy", UsageError, "no pair is left to test"),
        ("--model ./nowhere --drafter d --prompt x", UsageError, "no model directory ./nowhere"),
    ],
)
def test_mistakes_are_sentences(capsys: Any, options: str, error: type[CrossdraftError], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        run(capsys, options)


def test_mistakes_that_need_the_models(capsys: Any, pair: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has 120 tokens, but .* has a context of 96; shorten it"):
        run(capsys, "", *pair, "--prompt", "w5 " * 120)
    other = Tokenizer(WordLevel({**WORDS, "more": 40}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(tmp_path / "drafter")
    with pytest.raises(ModelError, match="the tokenizers differ"):
        run(capsys, "", *pair, "--prompt", "w5")


def test_nan_is_an_error() -> None:
    broken = SimpleNamespace(
        device="cpu",
        begin=lambda row, tokens: None,
        grow=lambda tokens: (torch.full((1, 1, 5), torch.nan), None),
        keep=lambda counts: None,
    )
    with pytest.raises(NumericalError, match="the target 'x' produced NaN"):
        model_law._law_after(broken, [3, 4], Sampling(), "target 'x'")


def test_options_that_a_parser_has_already() -> None:
    """`crossdraft certify` declares some for its exact models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gamma", type=int, default=7)
    model_law.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args(["--samples", "5", "--model", "m", "--prompt", "x", "--rounds", "2"])
    assert (args.gamma, args.samples) == (7, 5)
    with pytest.raises(UsageError, match="--rounds is for the exact models"):
        model_law.main(args)
