"""Directories of heads with more files than the heads: copies, states of a training, other names of the weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from crossdraft.framework.errors import ModelError
from crossdraft.framework.models.checkpoint import load_checkpoint
from crossdraft.framework.models.digests import weights_sha256

HEADS = {"fc.weight": torch.arange(6.0).view(2, 3), "norm.weight": torch.ones(3)}
COPY = {name: tensor + 100 for name, tensor in HEADS.items()}
STATE = {"exp_avg.0": torch.ones(4)}
INDEX = {name: "z.safetensors" for name in HEADS}


def write(directory: Path, files: dict[str, dict[str, Tensor]], index: dict[str, str] | None = None) -> str:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    for name, tensors in files.items():
        if name.endswith("safetensors"):
            save_file(tensors, directory / name)
        else:
            torch.save(tensors, directory / name)
    if index:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return str(directory)


@pytest.mark.parametrize(
    "files, index, left_out",
    [
        ({"model.safetensors": HEADS, "model-old.safetensors": COPY}, None, "model-old"),
        ({"model.safetensors": HEADS, "a.safetensors": {**COPY, "more": STATE["exp_avg.0"]}}, None, "a.safetensors"),
        ({"z.safetensors": HEADS, "model.safetensors": COPY}, INDEX, "model.safetensors is left out"),
        ({"z.safetensors": HEADS, "a.safetensors": COPY}, INDEX, "a.safetensors"),
        ({"pytorch_model.bin": HEADS, "best.pt": COPY}, None, "best.pt"),
        ({"model.safetensors": HEADS, "pytorch_model.bin": COPY}, None, ""),
        ({"model.safetensors": HEADS, "training_state.safetensors": STATE}, None, ""),
        ({"model.safetensors": HEADS, "optimizer.safetensors": STATE}, None, ""),
        ({"model.safetensors": HEADS, "consolidated.safetensors": STATE}, None, ""),
        ({"pytorch_model.bin": HEADS, "optimizer.pt": STATE, "training_args.bin": STATE}, None, ""),
        ({"pytorch_model.bin": HEADS, "training_state.safetensors": STATE}, None, ""),
    ],
)
def test_other_files_are_left_out(
    files: dict[str, Any], index: dict[str, str] | None, left_out: str, tmp_path: Path, caplog: Any
) -> None:
    tensors = load_checkpoint(write(tmp_path / "heads", files, index)).tensors
    assert tensors.keys() == HEADS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in HEADS.items())
    assert left_out in caplog.text and bool(caplog.text) == bool(left_out)


def test_file_beside_an_index_adds_its_tensors(tmp_path: Path) -> None:
    path = write(
        tmp_path / "heads", {"z.safetensors": HEADS, "mtp.safetensors": {"mtp.norm.weight": torch.ones(3)}}, INDEX
    )
    assert load_checkpoint(path).tensors.keys() == {*HEADS, "mtp.norm.weight"}


def test_two_files_without_precedence_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "heads", {"a.safetensors": HEADS, "b.safetensors": COPY})
    with pytest.raises(ModelError, match=r"contains fc\.weight in several files \(b\.safetensors is one\)"):
        load_checkpoint(path)


def test_missing_tensor_of_an_index_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "heads", {"z.safetensors": HEADS, "a.safetensors": COPY}, {**INDEX, "gone": "z.safetensors"}
    )
    checkpoint = load_checkpoint(path)
    with pytest.raises(ModelError, match="gone is missing"):
        checkpoint.tensors["gone"]


def test_digest_is_that_of_the_weights(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", {"model.safetensors": HEADS})
    trained = write(tmp_path / "trained", {"model.safetensors": HEADS, "training_state.safetensors": STATE})
    assert weights_sha256(Path(plain)) == weights_sha256(Path(trained))
