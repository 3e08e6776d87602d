"""``crossdraft diagnose --files``: the table of engines, and what it finds in a head."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_advisor.diagnosis.engine_keys import engine_keys
from pydantic import ValidationError
from safetensors.torch import save_file
from tiny_models import save_model

from crossdraft.framework import plugins
from crossdraft.framework.cli import main as cli


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> str:
    return save_model(tmp_path_factory.mktemp("files") / "target")


def head(path: Path, **config: Any) -> str:
    path.mkdir()
    save_file({"embed_tokens.weight": torch.zeros(4, 2)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return f"{{name: eagle3, model: {path}}}"


def test_keys_that_an_engine_does_not_read_are_named(target: str, tmp_path: Path, capsys: Any) -> None:
    drafter = head(tmp_path / "head", norm_before_residual=True, transformer_layer_config={"attention_bias": True})
    argv = ["diagnose", "--files", "--target", target, "--drafter", drafter]
    assert cli.main([*argv, "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    misread = {(item["key"], item["engine"]) for item in keys if item["misread"]}
    assert misread == {
        ("norm_before_residual", "sglang"),
        ("norm_before_residual", "tensorrt-llm"),
        ("attention_bias", "sglang"),
        ("attention_bias", "llama.cpp"),
        ("embed_tokens.weight", "tensorrt-llm"),
    }
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "sglang would misread norm_before_residual: false for true (sgl-project/sglang" in out
    assert "do not record the target checkpoint" in out and "transformers 5.24.0 does not load" in out


def test_keys_that_an_earlier_commit_did_not_read_are_named(target: str, tmp_path: Path, capsys: Any) -> None:
    drafter = head(tmp_path / "head", fc_norm=True)
    assert cli.main(["diagnose", "--files", "--target", target, "--drafter", drafter]) == 0
    assert "vllm at commit 00bd1493b3e8 did not read fc_norm; later ones do" in capsys.readouterr().out


def test_ids_of_layers_that_an_engine_reads_otherwise_are_named(target: str, tmp_path: Path, capsys: Any) -> None:
    drafter = head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[2, 0, 1])  # of a target with two layers
    assert cli.main(["diagnose", "--files", "--target", target, "--drafter", drafter]) == 0
    out = capsys.readouterr().out
    assert "vllm would misread eagle_aux_hidden_state_layer_ids: [0, 1, 2] for [2, 0, 1]" in out
    assert "llama.cpp would misread eagle_aux_hidden_state_layer_ids: [null, 0, 1] for [2, 0, 1]" in out


def changing(keys: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of a layout that change what its heads compute, and are not refused."""
    for name, key in keys.items():
        if isinstance(key, Mapping):
            yield from changing(key, f"{prefix}{name}.")
        elif key.effect in ("read", "ignored"):
            yield f"{prefix}{name}"


@pytest.mark.parametrize("drafter", ["medusa", "mlp-speculator", "mtp"])
def test_every_key_that_changes_a_head_is_in_the_table_or_refused(drafter: str) -> None:
    selecting = {"architectures", "speculators_model_type"}  # a layout
    assert set(changing(plugins.get("drafters", drafter).layout.keys)) - selecting <= set(engine_keys().keys[drafter])


def test_modules_of_a_target_are_read_from_its_text_config(target: str, tmp_path: Path, capsys: Any) -> None:
    drafter = head(tmp_path / "head", text_config={"mtp_num_hidden_layers": 2}).replace("eagle3", "mtp")
    assert cli.main(["diagnose", "--files", "--target", target, "--drafter", drafter]) == 0
    out = capsys.readouterr().out
    assert "sglang would misread mtp_num_hidden_layers: 1 for 2" in out and "llama.cpp would" not in out


def test_files_of_a_draft_model_are_compared(target: str, tmp_path: Path, capsys: Any) -> None:
    other = save_model(tmp_path / "other", vocab={"<unk>": 0, "<s>": 1, "</s>": 2})
    for model, fact in (
        (target, "draft model and target are equal"),
        (other, "the tokenizers differ: one has 3 tokens"),
    ):
        argv = ["diagnose", "--files", "--target", target, "--drafter", f"{{name: draft-model, model: {model}}}"]
        assert cli.main(argv) == 0
        out = capsys.readouterr().out
        assert fact in out and "Engines load the model of 'draft-model' as any other one" in out


def test_heads_without_option_of_layers_are_heads(target: str, tmp_path: Path, capsys: Any) -> None:
    drafter = head(tmp_path / "head", dflash_config={"use_swa": True}).replace("eagle3", "dflash")
    assert cli.main(["diagnose", "--files", "--target", target, "--drafter", drafter]) == 0
    out = capsys.readouterr().out
    assert "dflash_config.use_swa" in out and "as any other one" not in out


@pytest.mark.parametrize("name", ["prompt-lookup", "dspark"])
def test_drafters_without_facts_are_refused(target: str, tmp_path: Path, capsys: Any, name: str) -> None:
    heads = head(tmp_path / "head", dspark_config={"markov_rank": 4})
    drafter = name if name == "prompt-lookup" else heads.replace("eagle3", name)
    assert cli.main(["diagnose", "--files", "--target", target, "--drafter", drafter]) == 2
    facts = f"no facts about how engines read heads of '{name}' (known: eagle3, dflash, eagle, medusa,"
    assert facts in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fact", "message"),
    [
        ({"where": "f"}, "either reads: true or uses"),
        ({"where": "f", "reads": True, "uses": 1}, "either reads: true or uses"),
        ({"reads": True}, "where"),
    ],
)
def test_table_is_checked(fact: dict[str, Any], message: str) -> None:
    table = engine_keys().model_dump(exclude_unset=True)
    table["keys"]["eagle3"] = {"fc_norm": {"neutral": False, "vllm": fact}}
    table["keys"] = {"eagle3": table["keys"]["eagle3"]}
    with pytest.raises(ValidationError, match=message):
        type(engine_keys()).model_validate(table)
    table["keys"]["eagle3"]["fc_norm"] = {"lmdeploy": {"where": "f", "reads": True}}
    with pytest.raises(ValidationError, match="lmdeploy has no source"):
        type(engine_keys()).model_validate(table)
