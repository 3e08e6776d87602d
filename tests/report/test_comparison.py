"""``crossdraft compare``: differences of synthetic runs, and runs that cannot be compared."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_runs import RECIPE, finished_run, on_disk

from crossdraft.framework.bench.group_runner import compare_group
from crossdraft.framework.cli import main as cli
from crossdraft.framework.cost.load_run import FinishedRun
from crossdraft.framework.errors import UsageError
from crossdraft.framework.metrics.cell_metrics import measure, prompts_of_pieces
from crossdraft.framework.metrics.pieces import Piece
from crossdraft.framework.report.comparison import compare_runs, comparison_text

SOME = RECIPE | {"name": "some", "matrix": {"gamma": [3], "batch_size": [1, 4]}}


def run_of(directory: Path, **changes: Any) -> FinishedRun:
    return finished_run(directory, SOME | changes, tokens=60)


def slower(run: FinishedRun, rule: str, factor: float) -> None:
    """Multiply the time of a verifier."""
    for result in run.summary.results:
        if result.config.verifier.name != rule or result.config.is_baseline:
            continue
        result.pieces = [slowed(piece, factor) for piece in result.pieces]
        old, result.metrics = result.metrics, measure(result.records, result.pieces, gamma=3, depth=3)
        assert old is not None and old.block_efficiency == result.metrics.block_efficiency
    for key in {result.config.group for result in run.summary.results}:
        compare_group([result for result in run.summary.results if result.config.group == key])


def slowed(piece: Piece, factor: float) -> Piece:
    """Multiply the time of a step by lengthening its verification."""
    rows = {
        s: [[*r[:2], round(r[2] + (factor - 1) * sum(r[:4])), *r[3:]] for r in group]
        for s, group in piece.steps.items()
    }
    return replace(piece, seconds={k: factor * s for k, s in piece.seconds.items()}, steps=rows)


def test_run_with_itself(tmp_path: Path) -> None:
    """All differences are 0."""
    result = compare_runs(run_of(tmp_path / "a"), run_of(tmp_path / "b", name="other"))
    assert len(result.pairs) == 10 and result.only == ([], []) and result.remarks == []
    for pair in result.pairs:
        assert pair.difference is not None and (pair.difference.value, pair.difference.low) == (0, None)
        assert pair.ratio is not None and pair.ratio.value == 1 and pair.differs == []


def test_known_differences(tmp_path: Path) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    slower(b, "block", 2.0)
    for pair in compare_runs(a, b).pairs:
        assert pair.ratio is not None
        assert pair.ratio.value == pytest.approx(0.5 if pair.verifier == "block" else 1.0, rel=0.03)
    result = b.summary.results[2]
    assert result.config.verifier.name == "block" and result.metrics is not None
    assert result.metrics.speed_up is not None and result.metrics.speed_up.low is not None

    # With a factor of its own for every piece, that is in the interval.
    factors = np.linspace(1.5, 2.5, len(result.pieces))
    result.pieces = [slowed(piece, factor / 2) for piece, factor in zip(result.pieces, factors, strict=True)]
    wide = []
    for pair in compare_runs(a, b).pairs:
        assert pair.ratio is not None and pair.ratio.low is not None and pair.ratio.high is not None
        assert pair.ratio.low < pair.ratio.value < pair.ratio.high
        if pair.ratio.high > 1.1 * pair.ratio.value:
            assert 1 / 2.5 < pair.ratio.value < 1 / 1.5
            wide.append(pair.verifier)
    assert set(wide) == {"block"}, "pairs of a group share what a verification takes"


def test_differences_in_block_efficiency(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", matrix={"gamma": [2], "batch_size": [1]})
    b = run_of(tmp_path / "b", matrix={"gamma": [3], "batch_size": [1]})
    result = compare_runs(a, b)
    assert len(result.pairs) == 5 and all(pair.differs == ["gamma 2 / 3"] for pair in result.pairs)
    for pair in result.pairs:
        assert pair.difference is not None and pair.difference.low is not None
        one, other = pair.block_efficiency
        assert one is not None and other is not None
        assert pair.difference.value == pytest.approx(other.value - one.value, abs=0.06)  # the last steps of a text
    text = comparison_text(result)
    assert text.startswith(f"A: {tmp_path / 'a'}\nB: {tmp_path / 'b'}\n\ntemperature 1, batch size 1\n")
    assert text.count("gamma 2 / 3") == 5


def test_cells_of_one_side(tmp_path: Path) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", dtype="bfloat16", seed=7)
    b.summary.results = [r for r in b.summary.results if r.config.verifier.name != "spectr"]
    a.summary.results = [r for r in a.summary.results if r.config.is_baseline or r.config.batch_size == 1]
    result = compare_runs(a, b)
    assert result.only[0] == ["draft-model-iid × spectr (temperature 1, batch size 1)"]
    assert result.only[1][0] == "prompt-lookup × token (temperature 1, batch size 4)" and len(result.only[1]) == 4
    assert len(result.pairs) == 4
    assert "the runs differ in dtype: auto in A, bfloat16 in B" in result.remarks
    assert "the runs differ in seed: 0 in A, 7 in B" in result.remarks
    assert "- only in A: draft-model-iid × spectr" in comparison_text(result, "markdown")


def only(run: FinishedRun, count: int) -> FinishedRun:
    """The run on the first prompts, a piece each."""
    for result in run.summary.results:
        result.records = [r for r in result.records if r.prompt < count]
        result.responses, result.pieces = result.responses[:count], result.pieces[:count]
        assert result.metrics is not None
        result.metrics = measure(result.records, result.pieces, gamma=3, depth=result.metrics.depth)
    for key in {result.config.group for result in run.summary.results}:
        compare_group([result for result in run.summary.results if result.config.group == key])
    return run


def test_runs_that_share_prompts(tmp_path: Path) -> None:
    """Both sides are of the prompts that both have; the other way round, too."""
    for name, counts in (("x", (6, 4)), ("y", (4, 6))):
        a, b = (only(run_of(tmp_path / f"{name}{side}"), n) for side, n in zip("ab", counts, strict=True))
        result = compare_runs(a, b)
        assert result.remarks[0].startswith(f"compared on the 4 prompts that both runs have, of {counts[0]} in A")
        for pair in result.pairs:
            assert pair.prompts == 4 and pair.difference is not None and pair.difference.value == 0
            assert pair.block_efficiency[0] == pair.block_efficiency[1]
            assert (
                pair.ratio is not None and pair.ratio.low is not None and pair.ratio.value == pytest.approx(1, abs=0.1)
            )
    b.summary.results[0].responses[0]["prompt_tokens"] = 41
    with pytest.raises(UsageError, match="the same ids, but different texts"):
        compare_runs(a, b)


def test_pieces_in_another_order(tmp_path: Path) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    pieces = [prompts_of_pieces(r.records, r.pieces) for r in (a.summary.results[1], *b.summary.results)]
    assert pieces[0] == [frozenset([i]) for i in range(6)]
    for result in b.summary.results:
        order = {p: [r for r in result.records if r.prompt == p] for p in reversed(range(6))}
        result.records = [r for records in order.values() for r in records]
        result.pieces = result.pieces[::-1]
    for pair in compare_runs(a, b).pairs:
        assert pair.ratio is not None and pair.ratio.low is not None and pair.ratio.value == pytest.approx(1)


def test_different_pieces_have_no_interval(tmp_path: Path) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    for result in b.summary.results:  # two prompts a piece
        result.pieces = [
            replace(
                one,
                emitted=one.emitted + other.emitted,
                seconds={phase: s + other.seconds[phase] for phase, s in one.seconds.items()},
                steps={shape: [*rows, *other.steps[shape]] for shape, rows in one.steps.items()},
            )
            for one, other in zip(result.pieces[::2], result.pieces[1::2], strict=True)
        ]
    slower(b, "block", 3.0)
    actual = compare_runs(a, b)
    assert all(pair.ratio is not None and pair.ratio.low is None for pair in actual.pairs)
    (remark,) = actual.remarks
    assert remark.startswith("B ÷ A has no interval if the runs divide the prompts into different pieces")
    assert all(pair.difference is not None and pair.difference.value == 0 for pair in actual.pairs)


def test_incomparable_runs(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a")
    with pytest.raises(UsageError, match="is given twice; give two different runs"):
        compare_runs(a, run_of(tmp_path / "b" / ".." / "a"))
    c = run_of(tmp_path / "c")
    for result in c.summary.results:
        result.records = [replace(r, question_id=f"other {r.prompt}") for r in result.records]
    with pytest.raises(UsageError, match="their prompts differ, 6 of builtin and 6 of builtin"):
        compare_runs(a, c)
    d = run_of(tmp_path / "d")
    for run, digest in ((a, "1"), (d, "2")):
        for result in run.summary.results:
            result.provenance = {**result.provenance, "prompts": digest}
    with pytest.raises(UsageError, match="the same ids, but different texts"):
        compare_runs(a, d)
    e = run_of(tmp_path / "e", drafters=[{"name": "eagle3", "model": "org/head"}], verifiers=["token"], exclude=[])
    with pytest.raises(UsageError, match=r"have no pair in common; crossdraft report shows the pairs of each"):
        compare_runs(run_of(tmp_path / "f"), e)


def test_command(tmp_path: Path, capsys: Any) -> None:
    a, b = (on_disk(run_of(tmp_path / name, matrix={"gamma": [2], "batch_size": [1]})) for name in "ab")
    assert cli.main(["compare", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert (
        " ".join(text.split()).count("prompt-lookup token")
        and "+0.00" in text
        and max(map(len, text.splitlines())) <= 130
    )
    assert cli.main(["compare", str(a), str(b), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["runs"] == [str(a), str(b)] and len(record["pairs"]) == 5
    assert record["pairs"][0]["ratio"]["value"] == 1 and record["pairs"][0]["speed_up"][0]["low"] > 0
    assert cli.main(["compare", str(a), str(tmp_path / "gone")]) == 2
    assert "is not a directory" in capsys.readouterr().err
