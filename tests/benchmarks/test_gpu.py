"""``benchmarks/gpu.py`` on a CPU: every part on tiny models, with the packages of a bare GPU machine; its report."""

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from companions import has_command

from crossdraft.framework.cli import main as cli

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
#: Run a script with crossdraft, but without packages that these do not require.
BARE = """
import re, runpy, sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

todo, kept = ["torch", "transformers", "pydantic", "pluggy", "tabulate"], set()
while todo:
    name = canonicalize_name(todo.pop())
    if name not in kept:
        kept.add(name)
        try:
            needs = map(Requirement, requires(name) or [])
        except PackageNotFoundError:  # of another platform
            continue
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
missing = {m for m, names in packages_distributions().items() if not kept & set(map(canonicalize_name, names))}
missing -= {"crossdraft"}
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: None if name in missing else find(name, path, target)
editable = [(f, str(getattr(f, "__module__", ""))) for f in sys.meta_path]
sys.meta_path[:] = [f for f, name in editable if "editable" not in name or re.search(r"_crossdraft_\\d", name)]
assert {"pytest", "hypothesis"} <= missing
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def script() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # where a script finds the modules beside it
        yield runpy.run_path(str(SCRIPT))


@pytest.mark.slow
def test_every_part_runs_in_a_bare_environment(script: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    options = {"--device": "cpu", "--models": "SmolLM2 experts", "--gamma": 2, "--batch": 2, "--out": tmp_path}
    words = ["--tiny", *(word for option in options.items() for part in option for word in str(part).split())]
    command = [sys.executable, "-c", BARE, str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert not [row for row in rows if "error" in row]
    assert {row["part"] for row in rows} == script["PARTS"].keys()
    strategies = [row for row in rows if row["part"] == "strategies"]
    assert len(strategies) == 2 * len(script["PAIRS"])
    assert all(0 < row["values"]["% outside"] < 100 and row["values"]["tok/s"] > 0 for row in strategies)
    assert "report.md; complete" in done.stdout
    second = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines() == lines  # no row is measured again
    assert "report.md; complete" in second.stdout

    if not has_command("advise"):
        return
    from test_imports import VLLM_LOG

    monkeypatch.chdir(tmp_path)
    (tmp_path / "vllm.log").write_text(VLLM_LOG, encoding="utf-8")
    traits = ("--drafter", "draft-model", "--verifier", "token", "--temperature", "1", "--batch-size", "2")
    costs = ("--cost", "cost-experts.json", "--draft-cost", "cost-SmolLM2.json")
    assert cli.main(["advise", "vllm.log", *costs, *traits]) == 0


class Killed(BaseException):
    """The process ends here."""


def test_rerun_measures_what_failed_or_was_not_finished(script: dict[str, Any], tmp_path: Path) -> None:
    calls: list[str] = []
    broken = True

    def quick() -> dict[str, Any]:
        calls.append("quick")
        return {"n": 1}

    def failing() -> dict[str, Any]:
        calls.append("failing")
        if broken:
            raise RuntimeError("CUDA error\nsecond line")
        return {"n": 2}

    def endless() -> dict[str, Any]:
        calls.append("endless")
        if broken:
            raise Killed
        return {"n": 3}

    def rows(bench: Any) -> Iterator[Any]:
        yield {"row": "quick"}, quick
        yield {"row": "failing"}, failing
        yield {"row": "endless"}, endless

    def run() -> bool:
        return script["run_parts"](None, script["Report"](tmp_path, "a GPU"), {"part": rows})

    with pytest.raises(Killed):
        run()
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["key"]["row"], row.get("values"), row.get("error")) for row in written] == [
        ("quick", {"n": 1}, None),
        ("failing", None, "RuntimeError: CUDA error"),
    ]
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"part": "part", "key"')  # cut off by a kill
    broken = False
    calls.clear()
    assert run()
    assert calls == ["failing", "endless"]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## part" in text and "a GPU" in text and "CUDA error" not in text


@pytest.mark.simulated
def test_strategies_on_the_simulated_device(script: dict[str, Any], tmp_path: Path) -> None:
    """Passes, strategies and cost curves of a CUDA device, with graphs; fused layers if Liger is installed."""
    options = ["--device", "cuda", "--tiny", "--models", "SmolLM2", "--batch", "2", "--gamma", "2"]
    script["main"]([*options, "--parts", "passes", "strategies", "cost", "decoding", "--out", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    failed = [row for row in rows if "error" in row and "were disturbed" not in row["error"]]  # by a busy machine
    assert all("flex_attention" in row["error"] and row["key"]["layers"] == "flex" for row in failed)  # needs Triton
    waits = {row["key"]["drafter"]: row["values"]["waits a step"] for row in rows if row["part"] == "strategies"}
    assert waits == {"none": 1, "prompt-lookup": 1, "draft-model": 1, "eagle3": 1}


@pytest.mark.parametrize("tied", [True, False])
def test_untied_embedding_is_not_counted(script: dict[str, Any], tied: bool) -> None:
    """A pass looks up one row of it; as an output head it is read whole."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=100,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    attention, feed_forward, norms, head = 4 * 8 * 8, 3 * 8 * 16, 3 * 8, 100 * 8
    assert script["weights_read"](model) == 4 * (attention + feed_forward + norms + head)
