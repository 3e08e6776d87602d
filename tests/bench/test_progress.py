"""Progress lines, the progress bar, and estimates of the remaining time."""

import io
from typing import Any

import pytest

from crossdraft.framework.bench import meter as meters
from crossdraft.framework.bench.events import (
    CellStarted,
    Event,
    GroupsFinished,
    Message,
    PieceFinished,
    PromptsFinished,
    PromptsSkipped,
    StepFinished,
    WarmUpStarted,
)
from crossdraft.framework.bench.meter import Meter
from crossdraft.framework.bench.progress import Progress
from crossdraft.framework.recipe.recipe import CellConfig
from crossdraft.framework.runs.labels import duration
from crossdraft.framework.runs.records import CellResult

PIECE = PieceFinished("", 0, {})


def config(drafter: str = "prompt-lookup", batch_size: int = 1) -> CellConfig:
    arguments = {"target": "t", "drafter": drafter, "verifier": "token", "batch_size": batch_size}
    return CellConfig.model_validate(arguments)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Run:
    """Progress and meter of a run."""

    def __init__(self, cells: int, prompts: int, clock: Clock, bar: bool = False, **options: Any):
        self.lines: list[str] = []
        self.progress = Progress(cells, prompts, clock=clock, **options)
        self.meter = Meter(self.progress, self.lines.append, bar, clock)

    def __call__(self, *events: Event) -> None:
        for event in events:
            self.progress(event)
            self.meter(event)


def test_without_terminal() -> None:
    """An estimate after the first piece, then a line per minute."""
    clock = Clock()
    run, shares = Run(2, 60, clock, bar=True), list[float]()
    with run.meter:
        clock.now = 30.0  # loading models does not count
        run(PromptsSkipped(20))  # stored pieces
        assert run.progress.left is None
        for _ in range(10):
            for name in ("none", "prompt-lookup"):
                run(CellStarted(config(name, 4)))
                clock.now += 10.0
                run(PromptsFinished(2, 2))
                shares.append(run.progress.share)
            run(PIECE)
        assert run.progress.left == pytest.approx(10.0 / 2 * (120 - 20 - 40))
        run(GroupsFinished(["group"], [CellResult(config()), CellResult(config("none"))]))
        assert run.progress.left == 0 and run.progress.share == 1.0
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
    monkeypatch.setattr(meters.tqdm, "__init__", _to(screen, meters.tqdm.__init__))
    clock = Clock()
    run = Run(2, 4, clock, bar=True)
    with run.meter:
        run(CellStarted(config()))
        clock.now = 150.0
        run(PromptsFinished(4, 4))
        clock.now = 300.0
        run(CellStarted(config("none")), Message("a line"))
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
    with run.meter:
        for number in range(40):
            run(CellStarted(config()))
            clock.now += 10.0 if number < 10 else 40.0
            run(PromptsFinished(1, 1), PIECE)
    progress, estimates = run.progress, [line for line in run.lines if "%" not in line]
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
    progress = run.progress
    with run.meter:
        run(WarmUpStarted())
        for _ in range(5):  # of 16 tokens a turn
            clock.now += 4.0
            run(StepFinished(1 / 16))
        assert progress.pace == 64.0 and run.lines == []
        clock.now += 100.0  # loading
        run(CellStarted(config()))
        clock.now += 8.0
        run(StepFinished(1 / 16))
        assert run.lines == ["too long (estimated from the first steps)"] and budget.paces == [128.0]
        assert progress.left == 1000.0  # of 2048 s
        clock.now += 56.0
        run(PromptsFinished(1, 2), PIECE)
        assert (progress.pace, progress.left) == (32.0, 448.0)
        budget.left = -1.0  # the budget is over, the block is not
        assert progress.left == 448.0


def test_steps_that_compile_do_not_count() -> None:
    clock = Clock()
    run = Run(1, 8, clock)
    with run.meter:
        run(WarmUpStarted())
        paces = []
        for seconds in (40.0, 2.0, 2.0, 30.0, 2.0):
            clock.now += seconds
            run(StepFinished(1 / 16))
            paces.append(run.progress.pace)
        assert paces == [None, None, 32.0, 32.0, 32.0]


def test_empty_measurement() -> None:
    run = Run(0, 0, Clock())
    with run.meter:
        run(GroupsFinished([], []))
        assert run.progress.share == 1.0
    assert run.lines == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (99.4, "99 s"), (100, "2 min"), (5939, "99 min"), (6000, "1 h 40 min"), (200_000, "2 days")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
