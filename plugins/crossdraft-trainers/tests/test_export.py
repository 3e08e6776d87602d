"""``crossdraft train export``: checkpoints of trained drafters in the layouts that engines load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_trainers.medusa_files import save_heads
from training_target import save_chat_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from crossdraft.drafters.heads.eagle3 import read_head
from crossdraft.drafters.heads.medusa.weights import MedusaHeads, read_heads
from crossdraft.framework.cli.main import main
from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.models.checkpoint import load_checkpoint
from crossdraft.framework.models.load import load_model
from crossdraft.framework.models.shared_embedding import save_sharing_embedding


def export(kind: str, model: Path, target: Path, out: Path, *more: str) -> int:
    argv = [
        "train",
        "export",
        kind,
        str(model),
        "--target",
        str(target),
        "--out",
        str(out),
        "--dtype",
        "float32",
        *more,
    ]
    return main(argv)


@pytest.fixture
def compact(on_disk: Path, tmp_path: Path) -> Path:
    """A draft model without its embedding, which it shares with the target."""
    student = load_model(str(on_disk), dtype="float32", device="cpu").model
    torch.manual_seed(1)
    with torch.no_grad():
        student.model.layers[0].mlp.up_proj.weight.normal_()
    save_sharing_embedding(student, tmp_path / "compact", embedding_of=str(on_disk))
    return tmp_path / "compact"


def test_draft_model_becomes_complete(on_disk: Path, compact: Path, tmp_path: Path) -> None:
    """Transformers loads all weights of the directory, without crossdraft, and computes the same logits."""
    out = tmp_path / "servable"
    assert export("draft-model", compact, on_disk, out) == 0
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(3, 20)[None]
    expected = load_model(str(compact), dtype="float32", device="cpu").model
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(on_disk).get_vocab()
    assert not (out / "crossdraft.json").exists()
    assert export("draft-model", out, on_disk, compact, "--force") == 0
    assert load_model(str(compact), dtype="float32").sha256 == load_model(str(out), dtype="float32").sha256


@pytest.mark.parametrize("own_projections", [False, True])
def test_medusa_heads_in_layout_of_vllm(
    on_disk: Path, chat_target: LoadedModel, tmp_path: Path, own_projections: bool
) -> None:
    model: Any = chat_target.model
    lm_head = model.get_output_embeddings()
    torch.manual_seed(0)
    vocab, size = lm_head.weight.shape
    heads = MedusaHeads(size, 3, 2, **({"vocab_size": vocab} if own_projections else {"lm_head": lm_head}))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_heads(tmp_path / "heads", heads, {})
    out = tmp_path / "servable"
    assert export("medusa", tmp_path / "heads", on_disk, out) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["MedusaModel"] and config["original_lm_head"] is not own_projections
    read, ids = read_heads(load_checkpoint(str(out)), model)
    hidden = torch.randn(4, size)
    assert ids is None
    torch.testing.assert_close(read(hidden), heads(hidden))


def test_eagle3_head_keeps_its_layout(on_disk: Path, chat_target: LoadedModel, tmp_path: Path) -> None:
    trained, out = tmp_path / "head", tmp_path / "servable"
    options = ["--tokens", "300", "--epochs", "1", "--measure", "none", "--dtype", "float32", "--max-response", "20"]
    options += ["--layers", "0,1,2", "--unroll", "2"]
    assert main(["train", "eagle3", "--target", str(on_disk), "--out", str(trained), *options]) == 0
    assert export("eagle3", trained, on_disk, out) == 0
    before, after = (load_checkpoint(str(path)) for path in (trained, out))
    assert before.config == {**after.config, "architectures": before.config["architectures"]}
    model: Any = chat_target.model
    state = read_head(after, model, (0, 1, 2)).state_dict()
    for key, tensor in read_head(before, model, (0, 1, 2)).state_dict().items():
        torch.testing.assert_close(tensor, state[key])


def test_advise_does_not_export_incomplete_draft_model(on_disk: Path, compact: Path, tmp_path: Path) -> None:
    """A name that is not on this machine is the engine's business."""
    not_servable = pytest.importorskip("crossdraft_advisor.engines.engine").not_servable
    reason = not_servable(str(compact))
    assert "lacks the token embedding" in reason and "crossdraft train export draft-model" in reason
    export("draft-model", compact, on_disk, tmp_path / "servable")
    assert not any(map(not_servable, ("", "org/name", str(tmp_path / "servable"))))


def test_refusals(on_disk: Path, compact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory with other files, the model's own directory, a kind that engines do not load, an unknown kind."""
    out = tmp_path / "other"
    save_chat_model(out)
    for kind, place, more, message in (
        ("draft-model", out, (), "is not empty; use a new directory, or add --force"),
        ("draft-model", on_disk, ("--force",), "is the directory of"),
        ("pass", tmp_path / "new", (), "pass has no layout that engines load"),
        ("medusas", tmp_path / "new", (), "there is no trainer named"),
    ):
        assert export(kind, compact, on_disk, place, *more) == 2
        assert message in capsys.readouterr().err
    assert export("draft-model", compact, on_disk, out, "--force") == 0
