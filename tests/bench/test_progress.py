"""Progress lines, the progress bar, and estimates of the remaining time."""

import io
from typing import Any

import pytest

from crossdraft.framework.bench import progress as progress_module
from crossdraft.framework.bench.progress import Progress
from crossdraft.framework.recipe.recipe import CellConfig
from crossdraft.framework.runs.labels import duration
from crossdraft.framework.runs.records import CellResult


def config(drafter: str = "prompt-lookup", batch_size: int = 1) -> CellConfig:
    arguments = {"target": "t", "drafter": drafter, "verifier": "token", "batch_size": batch_size}
    return CellConfig.model_validate(arguments)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeRunner:
    pace: float | None = None


RUNNER: Any = FakeRunner()


class Run:
    """Progress of a run."""

    def __init__(self, cells: int, prompts: int, clock: Clock, bar: bool = False, turns: int = 0, **options: Any):
        self.lines: list[str] = []
        turns = turns or prompts
        self.progress = Progress(cells, prompts, turns, self.lines.append, bar=bar, clock=clock, **options)


def test_without_terminal() -> None:
    """An estimate after the first piece, then a line per minute."""
    clock = Clock()
    run, shares = Run(2, 60, clock, bar=True), list[float]()
    progress = run.progress
    with progress.bar:
        clock.now = 30.0  # loading models does not count
        progress.skip(20)  # stored pieces
        assert progress.left is None
        for _ in range(10):
            for name in ("none", "prompt-lookup"):
                progress.start_cell(CellResult(config(name, 4)), RUNNER)
                clock.now += 10.0
                progress.finish_cell(2, 2)
                shares.append(progress.share)
            progress.finish_piece()
        assert progress.left == pytest.approx(10.0 / 2 * (120 - 20 - 40))
        progress.finish_groups([CellResult(config()), CellResult(config("none"))])
        assert progress.left == 0 and progress.share == 1.0
    # 20 s for 4 of 100 prompts: 96 to go.
    assert run.lines[0] == "about 8 min left, estimated from the first piece of prompts"
    assert run.lines[1] == "30 %: prompt-lookup × token, batch size 4; about 7 min left"
    assert len(run.lines) == 4 and all(line.endswith(" left") for line in run.lines[1:])
    assert shares == sorted(shares)


def test_on_terminal(monkeypatch: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(progress_module.tqdm, "__init__", _to(screen, progress_module.tqdm.__init__))
    clock = Clock()
    run = Run(2, 4, clock, bar=True)
    progress = run.progress
    with progress.bar:
        progress.start_cell(CellResult(config()), RUNNER)
        clock.now = 150.0
        progress.finish_cell(4, 4)
        clock.now = 300.0
        progress.start_cell(CellResult(config("none")), RUNNER)
        progress.message("a line")
    assert run.lines == ["a line"]
    shown = screen.getvalue()
    assert " 50 %|" in shown and "| 4/8 prompts, about 2 min left, prompt-lookup × token, batch size 1" in shown
    assert "about 2 min left, plain decoding, batch size 1" in shown


def _to(screen: Any, init: Any) -> Any:
    def instance(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, "file": screen, "ncols": 120})

    return instance


def test_estimate_that_no_longer_holds_is_replaced() -> None:
    """The time of a turn increases from 10 s to 40 s."""
    clock = Clock()
    run = Run(1, 200, clock)
    progress = run.progress
    with progress.bar:
        for number in range(40):
            progress.start_cell(CellResult(config()), RUNNER)
            clock.now += 10.0 if number < 10 else 40.0
            progress.finish_cell(1, 1)
            progress.finish_piece()
    estimates = [line for line in run.lines if "%" not in line]
    assert estimates[0] == "about 33 min left, estimated from the first piece of prompts"
    assert estimates[1].startswith("about 49 min left, steps are 1.6 times as slow as at the last estimate")
    assert progress.pace is not None and 30 < progress.pace < 40
    assert progress.left == pytest.approx(160 * progress.pace)


def test_first_estimate_does_not_wait_for_piece() -> None:
    clock = Clock()

    class Budget:
        left, paces = 1000.0, list[float]()

        def max_remaining(self, pace: float, cells: int) -> float:
            return self.left

        def warning(self, pace: float, cells: int) -> str:
            self.paces.append(pace)
            return "too long"

    budget = Budget()
    run = Run(1, 8, clock, turns=16, budget=budget)
    runner: Any = FakeRunner()
    progress = run.progress
    with progress.bar:
        progress.start_cell(CellResult(config()), runner)
        clock.now += 24.0
        runner.pace = 128.0
        progress.estimate_early()
        assert run.lines == [], "the first piece may be finished soon"
        clock.now += 8.0
        runner.pace = None
        progress.estimate_early()
        assert run.lines == [], "no step has a time yet"
        runner.pace = 128.0
        progress.estimate_early()
        progress.estimate_early()
        assert run.lines == ["too long (estimated from the first steps)"] and budget.paces == [128.0]
        assert progress.left == 1000.0  # of 2048 s
        clock.now += 32.0
        progress.finish_cell(1, 2)
        progress.finish_piece()
        assert (progress.pace, progress.left) == (32.0, 448.0)
        budget.left = -1.0  # the budget is over, the block is not
        assert progress.left == 448.0


def test_empty_measurement() -> None:
    run = Run(0, 0, Clock())
    progress = run.progress
    with progress.bar:
        progress.finish_groups([])
        assert progress.share == 1.0
    assert run.lines == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (99.4, "99 s"), (100, "2 min"), (5939, "99 min"), (6000, "1 h 40 min"), (200_000, "2 days")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
