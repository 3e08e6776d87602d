"""A target split over two processes generates the same tokens as in one; the tests start these processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file
from tiny_models import save_model
from tiny_runs import cells, output

from crossdraft import UsageError, load_model
from crossdraft.framework import plugins

H = 16
RECIPE = """\
target: {target}
prompts: {prompts}
dtype: float32
device: {device}
max_new_tokens: 12
batch_size: 2
drafters:
  - prompt-lookup
  - {{name: draft-model, model: {drafter}, gamma: 3}}
  - {{name: draft-model-tree, model: {drafter}, branching: [2, 1]}}
  - {{name: medusa, model: {medusa}, gamma: 2}}
  - {{name: eagle, model: {eagle}, gamma: 2}}
verifiers: [token, traversal]
matrix: {{temperature: [1.0]}}
"""


def test_split_target_outside_of_command_raises(tmp_path: Path, monkeypatch: Any) -> None:
    target = save_model(tmp_path / "target")
    with pytest.raises(UsageError, match="torchrun --nproc-per-node N -m crossdraft"):
        load_model(target, device="tp")
    for key, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UsageError, match="supported by the crossdraft command only"):
        load_model(target, device="tp")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: Any, write_prompts: Any) -> dict[str, str]:
    root = tmp_path_factory.mktemp("split")
    results = {
        "target": save_model(root / "target", heads=(4, 2), hidden=H),
        "drafter": save_model(root / "drafter", heads=(4, 2), hidden=H, seed=1),
        "prompts": write_prompts(root / "prompts.jsonl", n=4),
    }
    torch.manual_seed(2)
    medusa = {}
    for i in range(2):
        medusa |= {f"{i}.0.linear.weight": torch.randn(H, H) * 0.1, f"{i}.0.linear.bias": torch.zeros(H)}
    results["medusa"] = _heads(root / "medusa", medusa, {"medusa_num_heads": 2, "medusa_num_layers": 1})
    sizes = {"q_proj": (H, H), "k_proj": (H // 2, H), "v_proj": (H // 2, H), "o_proj": (H, H)}
    eagle = {f"layers.0.self_attn.{name}.weight": torch.randn(size) * 0.3 for name, size in sizes.items()}
    for name, size in {"gate": (24, H), "up": (24, H), "down": (H, 24)}.items():
        eagle[f"layers.0.mlp.{name}_proj.weight"] = torch.randn(size) * 0.3
    eagle |= {"layers.0.post_attention_layernorm.weight": torch.ones(H), "fc.weight": torch.randn(H, 2 * H) * 0.3}
    config = json.loads((root / "target" / "config.json").read_text(encoding="utf-8"))
    results["eagle"] = _heads(root / "eagle", eagle, {**config, "num_hidden_layers": 1})
    return results


def _heads(directory: Path, tensors: dict[str, Any], config: dict[str, Any]) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


def _crossdraft(arguments: list[str], cwd: Path, processes: int = 1) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(start if processes > 1 else []), "-m", "crossdraft", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def _run(directory: Path, text: str, processes: int, *more: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    (directory / "recipe.yaml").write_text(text, encoding="utf-8")
    return _crossdraft(["run", "recipe.yaml", "--untimed", *more], directory, processes)


@pytest.mark.slow
def test_two_processes_match_one_and_reuse_run(tmp_path: Path, paths: dict[str, str]) -> None:
    """All kinds of drafters: chains, trees, heads on hidden states, tables; only one process writes files."""
    one = _run(tmp_path / "one", RECIPE.format(device="cpu", **paths), 1)
    assert one.returncode == 0, one.stderr
    two = _run(tmp_path / "two", RECIPE.format(device="tp", **paths), 2)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("draft-model-tree") == one.stdout.count("draft-model-tree")  # one table
    assert two.stderr.count("recipe: 10 cells in 1 group") == 1
    directories = [{path.name.rpartition("_")[0]: path for path in cells(tmp_path / name)} for name in ("one", "two")]
    assert directories[0].keys() == directories[1].keys() and len(directories[0]) == 10
    for name, path in directories[0].items():
        assert output(path) == output(directories[1][name]), name
        separate, split = _steps(path), _steps(directories[1][name])
        survival = [[row.pop("survival") for row in rows] for rows in (separate, split)]
        assert separate == split, name
        assert survival[0] == pytest.approx(survival[1], abs=1e-4, nan_ok=True), name
    head = json.loads((next(iter(directories[1].values())) / "config.json").read_text(encoding="utf-8"))
    assert head["provenance"]["device"].endswith("split over 2 processes")
    repeat = _run(tmp_path / "two", RECIPE.format(device="tp", **paths), 2)
    assert repeat.returncode == 0 and "reusing 10 cells" in repeat.stderr


def _steps(cell: Path) -> list[dict[str, Any]]:
    return parquet.read_table(cell / "steps.parquet").drop_columns(["cell"]).to_pylist()


@pytest.mark.slow
def test_unsupported_split_target_options_raise(tmp_path: Path, paths: dict[str, str]) -> None:
    def sentence(text: str, processes: int = 2) -> str:
        done = _run(tmp_path, text, processes)
        assert done.returncode
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("crossdraft: error: ")]
        return line

    text = RECIPE.format(device="tp", **paths)
    if "early-exit" in plugins.entries("drafters"):
        early = text.replace("prompt-lookup", "{name: early-exit, exit_layer: 1}")
        assert "not part of its target" in sentence(early)
    odd = save_model(tmp_path / "odd", heads=(4, 1))
    assert "num_key_value_heads" in sentence(text.replace(paths["target"], odd))
    assert "device tp" in sentence(text.replace("device: tp", "device: cpu"))


@pytest.mark.slow
def test_process_that_dies_ends_all(tmp_path: Path, paths: dict[str, str]) -> None:
    """The second process exits in the middle of a pass: no deadlock, and files on disk are complete."""
    text = RECIPE.format(device="tp", **paths)
    (tmp_path / "sitecustomize.py").write_text(DYING, encoding="utf-8")
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        done = _run(tmp_path, text, 2)
    finally:
        del os.environ["PYTHONPATH"]
    assert done.returncode
    assert "process 2 of 2: RuntimeError: no memory left" in done.stderr


DYING = """\
import os
if os.environ.get("RANK") == "1":
    import transformers.models.llama.modeling_llama as llama
    forward, passes = llama.LlamaMLP.forward, []
    def fail(self, x):
        passes.append(1)
        if len(passes) == 60:
            raise RuntimeError("no memory left")
        return forward(self, x)
    llama.LlamaMLP.forward = fail
"""
