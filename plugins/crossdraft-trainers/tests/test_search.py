"""Search of settings: the score of a trial, resumption, and output files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_trainers import search as module
from crossdraft_trainers.contract import Text
from crossdraft_trainers.search import Searcher
from crossdraft_trainers.trainees.layer_skip import LayerSkipSearch
from torch import nn

from crossdraft import generate
from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError

TEXTS = [Text([5, 6, 7], [(3 * i + j) % 36 + 4 for j in range(6 + i)], "given") for i in range(4)]


def searched(target: Any, out: Path, **options: Any) -> Searcher:
    out.mkdir(exist_ok=True)
    searcher = Searcher(target, LayerSkipSearch(**{"trials": 22, "sample": 12, **options}), out)
    searcher.run(TEXTS[:3], TEXTS[3:])
    return searcher


def test_trial_score(chat_target: Any) -> None:
    """Acceptance 1/2 at half of a pass, drafts of one token, by hand: 1.5 tokens for 1.5 passes."""
    trials = LayerSkipSearch(gamma=3).search(chat_target)
    assert trials.worth(0.5, 0.5) == (1.0, 1)
    assert trials.worth(0.5, 0.0) == (1.875, 3)
    assert trials.worth(1.0, 0.25) == (4 / 1.75, 3)


@torch.inference_mode()
def test_acceptance_and_cost_of_trial(chat_target: Any, tmp_path: Path) -> None:
    """Against a copy of the model without these parts, over whole texts, and its weights counted."""
    import copy

    settings = {"layers": 3, "skip_attention": [1], "skip_mlp": [1, 2]}
    sample = module._Sample(chat_target, TEXTS[:2], LayerSkipSearch(sample=100))
    trials = LayerSkipSearch().search(chat_target)
    acceptance, cost = sample.acceptance(trials, settings)

    spoilt = copy.deepcopy(chat_target.model)
    layers = spoilt.model.layers
    layers[2].mlp.forward = lambda x: torch.zeros_like(x)
    del layers[1]
    layers[1].self_attn.layer_idx = 1
    spoilt.config.num_hidden_layers = 2
    sums: list[float] = []
    for text in TEXTS[:2]:
        at = slice(len(text.prompt) - 1, len(text.ids) - 1)
        # The fork reads the prompt's keys and values as the target computed them, so a prompt of one token is compared.
        p, q = (
            model(torch.tensor([text.ids]), use_cache=False).logits[0, at].softmax(-1)
            for model in (chat_target.model, spoilt)
        )
        sums += torch.minimum(p, q).sum(-1).tolist()
    assert acceptance == pytest.approx(sum(sums) / len(sums), abs=0.05), "but for the prompt's keys and values"
    kept = sum(w.numel() for w in spoilt.parameters()) - sum(w.numel() for w in layers[1].mlp.parameters())
    assert cost == pytest.approx(kept / sum(w.numel() for w in chat_target.model.parameters()), abs=1e-6)


def test_prompt_of_one_token_leaves_no_doubt(chat_target: Any) -> None:
    """Then the fork computes every key and value itself, as the copy does."""
    import copy

    texts = [Text([5], [7, 9, 4, 30, 12, 8], "given")]
    sample = module._Sample(chat_target, texts, LayerSkipSearch(sample=100))
    trials = LayerSkipSearch().search(chat_target)
    acceptance, _ = sample.acceptance(trials, {"layers": 3, "skip_attention": [0, 1, 2], "skip_mlp": []})
    spoilt = copy.deepcopy(chat_target.model)
    for layer in spoilt.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
    with torch.inference_mode():
        p, q = (
            m(torch.tensor([texts[0].ids]), use_cache=False).logits[0, :-1].softmax(-1)
            for m in (chat_target.model, spoilt)
        )
    assert acceptance == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-5)


def test_best_of_all_trials_is_kept(chat_target: Any, tmp_path: Path) -> None:
    searcher = searched(chat_target, tmp_path)
    trials = json.loads((tmp_path / "trials.json").read_text())["trials"]
    assert len(trials) == 22 and len({json.dumps(t["params"]) for t in trials}) > 8
    assert searcher.settings["speed_up"] == max(t["speed_up"] for t in trials)
    assert [entry["step"] for entry in searcher.log] == sorted(entry["step"] for entry in searcher.log)
    searcher.export(TEXTS[3:])
    record = json.loads((tmp_path / "settings.json").read_text())
    assert record["kind"] == "layer-skip" and record["layers"] == 3
    best = next(t for t in trials if t["speed_up"] == record["speed_up"])
    assert record["skip_mlp"] == [i for i in range(3) if best["params"][f"mlp.{i}"]]


def test_stopped_search_resumes_identically(chat_target: Any, tmp_path: Path) -> None:
    whole = searched(chat_target, tmp_path / "whole")
    searched(chat_target, tmp_path / "parts", trials=5)
    parts = searched(chat_target, tmp_path / "parts", trials=18)
    parts = searched(chat_target, tmp_path / "parts")
    trials = [json.loads((tmp_path / name / "trials.json").read_text())["trials"] for name in ("whole", "parts")]
    assert trials[0] == trials[1] and whole.settings == parts.settings
    assert [e["held_out_acceptance"] for e in whole.log] == [e["held_out_acceptance"] for e in parts.log]


def test_trials_of_something_else_are_refused(chat_target: Any, tmp_path: Path) -> None:
    searched(chat_target, tmp_path, trials=2)
    with pytest.raises(UsageError, match=r"made with other options or texts \(sample\)"):
        searched(chat_target, tmp_path, sample=9)
    (tmp_path / "trials.json").write_text('{"made_with": {}, "trials": 3}')
    with pytest.raises(UsageError, match="is damaged; delete it to start over"):
        searched(chat_target, tmp_path)


def test_command(on_disk: Path, chat_target: Any, tmp_path: Path, capsys: Any) -> None:
    """From texts to a drafter: the target writes, trials are made, the result drafts."""
    out = tmp_path / "found"
    command = ["train", "layer-skip", "--target", str(on_disk), "--out", str(out), "--dtype", "float32"]
    command += ["--tokens", "60", "--questions", str(on_disk / "questions.jsonl"), "--invented", "0"]
    command += [
        "--max-response",
        "12",
        "--trials",
        "6",
        "--sample",
        "20",
        "--measure",
        str(on_disk / "questions.jsonl"),
    ]
    command += ["--measure-limit", "2", "--measure-tokens", "6"]
    assert cli.main(command) == 0
    card = (out / "README.md").read_text()
    assert "# Sublayers that target" in card and "Training: 6 steps" in card and "drafter layer-skip" in card
    drafter = {"name": "layer-skip", "checkpoint": str(out)}
    separate = generate(chat_target, ["w9 w12"], drafter="none", temperature=0, max_new_tokens=8)
    assert (
        generate(chat_target, ["w9 w12"], drafter=drafter, temperature=0, max_new_tokens=8)[0].tokens
        == separate[0].tokens
    )
    capsys.readouterr()
    with pytest.raises(SystemExit):  # `search` has no --steps
        cli.main([*command, "--precision", "bf16"])
    capsys.readouterr()
    assert cli.main([*command, "--trials", "0"]) == 2 and "--trials 0: should be" in capsys.readouterr().err
