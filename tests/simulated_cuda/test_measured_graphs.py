"""Graphs of measured cells: a warm-up captures every shape, and no piece makes a capture or lacks one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from crossdraft_simulated_cuda import device
from drafter_cases import pytest_generate_tests, with_files, write_all_heads  # noqa: F401  (a hook)
from tiny_models import save_model

from crossdraft import load_model
from crossdraft.framework.bench.cells import cell_runner
from crossdraft.framework.bench.cells.cell_runner import Cell
from crossdraft.framework.bench.matrix import load_recipe
from crossdraft.framework.bench.run import run as run_recipe
from crossdraft.framework.cli.cost import pass_timing
from crossdraft.framework.lm import graph_buckets
from crossdraft.framework.lm.cuda_graphs import missed_passes

pytestmark = pytest.mark.simulated
QUICK = ("TestPEagle",)


class Bench:
    """Runs recipes of a tiny target with heads, and counts captures.

    Attributes:
        captures: graphs captured by warm-ups and in pieces.
    """

    def __init__(self, root: Path, length: int, monkeypatch: Any):
        self.root, self.captures, measure = root, [0, 0], Cell.run
        self.target = save_model(root / "target", layers=4, context=length)
        self.small = save_model(root / "small", seed=2, width=64, context=length)
        self.heads = write_all_heads(root / "heads", load_model(self.target, device="cpu", dtype="float32").model)
        lines = [" ".join(f"w{5 + (k * k + i) % 12}" for k in range(n)) for i, n in enumerate((length - 20, 1))]
        (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))

        def watched(cell: Cell, piece: Any) -> Any:
            with device.counting() as counts:
                result = measure(cell, piece)
            self.captures[1] += counts.captures
            return result

        monkeypatch.setattr(Cell, "run", watched)

    def __call__(self, *drafters: dict[str, Any]) -> list[Any]:
        """Measure a cell for each drafter beside plain decoding."""
        data = {"target": self.target, "prompts": str(self.root / "prompts.jsonl"), "max_new_tokens": 6}
        data |= {"dtype": "float32", "device": "cuda", "sampling": {"temperature": 0}}
        recipe = self.root / "recipe.yaml"
        recipe.write_text(json.dumps(data | {"drafters": drafters, "verifiers": ["greedy"], "batch_size": 2}))
        with device.counting() as counts:
            outcome = run_recipe(load_recipe(str(recipe)), self.root / "runs", log=None)
        results, self.notes = outcome.results, outcome.notes
        self.captures[0] = counts.captures
        others = [drafter for drafter in drafters if drafter != {"name": "none"}]
        assert len(results) == len(others) + 1 and not any(result.error for result in results)
        return [result.metrics for result in results]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: Any) -> Bench:
    monkeypatch.setattr(graph_buckets, "BUCKET", 64)
    return Bench(tmp_path, 96, monkeypatch)


def four(bench: Bench) -> list[dict[str, Any]]:
    """Two chains and two trees, of heads that read other hidden layers: the target has more passes than for one."""
    eagle = {"name": "eagle", "model": str(bench.heads / "eagle")}
    eagle3 = {"name": "eagle3", "model": str(bench.heads / "eagle3"), "layers": [2, 3, 1]}
    return [
        {**eagle, "gamma": 3},
        {**eagle, "tree": "static", "branching": [2, 2, 1]},
        {**eagle3, "gamma": 5},
        {**eagle3, "tree": "dynamic", "depth": 3, "top_k": 2, "nodes": 6},
    ]


def check(bench: Bench, *drafters: dict[str, Any]) -> None:
    metrics = bench(*drafters)
    assert bench.captures[0] > 0 and bench.captures[1] == 0
    assert [item.missed_graphs for item in metrics] == [0] * len(metrics)
    assert not any("graph" in item.withheld for item in metrics)


def test_four_cells(bench: Bench) -> None:
    check(bench, *four(bench))
    assert bench.captures[0] > 50


@pytest.mark.slow
def test_four_cells_of_4096_slots(tmp_path: Path, monkeypatch: Any) -> None:
    bench = Bench(tmp_path, 4096, monkeypatch)
    check(bench, *four(bench))
    assert bench.captures[0] > 300


def test_every_drafter(bench: Bench, case: str) -> None:
    drafter = with_files(case, bench.heads, bench.small)
    if drafter["name"] == "universal":
        pytest.xfail("the end of the text, which is tokenized anew, may be longer than any draft")
    check(bench, drafter)


def test_pieces_that_capture_are_detected(bench: Bench, monkeypatch: Any) -> None:
    """A warm-up that captures nothing leaves every measured pass without a graph; speed-ups are withheld."""
    record = cell_runner.recording
    monkeypatch.setattr(cell_runner, "recording", lambda limits: record(None))
    metrics = bench(four(bench)[0])
    assert all(item.missed_graphs for item in metrics)
    assert all(item.withheld and item.speed_up is None for item in metrics)
    assert any("passes ran without a CUDA graph" in note for note in bench.notes)


def test_costs_are_those_of_captured_passes() -> None:
    """The first repetition captures all points; timed repetitions replay."""
    from crossdraft.testing import TinyModel

    missed, counts = missed_passes(), list[int]()
    with device.counting() as counted:
        pass_timing.measure_passes(
            TinyModel.model("cuda"), batch_sizes=(1, 2), widths=(1, 3), contexts=(8, 40), repeats=2,
            advance=lambda n: counts.append(counted.captures),
        )  # fmt: skip
    points = 8
    assert len(counts) == 3 * points and counts[0] > 0 and counts[points - 1] == counts[-1]
    assert missed_passes() == missed
