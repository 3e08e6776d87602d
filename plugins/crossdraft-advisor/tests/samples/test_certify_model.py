"""``crossdraft certify-model``: its tables and JSON, and what it refuses."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crossdraft_advisor.commands.certify_model import CertifyModel
from crossdraft_advisor.samples.first_token_check import next_token_probs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from wrong_verifiers import Inverted

from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import CrossdraftError, ModelError, NumericalError, UnknownNameError, UsageError

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 40)}}


def run(capsys: Any, options: str, *more: str) -> tuple[int, str]:
    """Exit code and standard output of the command with these options."""
    parser = argparse.ArgumentParser()
    CertifyModel.add_arguments(parser)
    code = CertifyModel.main(parser.parse_args([*options.split(), *more]))
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
    return [str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--dtype", "float32"]


def test_first_token_on_models(capsys: Any, pair: list[str], tiny_model: Callable) -> None:
    code, out = run(capsys, "--draws 5000 --temperature 3 --json", *pair, "--prompt", "w5 w6 w7", "--prompt", "w9")
    report = json.loads(out)
    assert code == 0
    assert [record["prompt"] for record in report["prompts"]] == ["w5 w6 w7", "w9"]
    with torch.no_grad():
        probs = (tiny_model("llama", vocab_size=len(WORDS))(torch.tensor([[5, 6, 7]])).logits[0, -1] / 3).softmax(0)
    record = report["prompts"][0]
    assert (record["prompt_tokens"], record["vocab_size"], record["possible_tokens"]) == (3, 40, 40)
    shown = record["shown"]
    assert [token["id"] for token in shown] == probs.topk(30).indices.tolist()
    assert [token["target"] for token in shown] == pytest.approx(probs.topk(30).values.tolist(), abs=1e-5)
    assert all(token["text"] == f"w{token['id']}" for token in shown if token["id"] > 2)
    for item in record["pairs"]:
        assert item["declared_lossless"] and item["target_kept"]
        assert item["target"]["p_value"] > 1e-4 and item["control"]["p_value"] < 1e-12
    assert {"token", "block", "spectr", "traversal"} <= {item["verifier"] for item in record["pairs"]}


def test_top_k_leaves_few_tokens(capsys: Any, pair: list[str]) -> None:
    code, out = run(capsys, "--draws 5000 --top-k 4 --temperature 3 --prompt w5 --verifier token", *pair)
    assert code == 0
    assert "5,000 samples of the first token" in out
    assert 4 <= int(out.split(" possible tokens")[0].split()[-1]) <= 8
    assert out.splitlines()[-2].split()[:2] == ["token", "chain"] and out.splitlines()[-2].endswith("yes")


def test_wrong_rule_fails_command(capsys: Any, install: Any, pair: list[str]) -> None:
    install("verifiers", ("inverted", Inverted))
    code, out = run(capsys, "--draws 5000 --temperature 3 --prompt w5 --verifier inverted", *pair)
    assert code == 1
    assert out.splitlines()[-2].endswith("NO")


def test_drafter_equal_to_target_is_inconclusive(capsys: Any, pair: list[str]) -> None:
    code, out = run(capsys, "--draws 2000 --prompt w5 --verifier token", *pair, "--drafter", pair[0])
    assert code == 1
    assert "the control is not rejected" in out


@pytest.mark.parametrize(
    "options, error, sentence",
    [
        ("m --drafter d", UsageError, "--prompt is missing"),
        ("m --drafter d --prompt x --temperature 0", UsageError, "--temperature must be above 0"),
        ("m --drafter d --prompt x --verifier tokne", UnknownNameError, "did you mean 'token'"),
        ("m --drafter d --prompt x --draft chian", UnknownNameError, "did you mean 'chain'"),
        ("m --drafter d --prompt x --verifier greedy", UsageError, "nothing to test: all pairs were skipped"),
        ("./nowhere --drafter d --prompt x", UsageError, "model directory ./nowhere does not exist"),
    ],
)
def test_mistakes_are_sentences(capsys: Any, options: str, error: type[CrossdraftError], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        run(capsys, options)


def test_mistakes_that_need_models(capsys: Any, pair: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has 120 tokens, more than the context length of .*, 96; shorten it"):
        run(capsys, "", *pair, "--prompt", "w5 " * 120)
    other = Tokenizer(WordLevel({**WORDS, "more": 40}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(tmp_path / "drafter")
    with pytest.raises(ModelError, match="the tokenizers differ"):
        run(capsys, "", *pair, "--prompt", "w5")


def test_nan_is_error() -> None:
    broken = SimpleNamespace(
        device="cpu",
        forward=lambda tokens: (torch.full((1, 1, 5), torch.nan), None),
        commit=lambda counts: None,
    )
    with pytest.raises(NumericalError, match="the target 'x' produced NaN"):
        next_token_probs(broken, [4], Sampling(), "target 'x'")  # type: ignore[arg-type]
