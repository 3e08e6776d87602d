"""Device work of a step outside the models' passes: few operations, and one wait of the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from launches import Launches

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Sequences
from crossdraft.framework.engine import stopwatch
from crossdraft.framework.engine.stopwatch import Stopwatch

B, VOCAB = 32, 1300  # a vocabulary of several blocks, the last one cut: the longest way of drawing a token
#: Most operations a step, and most of those that are not recorded with a pass.
LIMITS = [
    ("none", {}, "token", 39, 37),
    ("draft-model", {"gamma": 5}, "block", 186, 172),
    ("draft-model-iid", {"gamma": 5, "K": 2}, "multipath-block", 475, 368),
    ("draft-model-tree", {"branching": [4, 2, 2]}, "traversal", 467, 389),
]


@pytest.mark.parametrize("drafter, options, verifier, maximum, unrecorded", LIMITS)
def test_step_launches_little_and_waits_once(
    tiny_model: Callable, decoder: Callable, drafter: str, options: Any, verifier: str, maximum: int, unrecorded: int
) -> None:
    target, small = (tiny_model("llama", vocab_size=VOCAB, noise=noise, copy="launches") for noise in (0.0, 0.3))
    drafting = plugins.get("drafters", drafter)
    options = options if drafter == "none" else {"model": "small", **options}
    loop = decoder(
        target,
        drafting,
        options,
        plugins.get("verifiers", verifier),
        batch_size=B,
        drafting=small,
        temperature=1.0,
        max_new_tokens=40,
        validate="never",
    )
    for row in range(B):
        loop.start(row, [3 + (row + i) % 9 for i in range(1 + row % 5)], row, row)
    loop.step()
    for _ in range(3):
        with Launches(target, small) as counted:
            loop.step()
        assert counted.work.total() <= maximum, counted.work.most_common()
        assert counted.work.total() - counted.recorded <= unrecorded
        assert counted.reads == {"tolist": 1}


def test_work_is_counted() -> None:
    """Views, allocations and the inside of a model's pass are not work; lists that travel are."""
    layer = torch.nn.Linear(4, 4)
    with torch.inference_mode(), Launches(layer) as counted:
        x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        layer(x[:, :4].view(1, 4))
        torch.empty(3)
        (x + 1).cumsum(1).unsqueeze(0)
        x[:, :0] + 1
        bool((x > 0).all())
    assert counted.work == {"aten.lift_fresh.default": 1, "aten.add.Tensor": 1, "aten.cumsum.default": 1} | {
        "aten.gt.Scalar": 1,
        "aten.all.default": 1,
    }
    assert (counted.passes, counted.reads) == (1, {"__bool__": 1})
    assert torch.Tensor.tolist(torch.ones(1)) == [1.0] and counted.reads.total() == 1  # no longer


def test_committed_tokens_are_copied_when_they_are_read() -> None:
    sequences = Sequences([[], [7]], torch.zeros(2, 6, dtype=torch.long), [3, 3], [0, 1])
    sequences.tokens[1, 0] = 7
    with Launches() as counted:
        sequences.append(0, [4, 5])
        sequences.append(1, [6])
    assert not counted.work
    assert sequences.tokens.tolist() == [[4, 5, 0, 0, 0, 0], [7, 6, 0, 0, 0, 0]]
    sequences.history[0] = []  # the slot's next sequence
    sequences.append(0, [8])
    assert sequences.tokens[0, 0] == 8 and sequences.tokens[1, :2].tolist() == [7, 6]
    with Launches() as counted:
        sequences.tokens  # noqa: B018
    assert not counted.work


class Device:
    """A device that works through its events one by one, a second each."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.done = self.waits = 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                device.events.append(self)

            def query(self) -> bool:
                return device.events.index(self) < device.done

            def synchronize(self) -> None:
                device.waits += not self.query()
                device.done = max(device.done, device.events.index(self) + 1)

            def elapsed_time(self, other: Any) -> float:
                assert self.query() and other.query()
                return 1000.0 * (device.events.index(other) - device.events.index(self))

        self.Event = Event


def test_stopwatch_does_not_wait_for_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(stopwatch.torch, "xpu", device)
    clock = Stopwatch(torch.device("xpu"))
    clock.mark()
    for phase in ("draft", "target", "rest"):
        clock.mark(phase)
    assert device.waits == 0
    device.done = 2  # up to the end of the draft
    clock.mark()
    clock.mark("draft")
    end = clock.snapshot()
    assert device.waits == 0 and not end
    device.done = 4
    clock.mark()
    assert device.waits == 0 and not end
    seconds = clock.seconds
    assert device.waits == 1 and end == seconds == clock.snapshot() is not seconds
    assert {phase: s for phase, s in seconds.items() if s} == {"draft": 2.0, "target": 1.0, "rest": 1.0}
    assert len(device.events) == 7 and clock.seconds == seconds
    assert device.waits == 1
