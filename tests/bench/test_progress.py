"""Progress lines, the progress bar, and estimates of the remaining time."""

import io
from typing import Any

import pytest

from crossdraft.framework.bench import progress
from crossdraft.framework.bench.progress import Meter, duration
from crossdraft.framework.recipe.recipe import CellConfig


def config(drafter: str = "prompt-lookup", batch_size: int = 1) -> CellConfig:
    given = {"target": "t", "drafter": drafter, "verifier": "token", "batch_size": batch_size}
    return CellConfig.model_validate(given)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal() -> None:
    """An estimate after the first piece, then a line per minute."""
    outputs: list[str] = []
    shares: list[float] = []
    clock = Clock()
    with Meter(120, outputs.append, True, shares.append, clock) as meter:
        clock.now = 30.0  # loading models does not count
        meter.prompts_skipped(20)  # stored pieces
        assert meter.left is None
        for number in range(10):
            for name in ("none", "prompt-lookup"):
                meter.cell_started(config(name, 4))
                clock.now += 10.0
                meter.prompts_finished(2)
            meter.piece_finished(number + 2, 30)
        assert meter.left == pytest.approx(10.0 / 2 * (120 - 20 - 40))
        meter.group_finished(120)
        assert meter.left == 0 and meter.share == 1.0
    # 20 s for 4 of 100 prompts: 96 to go.
    assert outputs[0] == "about 8 min left, estimated from the first piece of prompts"
    assert outputs[1] == "30 %: prompt-lookup × token, batch size 4; about 7 min left"
    assert len(outputs) == 4 and all(line.endswith(" left") for line in outputs[1:])
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_on_a_terminal(monkeypatch: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(progress.tqdm, "__init__", _to(screen, progress.tqdm.__init__))
    outputs: list[str] = []
    clock = Clock()
    with Meter(8, outputs.append, True, clock=clock) as meter:
        meter.cell_started(config())
        clock.now = 150.0
        meter.prompts_finished(4)
        clock.now = 300.0
        meter.cell_started(config("none"))
        meter.log("a line")
    assert outputs == ["a line"]
    shown = screen.getvalue()
    assert " 50 %|" in shown and "| 4/8 prompts, about 2 min left, prompt-lookup × token, batch size 1" in shown
    assert "about 2 min left, plain decoding, batch size 1" in shown


def _to(screen: Any, init: Any) -> Any:
    def made(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, "file": screen, "ncols": 120})

    return made


def test_an_estimate_that_no_longer_holds_is_replaced() -> None:
    """The time of a turn increases from 10 s to 40 s."""
    outputs: list[str] = []
    clock = Clock()
    with Meter(200, outputs.append, False, clock=clock) as meter:
        for number in range(40):
            meter.cell_started(config())
            clock.now += 10.0 if number < 10 else 40.0
            meter.prompts_finished(1)
            meter.piece_finished(number + 1, 200)
    estimates = [line for line in outputs if "%" not in line]
    assert estimates[0] == "about 33 min left, estimated from the first piece of prompts"
    assert estimates[1].startswith("about 49 min left, steps are 1.6 times as slow as at the last estimate")
    assert meter.pace is not None and 30 < meter.pace < 40
    assert meter.left == pytest.approx(160 * meter.pace)


def test_the_first_estimate_does_not_wait_for_a_piece() -> None:
    outputs: list[str] = []
    clock = Clock()
    most, judged = [1000.0], list[float]()

    def judge(pace: float) -> str:
        judged.append(pace)
        return "too long"

    with Meter(
        8, outputs.append, False, clock=clock, turns=16, max_remaining=lambda pace: most[0], budget_warning=judge
    ) as meter:
        meter.warm_up_started()
        for _ in range(5):  # of 16 tokens a turn
            clock.now += 4.0
            meter.step_finished(1 / 16)
        assert meter.pace == 64.0 and outputs == []
        clock.now += 100.0  # loading
        meter.cell_started(config())
        clock.now += 8.0
        meter.step_finished(1 / 16)
        assert outputs == ["too long (estimated from the first steps)"] and judged == [128.0]
        assert meter.left == 1000.0  # of 2048 s
        clock.now += 56.0
        meter.prompts_finished(1, 2)
        meter.piece_finished(1, 8)
        assert (meter.pace, meter.left) == (32.0, 448.0)
        most[0] = -1.0  # the budget is over, the block is not
        assert meter.left == 448.0


def test_nothing_to_measure() -> None:
    outputs: list[str] = []
    with Meter(0, outputs.append) as meter:
        meter.group_finished(0)
        assert meter.share == 1.0
    assert outputs == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (99.4, "99 s"), (100, "2 min"), (5939, "99 min"), (6000, "1 h 40 min"), (200_000, "2 days")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
