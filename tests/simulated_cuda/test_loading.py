"""Weights go to the device while they are read: the host never holds all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model

from crossdraft import load_model
from crossdraft.framework.models.shared_embedding import save_sharing_embedding

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the simulated device or a real one"),
]


@pytest.fixture
def no_moves(monkeypatch: Any) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model is moved")

    monkeypatch.setattr(torch.nn.Module, "to", refuse)


def on_device(model: Any) -> bool:
    return all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.usefixtures("no_moves")
def test_weights_do_not_pass_through_the_host(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    name = save_model(tmp_path / "target")
    target, host = (
        load_model(name, device="cuda", dtype="float32"),
        load_model(name, device={"": "cpu"}, dtype="float32"),
    )
    assert on_device(target.model)
    for key, weight in host.model.state_dict().items():
        assert torch.equal(target.model.state_dict()[key].cpu(), weight)
    save_sharing_embedding(host.model, tmp_path / "student", embedding_of=name)
    student = load_model(str(tmp_path / "student"), share_with=target)
    assert on_device(student.model)
    assert student.model.get_input_embeddings().weight is target.model.get_input_embeddings().weight


def test_without_accelerate(tmp_path: Path, monkeypatch: Any) -> None:
    from crossdraft.framework.models import placement

    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    assert on_device(load_model(save_model(tmp_path), device="cuda").model)
