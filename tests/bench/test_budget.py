"""Time budgets: all pairs measure the blocks that fit, and a later run resumes."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyarrow import parquet
from tiny_runs import ONE_GROUP, cells, output

from crossdraft.framework.bench import budget
from crossdraft.framework.bench.cells.cell_runner import Cell
from crossdraft.framework.bench.cells.conversations import blocks_of
from crossdraft.framework.bench.matrix import expand, load_recipe
from crossdraft.framework.bench.run import run
from crossdraft.framework.cli import main as cli
from crossdraft.framework.cost.load_run import read_run
from crossdraft.framework.cost.summary import Summary
from crossdraft.framework.errors import UsageError
from crossdraft.framework.recipe.durations import seconds_of
from crossdraft.framework.recipe.prompts import Prompt
from crossdraft.framework.report.markdown import page
from crossdraft.framework.report.tables import brief
from crossdraft.framework.runs.state import state_of

SETTINGS = [*ONE_GROUP[:-1], "verifiers=[token]", "drafters=[prompt-lookup]"]
TWO_GROUPS = ["matrix={batch_size: [1, 2]}", *SETTINGS[1:]]


class Clock:
    """Fake clock that advances only while a cell decodes, by `price` seconds per turn."""

    def __init__(self, monkeypatch: Any, price: float = 1.0):
        self.now, self.price, self.order = 0.0, price, list[tuple[str, list[int]]]()
        measured = Cell.run

        def run_(cell: Cell, piece: Any) -> Any:
            self.order.append((cell.config.drafter.name, [c.prompt.index for c in piece]))
            result = measured(cell, piece)
            self.now += self.price * sum(len(c.prompt.turns) for c in piece)
            return result

        monkeypatch.setattr(Cell, "run", run_)

    def __call__(self) -> float:
        return self.now


def run_with_tables(recipe: Any, out: Path, show: Callable[[Summary], Any], **options: Any) -> tuple[Summary, list]:
    """Summary of a run, and what ``show`` returns for the results whenever a table is due."""
    shown: list[Any] = []
    outcome = run(recipe, out, table=lambda outcome: shown.append(show(outcome)), **options)
    return outcome, shown


def prompts_of(outcome: Summary) -> list[list[str]]:
    """Prompts of each cell, in order."""
    return [[r["question_id"] for r in result.responses if not r["turn"]] for result in outcome.results]


def records(directory: Path) -> dict[str, Any]:
    return {d.name: (output(d), parquet.read_table(d / "steps.parquet").to_pylist()) for d in directory.glob("cells/*")}


def test_as_many_blocks_as_fit(recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Two cells, six prompts with eight turns: 16 s, of which 2 s per prompt of one turn and 4 s per prompt of two."""
    clock, lines = Clock(monkeypatch), list[str]()
    request = load_recipe(recipe, [*SETTINGS, "time=9s"])

    def show(now: Summary) -> tuple[list[list[str]], str]:
        return prompts_of(now), brief(now)

    outcome, tables = run_with_tables(request, tmp_path / "runs", show, log=lines.append, clock=clock)
    shown, text = [prompts for prompts, _ in tables], tables[0][1]
    assert text.startswith("so far, 1 of 6 prompts:\n\ntemperature 1, batch size 1")
    assert "prompt-lookup" in text and "BE:" not in text
    assert outcome.exit_code == 0 and outcome.state == "finished" and 5 < clock.now <= 9
    own, other = prompts_of(outcome)
    n = len(own)
    assert own == other and 1 < n < 6
    assert outcome.notes == [f"{n} of 6 prompts (time budget 9s); rerun to resume"]
    assert clock.order[0][0] == "none", "plain decoding gives the first estimate"
    counts = [len(a) for a, b in shown if a == b]
    assert counts[0] == 1 and counts == sorted(set(counts)) and len(counts) == len(shown) <= 3
    assert any(
        line.startswith("all 6 prompts take about ") and "within the time budget of 9s; to measure" in line
        for line in lines
    )


def test_table_of_first_group_comes_before_second_group(recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    clock, request = Clock(monkeypatch), load_recipe(recipe, [*TWO_GROUPS, "time=2s"])
    _, tables = run_with_tables(request, tmp_path / "runs", prompts_of, log=None, clock=clock)
    first, whole = tables[0], tables[-1]
    assert len(first) == 2 and len({tuple(cell) for cell in first}) == 1 and len(first[0]) == 2
    assert len(whole) in (2, 4) and whole[:2] == first


def test_interrupt_while_a_table_is_printed(recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    def interrupt(outcome: Summary) -> None:
        raise KeyboardInterrupt

    clock, request = Clock(monkeypatch), load_recipe(recipe, [*SETTINGS, "time=9s"])
    outcome, _ = run_with_tables(request, tmp_path / "runs", interrupt, log=None, clock=clock)
    assert outcome.interrupted and all(result.metrics for result in outcome.results)
    assert any("cut short after block 1 of" in note for note in outcome.notes)


def test_run_ended_by_its_budget_is_finished_and_resumable(recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    whole = run(load_recipe(recipe, SETTINGS), tmp_path / "whole", log=None)
    clock = Clock(monkeypatch)
    cut = run(load_recipe(recipe, [*SETTINGS, "time=5s"]), tmp_path / "runs", log=None, clock=clock)
    assert cut.directory.name == whole.directory.name, "the budget is part of no hash"
    n = len(prompts_of(cut)[0])
    assert n < 6 and state_of(cut.directory).state == "finished"
    assert f"{n} of 6 prompts (time budget 5s)" in state_of(cut.directory).note

    from crossdraft.framework.report.write import write_summary

    write_summary(cut)
    finished = read_run(cut.directory)
    text = page([finished])
    assert f"- note: {n} of 6 prompts (time budget 5s); rerun to resume" in text
    assert f"{n} of 6 (time budget 5s) of " in text  # among the conditions
    kept = {d.name: output(d) for d in cells(tmp_path)}

    lines: list[str] = []
    clock.order.clear()
    more = run(load_recipe(recipe, [*SETTINGS, "time=5s"]), tmp_path / "runs", log=lines.append, clock=clock)
    assert f"resuming: {n} of 6 prompts (time budget 5s)" in "\n".join(lines)
    assert n < len(prompts_of(more)[0]), "every run with a budget measures another block"
    rest = run(load_recipe(recipe, SETTINGS), tmp_path / "runs", log=lines.append, clock=clock)
    request = Counter((name, i) for name, piece in clock.order for i in piece)
    assert set(request.values()) == {1} and len(request) == 2 * (6 - n), "nothing is measured twice"
    assert records(rest.directory) == records(whole.directory) and not list(tmp_path.glob("runs/*/groups/*"))
    assert all(kept[d.name].items() <= output(d).items() for d in cells(tmp_path))
    assert not rest.notes and not any(result.planned for result in rest.results)
    repeat = run(load_recipe(recipe, [*SETTINGS, "time=5s"]), tmp_path / "runs", log=None, clock=clock)
    assert all(result.reused for result in repeat.results) and len(prompts_of(repeat)[0]) == 6


@pytest.mark.parametrize("max_open", [budget.MAX_OPEN_SLOTS, 0])
def test_groups_have_same_prompts(recipe: str, tmp_path: Path, monkeypatch: Any, max_open: int) -> None:
    """Batch sizes 1 and 2, also if a group is closed while the other is measured."""
    monkeypatch.setattr(budget, "MAX_OPEN_SLOTS", max_open)
    request = load_recipe(recipe, [*TWO_GROUPS, "time=26s"])
    clock = Clock(monkeypatch)
    outcome, shown = run_with_tables(request, tmp_path / "runs", prompts_of, log=None, clock=clock)
    assert outcome.exit_code == 0 and len(outcome.results) == 4
    for item in (*shown, prompts_of(outcome)):
        first, *others = map(set, item)
        assert 0 < len(first) < 6 and all(other == first for other in others)
    whole = run(load_recipe(recipe, TWO_GROUPS), tmp_path / "runs", log=None)
    separate = run(load_recipe(recipe, TWO_GROUPS), tmp_path / "alone", log=None)
    assert records(whole.directory) == records(separate.directory)


def test_first_block_is_measured_and_announced(recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A turn takes 20 s: one block, and a warning after its first piece."""
    lines: list[str] = []
    request = load_recipe(recipe, [*SETTINGS, "time=30s"])
    outcome = run(request, tmp_path / "runs", log=lines.append, clock=Clock(monkeypatch, price=20.0))
    assert [len(request) for request in prompts_of(outcome)] == [1, 1]
    (line,) = [line for line in lines if "time budget of 30s" in line]
    assert line.startswith("the first tables (1 prompt in each of 2 cells) take about ")
    assert "fewer drafters" in line and "(--time " in line


def test_interruption_shows_complete_blocks(recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    clock = Clock(monkeypatch)
    measured, calls = Cell.run, [0]

    def run_(cell: Cell, piece: Any) -> Any:
        calls[0] += 1
        if calls[0] == 8:  # group 1 has its second block, group 2 has not
            raise KeyboardInterrupt
        return measured(cell, piece)

    monkeypatch.setattr(Cell, "run", run_)
    settings = ["matrix={temperature: [0.5, 1]}", *SETTINGS[1:], "time=1h"]
    outcome = run(load_recipe(recipe, settings), tmp_path / "runs", log=None, clock=clock)
    assert outcome.interrupted and outcome.exit_code == 130 and calls[0] == 8
    assert [len(request) for request in prompts_of(outcome)] == [1, 1, 1, 1]
    assert sum("cut short after block 1 of 6" in note for note in outcome.notes) == 2


def test_failed_cell_does_not_use_budget(recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    clock = Clock(monkeypatch)
    measured, calls = Cell.run, [0]

    def run_(cell: Cell, piece: Any) -> Any:
        calls[0] += cell.config.drafter.name == "prompt-lookup"
        if calls[0] == 2 and cell.config.drafter.name == "prompt-lookup":
            raise RuntimeError("broken")
        return measured(cell, piece)

    monkeypatch.setattr(Cell, "run", run_)
    request = load_recipe(recipe, [*SETTINGS, "drafters=[prompt-lookup, {name: prompt-lookup, gamma: 2}]", "time=12s"])
    outcome = run(request, tmp_path / "runs", log=None, clock=clock)
    assert len(outcome.failed) == 1 and outcome.exit_code == 1
    alive = [request for request, result in zip(prompts_of(outcome), outcome.results, strict=True) if not result.error]
    assert len(alive) == 2 and alive[0] == alive[1] and 1 < len(alive[0]) < 6


@pytest.mark.parametrize("sizes", [[1], [1, 4], [2, 3]])
def test_every_beginning_is_balanced_sample(sizes: list[int]) -> None:
    """12 of a, 24 of b, 36 of c: after each block the shares are correct up to one block."""
    pool = [Prompt(i, "abbccc"[i % 6], ("hi",) * (1 + i % 2), index=i) for i in range(72)]
    blocks = blocks_of(pool, sizes, Random(3))
    assert sorted(i for block in blocks for i in block) == list(range(72))
    assert blocks == blocks_of(pool, sizes, Random(3)) != blocks_of(pool, sizes, Random(4))
    assert sum(len(pool[i].turns) for i in blocks[0]) == min(sum(len(pool[i].turns) for i in b) for b in blocks)
    categories: Counter[str] = Counter()
    for block in blocks:
        categories.update(pool[i].category for i in block)
        maximum = 2 * max(map(len, blocks))
        assert all(
            abs(categories[c] - categories.total() * share / 6) < maximum for c, share in (("a", 1), ("b", 2), ("c", 3))
        )


def test_tables_come_at_intervals() -> None:
    now = [0.0]
    pipe, terminal = (budget.Budget("5m", [], [], 8, lambda: now[0]) for _ in range(2))
    printed: dict[bool, list[float]] = {True: [], False: []}
    for now[0] in range(0, 300, 5):
        for screen, item in ((False, pipe), (True, terminal)):
            if item.table_due(screen):
                printed[screen].append(now[0])
    assert printed[False] == [0, 100, 200] and printed[True] == list(range(0, 300, 20))


def test_remaining_budget_covers_first_block() -> None:
    """Two cells on prompts of one turn: 40 s per block at 20 s per turn, with a budget of 30 s."""
    now = [0.0]
    prompts = [Prompt(i, "a", ("hi",), index=i) for i in range(4)]
    one = budget.Budget("30s", prompts, [[i] for i in range(4)], 64, lambda: now[0])
    now[0] = 25.0
    assert one.max_remaining(20.0, 2) == 15.0 and one.max_remaining(10.0, 2) == 5.0
    one.done = 1
    assert one.max_remaining(20.0, 2) == 5.0
    slow, fast, fits = (one.warning(pace, 2) for pace in (20.0, 10.0, 3.0))
    assert slow.startswith("the first tables (1 prompt in each of 2 cells) take about 40 s, more than")
    assert "--set max_new_tokens=48" in slow and slow.endswith("all 4 prompts take about 3 min (--time 4m)")
    assert fast.startswith("all 4 prompts take about 80 s, about 1 within the time budget of 30s")
    assert "--limit 1, --set max_new_tokens=24" in fast and fits == ""


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("2h", 7200), ("1.5m", 90), ("0.5s", 0.5)])
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("value", ["5", "0m", "-5m", "5 m", "5min", "1e3s", "m", "[5m]", "true", "９s", "1234567s"])
def test_invalid_durations(recipe: str, value: str, capsys: Any) -> None:
    with pytest.raises(UsageError, match=r"time: .* is not a duration; write a number above 0 with its unit: 90s, 5m"):
        load_recipe(recipe, [f"time={value}"])
    assert cli.main(["run", recipe, f"--time={value}"]) == 2
    assert "--time: " in (err := capsys.readouterr().err) and "is not a duration" in err


def test_bad_value_is_refused_with_its_line(tmp_path: Path, recipe: str) -> None:
    file = Path(recipe)
    file.write_text("time: 5\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"recipe\.yaml:1: time: 5 is not a duration"):
        load_recipe(recipe)
    file.write_text(file.read_text(encoding="utf-8").replace("time: 5", "time: 5m"), encoding="utf-8")
    assert load_recipe(recipe).time == "5m"
    assert load_recipe(recipe, ["time=null"]).time is None
    assert expand(load_recipe(recipe)).hash == expand(load_recipe(recipe, ["time=null"])).hash


def test_from_command_line(bench: Any, tmp_path: Path) -> None:
    """Real clock and a budget that is too small: one block first, the rest on resume."""
    code, out, err = bench(*SETTINGS, flags=["--time", "0.001s"])
    assert code == 0 and "note: 1 of 6 prompts (time budget 0.001s); rerun to resume" in out and "speed-up" in out
    (directory,) = tmp_path.glob("runs/*")
    assert json.loads((directory / "recipe.json").read_text(encoding="utf-8"))["time"] == "0.001s"
    code, out, err = bench(*SETTINGS, flags=["--time", "1h"])
    assert code == 0 and "so far, 1 of 6 prompts:\n\n" in err and "time budget" not in out and "resuming after" in err
    assert "so far" not in out
    assert "reusing 2 cells" in bench(*SETTINGS, flags=["--time", "none"])[2]
