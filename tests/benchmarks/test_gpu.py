"""``benchmarks/gpu.py`` on a CPU: every part on tiny models, with the packages of a bare GPU machine; its report."""

import json
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from companions import has_command

from crossdraft.framework.cli import main as cli

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
#: Run a script without an installed crossdraft and without packages that these do not require.
BARE = """
import runpy, sys
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
checkout, find = {"crossdraft"}, PathFinder.find_spec

def find_spec(name, path=None, target=None):
    spec = None if name in missing - checkout else find(name, path, target)
    return None if name in checkout and spec and "site-packages" in (spec.origin or "") else spec

PathFinder.find_spec = find_spec
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(getattr(f, "__module__", ""))]
assert {"pytest", "hypothesis"} <= missing
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def script() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # where a script finds the module beside it
        yield runpy.run_path(str(SCRIPT)) | vars(sys.modules["gpu_bench"])


@pytest.mark.slow
def test_every_part_runs_in_a_bare_environment(script: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    options = {"--device": "cpu", "--limit": 1, "--max-new-tokens": 40, "--gamma": 2, "--batch": 2, "--out": tmp_path}
    words = ["--tiny", *(str(word) for option in options.items() for word in option)]
    command = [sys.executable, "-c", BARE, str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert {name: part["status"] for name, part in report["parts"].items()} == dict.fromkeys(script["PARTS"], "done")
    assert all(table["rows"] for name, part in report["parts"].items() for table in part["tables"][:1]), report
    numbers = {name for name, *_ in report["numbers"]}
    on_cuda = {"waits of the host in a step", "verify block compiled, share of a step"}
    assert script["BOUNDS"].keys() - numbers == on_cuda
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert all(f"\n## {name} (done, " in text for name in script["PARTS"]) and "\n## Numbers\n" in text

    if not has_command("advise"):
        return
    from test_imports import VLLM_LOG

    monkeypatch.chdir(tmp_path)
    (tmp_path / "vllm.log").write_text(VLLM_LOG, encoding="utf-8")
    traits = ("--drafter", "draft-model", "--verifier", "token", "--temperature", "1", "--batch-size", "1,2")
    costs = ("--cost", "cost.json", "--draft-cost", "draft-cost.json")
    assert cli.main(["advise", "vllm.log", *costs, *traits]) == 0


def test_report_survives_parts_that_fail_or_run_out_of_time(script: dict[str, Any], tmp_path: Path) -> None:
    limits = {}

    def failing(bench: Any) -> None:
        raise RuntimeError("CUDA error\nsecond line")

    def endless(bench: Any) -> None:
        table = bench.report.table("rows", ["n"])
        bench.report.add(table, 7)
        report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
        assert report["parts"]["endless"]["status"] == "running"  # a killed process leaves this
        assert report["parts"]["endless"]["tables"][0]["rows"] == [[7]]
        while True:
            with suppress(Exception):  # code that catches everything does not outlive the limit
                time.sleep(1)

    def last(bench: Any) -> None:
        bench.report.number("plain 7B, share of the memory's limit", 0.6)

    bench = SimpleNamespace(report=script["Report"](tmp_path, "heading"), device=torch.device("cpu"))
    part = bench.report.part
    bench.report.part = lambda name, seconds: limits.update({name: seconds}) or part(name, seconds)
    script["run"](bench, {"endless": (endless, 0.01), "failing": (failing, 0.5), "last": (last, 0.49)}, 30)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    statuses = {name: part["status"] for name, part in report["parts"].items()}
    assert statuses == {"endless": "out of time", "failing": "RuntimeError: CUDA error", "last": "done"}
    assert limits["failing"] <= 15.3 < limits["last"]  # 14.7 s, and the time that the second did not use
    assert "MISSED: at least 0.7" in (tmp_path / "report.md").read_text(encoding="utf-8")


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
