"""No graphs are captured during measurements: runs of the bench with fake CUDA graphs."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fake_cuda_graphs import Recorder
from tiny_runs import ONE_GROUP, cells, output

from crossdraft.framework.api import build
from crossdraft.framework.bench.cells import cell_runner
from crossdraft.framework.bench.cells.cell_runner import Cell
from crossdraft.framework.cli.cost import pass_timing
from crossdraft.framework.lm import forward_pass, graph_buckets, ragged_lm
from crossdraft.framework.lm.cuda_graphs import CudaGraphRunner

#: Two chains and two trees, whose passes of the target come in more shapes than one cell's.
FOUR = (
    "drafters=[{{name: prompt-lookup, gamma: 6}}, {{name: draft-model, model: {same}, gamma: 3}}, "
    "{{name: draft-model-tree, model: {same}, branching: [2, 2, 1]}}, "
    "{{name: draft-model-dynamic-tree, model: {same}, depth: 3, top_k: 2, nodes: 6}}]"
)
DRAFTERS = "drafters=[{{name: prompt-lookup, gamma: 6}}, {{name: draft-model, model: {same}, gamma: 3}}]"


@pytest.fixture
def recorded(monkeypatch: Any) -> list[CudaGraphRunner]:
    results: list[CudaGraphRunner] = []

    def runner(model: Any) -> CudaGraphRunner:
        results.append(CudaGraphRunner(Recorder(), type(model).__name__))
        return results[-1]

    for module in (forward_pass, ragged_lm, build):
        monkeypatch.setattr(module, "runner_for", runner)
    monkeypatch.setattr(graph_buckets, "BUCKET", 16)
    return results


def run(
    bench: Any,
    recorded: list[CudaGraphRunner],
    monkeypatch: Any,
    models: dict[str, str],
    drafters: str = DRAFTERS,
    verifier: str = "token",
) -> tuple[int, int]:
    """Numbers of graphs captured before and during pieces."""
    measure, counts = Cell.run, [0, 0]

    def watched(self: Cell, piece: Any) -> Any:
        before = sum(map(len, recorded))
        result = measure(self, piece)
        counts[0] = max(counts[0], before)
        counts[1] += sum(map(len, recorded)) - before
        return result

    monkeypatch.setattr(Cell, "run", watched)
    code, _, err = bench(*ONE_GROUP, f"verifiers=[{verifier}]", "batch_size=2", drafters.format(**models))
    assert code == 0, err
    return counts[0], counts[1]


def test_no_recording_during_pieces(
    bench: Any, recorded: list[CudaGraphRunner], monkeypatch: Any, models: dict[str, str], tmp_path: Path
) -> None:
    warm_up, measured = run(bench, recorded, monkeypatch, models)
    assert warm_up > 0 and measured == 0
    assert sum(item.missed for item in recorded) == 0, "every shape that came had been recorded"
    assert all(output(directory) for directory in cells(tmp_path))


def test_cells_do_not_drop_recordings_of_each_other(
    bench: Any, recorded: list[CudaGraphRunner], monkeypatch: Any, models: dict[str, str]
) -> None:
    monkeypatch.setattr(graph_buckets, "BUCKET", 1)  # as many lengths as slots of thousands of tokens have
    measured = run(bench, recorded, monkeypatch, models, FOUR, "traversal")[1]
    assert measured == 0 and sum(item.missed for item in recorded) == 0
    assert max(map(len, recorded)) > 150


def test_warm_up_without_prediction_is_detected(
    bench: Any, recorded: list[CudaGraphRunner], monkeypatch: Any, models: dict[str, str]
) -> None:
    monkeypatch.setattr(cell_runner, "recording", lambda upcoming: nullcontext())
    assert run(bench, recorded, monkeypatch, models)[1] > 0


def test_passes_without_a_graph_are_stored_and_noted(
    bench: Any, recorded: list[CudaGraphRunner], monkeypatch: Any, models: dict[str, str], tmp_path: Path
) -> None:
    """A warm-up that records nothing leaves every measured pass without a graph."""
    record = cell_runner.recording
    monkeypatch.setattr(cell_runner, "recording", lambda limits: record(None))
    run(bench, recorded, monkeypatch, models)
    (summary,) = tmp_path.glob("runs/*/summary.md")
    assert "passes ran without a CUDA graph" in summary.read_text(encoding="utf-8")
    stored = [json.loads((cell / "metrics.json").read_text())["metrics"] for cell in cells(tmp_path)]
    missed = [metrics["missed_graphs"] for metrics in stored]
    assert all(missed) and sum(missed) <= sum(item.missed for item in recorded)
    assert all(metrics["withheld"] and metrics["speed_up"] is None for metrics in stored)


def test_costs_are_those_of_recorded_passes(tiny_model: Any, recorded: list[CudaGraphRunner], monkeypatch: Any) -> None:
    """The first repetition captures all points; timed repetitions replay."""
    counts: list[int] = []
    advance = lambda n: counts.append(sum(item._recorder.recorded for item in recorded))  # type: ignore[union-attr] # noqa: E731
    pass_timing.measure_passes(
        tiny_model("llama"), batch_sizes=(1, 2), widths=(1, 3), contexts=(8, 40), repeats=2, advance=advance
    )
    points = 8
    assert len(counts) == 3 * points and counts[0] > 0 and counts[points - 1] == counts[-1]
    assert sum(item.missed for item in recorded) == 0
