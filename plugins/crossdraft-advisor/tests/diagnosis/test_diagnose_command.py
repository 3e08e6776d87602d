"""The command ``crossdraft diagnose``: mistakes that lie in how a drafter is put in, and what is refused."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_trainers.medusa_files import save_heads
from tiny_models import argmax_text, make_tokenizer, save_model
from torch.nn import functional
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM

from crossdraft import generate, load_model
from crossdraft.drafters.heads.medusa.weights import MedusaHeads
from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import ModelError
from crossdraft.framework.models.digests import weights_sha256

HEADS = 4
#: Prompts as they stand in a file, and the token ids of each without a chat template.
PROMPTS = {"w7 w8 w9 w7": [7, 8, 9, 7], "w20 w21": [20, 21], "w30 w5 w31": [30, 5, 31], "w40 w41 w42": [40, 41, 42]}


def trained(directory: Path, model: Any, texts: Sequence[Sequence[int]], skip: int = 2) -> str:
    """Medusa heads trained on ``model``'s outputs in ``texts``; head 1 predicts the token ``skip`` positions ahead."""
    rows, labels = [], []
    for text in texts:
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
        ids = functional.pad(torch.tensor(text), (0, HEADS + skip), value=-100)
        rows.append(states)
        labels.append(torch.stack([ids[skip + i : skip + i + len(text)] for i in range(HEADS)]))
    hidden, expected = torch.cat(rows), torch.cat(labels, 1)
    heads = MedusaHeads(hidden.shape[1], HEADS, vocab_size=model.config.vocab_size)
    optimiser = torch.optim.Adam(heads.parameters(), lr=0.05)
    for _ in range(150):
        optimiser.zero_grad()
        functional.cross_entropy(heads(hidden).flatten(0, 1), expected.flatten(), ignore_index=-100).backward()
        optimiser.step()
    save_heads(directory, heads, {})
    return str(directory)


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> str:
    return save_model(tmp_path_factory.mktemp("target"), seed=6, width=64)


@pytest.fixture(scope="module")
def texts(target: str) -> list[list[int]]:
    """Responses of the target to the prompts, encoded as plain text."""
    model: Any = LlamaForCausalLM.from_pretrained(target)
    return [argmax_text(model, prompt, 16) for prompt in PROMPTS.values()]


@pytest.fixture
def diagnosed(tmp_path: Path, capsys: Any, monkeypatch: Any) -> Callable[..., dict[str, Any]]:
    """``diagnosed(target, drafter, ..)``: what the command finds, as JSON."""
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"question_id": text, "category": "a", "turns": [text]} for text in PROMPTS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def run(target: str, drafter: str, *options: str) -> dict[str, Any]:
        arguments = ["--target", target, "--drafter", drafter, "--prompts", str(prompts), "--max-new-tokens", "12"]
        assert cli.main(["diagnose", *arguments, "--gamma", "3", "--device", "cpu", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    return run


GREEDY = ("--temperature", "0", "--dtype", "float32")


def test_heads_that_are_off_by_one(diagnosed: Callable, target: str, texts: list[list[int]], tmp_path: Path) -> None:
    model: Any = LlamaForCausalLM.from_pretrained(target)
    turned = [argmax_text(model, [3, *prompt, 4], 14) for prompt in PROMPTS.values()]  # as the chat template has them
    sound, shifted = (trained(tmp_path / str(skip), model, turned, skip) for skip in (2, 1))
    result = diagnosed(target, f"{{name: medusa, model: {shifted}}}", *GREEDY)
    first = result["likely"][0]
    assert first["mistake"].startswith("the first head predicts the target's own next token")
    assert first["block_efficiency"] > 3 > 2 > result["tried"][0]["block_efficiency"]
    assert diagnosed(target, f"{{name: medusa, model: {sound}}}", *GREEDY)["likely"] == []


def test_heads_that_never_saw_chat_template(
    diagnosed: Callable, target: str, texts: list[list[int]], tmp_path: Path
) -> None:
    heads = trained(tmp_path / "heads", LlamaForCausalLM.from_pretrained(target), texts)
    result = diagnosed(target, f"{{name: medusa, model: {heads}}}", *GREEDY)
    first = result["likely"][0]
    assert first["mistake"] == "the drafter was trained without the chat template of the prompts"
    assert first["block_efficiency"] > 3 > result["tried"][0]["block_efficiency"] + 0.5


def test_heads_that_were_trained_for_another_checkpoint(
    diagnosed: Callable, target: str, texts: list[list[int]], tmp_path: Path
) -> None:
    heads = trained(tmp_path / "heads", LlamaForCausalLM.from_pretrained(target), texts)
    other = save_model(tmp_path / "other", seed=7, width=64)
    own = weights_sha256(Path(target))
    (tmp_path / "heads" / "training.json").write_text(json.dumps({"target_sha256": own}), encoding="utf-8")
    (fact,) = diagnosed(other, f"{{name: medusa, model: {heads}}}", *GREEDY)["facts"]
    assert "trained for a target with SHA-256" in fact and own[:12] in fact
    assert diagnosed(target, f"{{name: medusa, model: {heads}}}", *GREEDY)["facts"] == []


def test_precision_that_is_too_coarse(diagnosed: Callable, target: str, tmp_path: Path) -> None:
    """Add a large number to all logits of a position: the distribution is unchanged, but bfloat16 loses precision."""
    model: Any = LlamaForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.lm_head.weight += 300 * torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "large")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "large" / name).write_bytes((Path(target) / name).read_bytes())
    result = diagnosed(str(tmp_path / "large"), f"{{name: draft-model, model: {target}}}", "--dtype", "bfloat16")
    first = result["likely"][0]
    assert first["mistake"].startswith("bfloat16 is not precise enough")
    assert first["marginal"][0] > 0.95 > 0.7 > result["tried"][0]["marginal"][0]


def test_target_that_cannot_drop_tokens_is_decoded(diagnosed: Callable, target: str, tmp_path: Path) -> None:
    """Without drafts, by plain passes."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    model: Any = BloomForCausalLM(BloomConfig(**sizes, initializer_range=0.5))
    model.save_pretrained(tmp_path / "bloom")
    make_tokenizer().save_pretrained(tmp_path / "bloom")
    bloom = str(tmp_path / "bloom")
    result = diagnosed(bloom, f"{{name: draft-model, model: {target}}}", "--dtype", "float32")
    assert 0 < result["tried"][0]["marginal"][0] < 1
    assert result["facts"] == []  # the recorded log-probabilities are those of replay
    loaded = load_model(bloom, dtype="float32")
    prompts = list(PROMPTS.values())
    plain = generate(loaded, prompts, drafter="none", temperature=0, max_new_tokens=8, ignore_eos=True)
    texts = [argmax_text(loaded.model, prompt, 8)[len(prompt) :] for prompt in prompts]
    assert [response.tokens for response in plain] == texts
    with pytest.raises(ModelError, match="takes no position_ids"):
        generate(loaded, prompts, drafter="prompt-lookup", max_new_tokens=8)


def test_tokenizers_that_differ(
    models: dict[str, str], capsys: Any, write_prompts: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    arguments = ["--target", models["target"], "--drafter", f"{{name: draft-model, model: {models['other']}}}"]
    arguments += ["--prompts", write_prompts(tmp_path / "prompts.jsonl"), "--responses", "2", "--max-new-tokens", "4"]
    assert cli.main(["diagnose", *arguments]) == 1
    assert "the tokenizers differ: 'w5' has id 5 in one and id 6 in the other" in capsys.readouterr().err


def test_command(models: dict[str, str], write_prompts: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    options = ["--target", models["target"], "--prompts", prompts, "--responses", "5", "--max-new-tokens", "12"]
    options += ["--dtype", "float32"]  # elsewhere lower precision is one mistake more to try
    greedy = f"{{name: draft-model, model: {models['same']}, temperature: 0}}"
    assert cli.main(["diagnose", *options, "--drafter", greedy, "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert "common mistakes, about" in err and "decoding 5 responses" in err
    assert record["likely"][0]["mistake"].startswith("drafts are greedy")
    # The model itself drafts, so that without the mistake everything is accepted.
    assert record["likely"][0]["block_efficiency"] > 4  # less than 5 where a response ends
    assert record["tried"][0]["mistake"] == ""
    assert any("without the chat template" in item["mistake"] for item in record["tried"])
    assert cli.main(["diagnose", *options, "--drafter", f"{{name: draft-model, model: {models['same']}}}"]) == 0
    out, err = capsys.readouterr()
    assert "None of the 1 common mistakes explains" in out and "as configured" in out and "cached responses" in err
    assert "excludes a clear gain" in out
    assert "Acceptance rate of the first drafted token, by category: a 1.00, b 1.00, c 1.00" in out
    # Responses are decoded in the requested precision, and both precisions are tried on them.
    options[-1] = "bfloat16"
    assert (
        cli.main(["diagnose", *options, "--drafter", f"{{name: draft-model, model: {models['same']}}}", "--json"]) == 0
    )
    out, err = capsys.readouterr()
    as_it_is, *_, exact = json.loads(out)["tried"]
    assert "decoding 5 responses" in err and exact["mistake"].startswith("bfloat16 is not precise enough")
    assert min(as_it_is["marginal"][0], exact["marginal"][0]) > 0.99


def test_unknown_drafter_is_refused(models: dict[str, str], capsys: Any) -> None:
    assert cli.main(["diagnose", "--target", models["target"], "--drafter", "nobody"]) == 2
    assert "there is no drafter named 'nobody'" in capsys.readouterr().err


def test_too_few_responses_support_no_conclusion(diagnosed: Callable, target: str, tmp_path: Path, capsys: Any) -> None:
    """Heads that learnt nothing, two responses: no interval, so nothing is named, and nothing is excluded."""
    config = LlamaForCausalLM.from_pretrained(target).config
    heads = MedusaHeads(config.hidden_size, HEADS, vocab_size=config.vocab_size)
    save_heads(tmp_path / "heads", heads, {})
    drafter = f"{{name: medusa, model: {tmp_path / 'heads'}}}"
    result = diagnosed(target, drafter, *GREEDY, "--responses", "2")
    assert result["likely"] == [] and result["inconclusive"] and result["responses_needed"] is None
    arguments = [
        "--target",
        target,
        "--drafter",
        drafter,
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--device",
        "cpu",
    ]
    assert cli.main(["diagnose", *arguments, *GREEDY, "--max-new-tokens", "12", "--responses", "2"]) == 0
    out = capsys.readouterr().out
    assert "No conclusion: the responses are too few" in out and "at least 3 are needed (--responses)" in out
    assert "train it longer" not in out
