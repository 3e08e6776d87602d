"""The number of threads and the wait policy follow from what was measured, and the user's settings are kept."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from crossdraft_layers import threads
from crossdraft_layers.threads import (
    MOST_PATIENCE,
    PATIENCE,
    MeasuredThreads,
    choose_wait_policy,
    fastest,
    free_processors,
)

from crossdraft import generate, load_model
from crossdraft.framework.models.threads import choose_for_group, settings, thread_count, wait_policy
from crossdraft.framework.util.contention import CpuWait


class Cores:
    """A machine in hand: its clock, what its wait counters and its measurements return."""

    def __init__(self) -> None:
        self.now, self.waited, self.measurements = 0.0, 0.0, 0
        self.seconds: Mapping[int, Sequence[float]] = {2: [1.0], 1: [1.4]}

    def measure(self, numbers: Sequence[int]) -> Mapping[int, Sequence[float]]:
        assert list(numbers) == [2, 1]
        self.measurements += 1
        return self.seconds

    def step(self, count: MeasuredThreads, seconds: float, waited: float) -> int:
        self.now += seconds
        self.waited = waited
        count.step()
        return count.number


class Counters(CpuWait):
    def __init__(self, cores: Cores):
        super().__init__(torch.device("meta"))
        self.cores = cores

    def since(self) -> float:
        return self.cores.waited


@pytest.fixture
def cores() -> Cores:
    return Cores()


@pytest.fixture
def count(cores: Cores) -> MeasuredThreads:
    return MeasuredThreads(2, cores.measure, Counters(cores), clock=lambda: cores.now)


@pytest.fixture
def all_cores(monkeypatch: Any) -> Iterator[int]:
    """PyTorch as it starts on a machine of two cores."""
    for name in (*threads.NUMBER, *threads.POLICY, threads.CHOSEN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_processors", lambda: {0, 1})
    monkeypatch.setattr(threads, "_choices", {})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "current", "number"),
    [
        ({2: [1.0, 9.0, 1.1], 1: [1.3, 1.3, 1.3]}, 2, 2),
        ({2: [5.0, 9.0, 1.0], 1: [1.3, 1.3, 1.3]}, 2, 1),
        ({2: [1.1], 1: [1.0]}, 2, 2),  # not worth a change
        ({2: [1.0], 1: [1.1]}, 1, 1),
        ({2: [1.0], 1: [1.3]}, 1, 2),
        ({4: [4.0], 2: [2.0], 1: [3.0]}, 4, 2),
        ({}, 3, 3),
    ],
)
def test_fastest_number_is_taken_if_it_pays(seconds: Any, current: int, number: int) -> None:
    assert fastest(seconds, current) == number


def test_candidates_end_with_one() -> None:
    assert threads.candidates(12) == [12, 6, 3, 1] and threads.candidates(1) == [1]


def test_intermittent_neighbour_is_detected(cores: Cores, count: MeasuredThreads) -> None:
    count.start()
    assert count.number == 2 and cores.measurements == 1
    assert cores.step(count, 60, waited=0) == 2 and cores.measurements == 1, "nobody waited"
    cores.seconds = {2: [6.0], 1: [1.4]}
    assert cores.step(count, 1, waited=0.9) == 1 and cores.measurements == 2
    cores.seconds = {2: [1.0], 1: [1.4]}
    assert cores.step(count, 1, waited=0) == 1, "too early to measure again"
    assert cores.step(count, PATIENCE, waited=0) == 2 and cores.measurements == 3


def test_stable_measurements_become_rare(cores: Cores, count: MeasuredThreads) -> None:
    count.start()
    for _ in range(3600):
        cores.step(count, 1, waited=0.5)
    assert count.number == 2
    assert cores.measurements < 10 + 3600 / MOST_PATIENCE


def test_looks_are_not_taken_at_every_step(cores: Cores, count: MeasuredThreads) -> None:
    count.start()
    for _ in range(4):
        cores.step(count, threads.INTERVAL / 5, waited=9.0)
    assert cores.measurements == 1


def test_single_thread_is_not_measured(cores: Cores) -> None:
    one = MeasuredThreads(1, cores.measure)
    one.start()
    one.choose()
    assert one.fixed and one.number == 1 and cores.measurements == 0


def test_thread_count_applies_only_to_steps(all_cores: int, cores: Cores, count: MeasuredThreads) -> None:
    cores.seconds = {2: [6.0], 1: [1.0]}
    between = []
    steps = count.applied(torch.get_num_threads() for _ in range(3))
    assert [(inside, between.append(torch.get_num_threads()))[0] for inside in steps] == [1, 1, 1]
    assert between == [2, 2, 2] and torch.get_num_threads() == 2
    steps = count.applied(torch.get_num_threads() for _ in range(3))
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == 2


class Target:
    """A target that is all linear layers."""

    device = torch.device("cpu")

    def __init__(self, width: int = 32):
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))


def test_equal_targets_share_measurement(all_cores: int, monkeypatch: Any) -> None:
    first, second, other = thread_count(Target()), thread_count(Target()), thread_count(Target(16))
    first.choose()
    assert first.choice is second.choice is not other.choice
    assert first.choice.measured is not None and other.choice.measured is None
    monkeypatch.setattr(threads, "SAMPLE", 1)
    assert len(threads.sampled_layers(Target())) == 1


def test_every_number_is_measured_and_none_is_left_behind(all_cores: int) -> None:
    seconds = threads.measure_threads(list(Target().model), [2, 1])
    assert all(seconds.values()) and max(map(len, seconds.values())) >= threads.LEAST
    assert torch.get_num_threads() == 2


def test_hopeless_number_is_not_measured_any_further() -> None:
    assert threads.is_hopeless({2: [9.0], 1: [1.0, 2.0]}, 2) and not threads.is_hopeless({2: [9.0], 1: [1.0]}, 1)
    assert not threads.is_hopeless({2: [9.0, 1.5], 1: [1.0]}, 2) and not threads.is_hopeless({2: [], 1: []}, 2)


def test_generate_decodes_with_fastest_number(all_cores: int, models: dict[str, str], monkeypatch: Any) -> None:
    monkeypatch.setattr(threads, "measure_threads", lambda layers, numbers: {2: [9.0], 1: [1.0]})
    inside: list[int] = []
    options: dict[str, Any] = {"drafter": "none", "max_new_tokens": 4, "batch_size": 1, "ignore_eos": True}
    target = load_model(models["target"], device="cpu")
    generate(target, [[1, 2, 3]], **options, on_step=lambda _: inside.append(torch.get_num_threads()))
    assert inside == [1, 1, 1, 1] and torch.get_num_threads() == 2


@pytest.mark.parametrize("name", threads.NUMBER)
def test_variable_of_user_fixes_number(all_cores: int, monkeypatch: Any, name: str) -> None:
    assert not thread_count(Target()).fixed
    monkeypatch.setenv(name, "2")
    assert thread_count(Target()).fixed and settings()["number"] == name


def test_so_does_number_set_in_python(all_cores: int) -> None:
    torch.set_num_threads(3)
    assert thread_count(Target()).fixed and thread_count(Target()).number == 3
    assert settings()["number"] == "torch.set_num_threads"


def test_other_devices_and_models_without_linear_layers_are_unchanged(all_cores: int) -> None:
    elsewhere = Target()
    elsewhere.device = torch.device("meta")
    assert thread_count(elsewhere).fixed
    elsewhere.device, elsewhere.model = torch.device("cpu"), object()  # type: ignore[assignment]
    assert thread_count(elsewhere).fixed


# -- groups ----------------------------------------------------------------------------------------------------------


def test_resumed_group_keeps_its_number(all_cores: int) -> None:
    assert choose_for_group(Target(), {"number": 1})["number"] == 1 == torch.get_num_threads()
    torch.set_num_threads(2)
    for broken in (None, {"number": "1"}, {"number": 3}, {}):
        result = choose_for_group(Target(), broken)
        assert result["most"] == 2 and result["number"] == torch.get_num_threads()
        torch.set_num_threads(2)


# -- the wait policy -------------------------------------------------------------------------------------------------


def stat(*processors: tuple[int, int]) -> list[str]:
    """A ``/proc/stat`` of processors with these ticks of work and of idleness."""
    rows = [f"cpu{i} {work} 0 0 {idle} 0 0 0 0 {work} 0" for i, (work, idle) in enumerate(processors)]
    return ["cpu  1 2 3 4 5 6 7 8 9 10", *rows, "intr 5"]


def test_free_processors_are_those_that_were_idle() -> None:
    before = stat((100, 100), (100, 100), (100, 100))
    after = stat((120, 100), (100, 120), (110, 110))
    assert free_processors(before, after, {0, 1}) == 1.0
    assert free_processors(before, after, {0, 1, 2}) == 1.5
    assert free_processors([], [], {0}) is None and free_processors(before, before, {0}) is None


@pytest.mark.parametrize(
    ("after", "variables", "policy"),
    [
        (stat((0, 20), (0, 20)), {}, "spin"),
        (stat((20, 0), (0, 20)), {}, "passive"),
        (stat((20, 0), (20, 0)), {}, "passive"),
        ([], {}, "spin"),
        (stat((20, 0), (0, 20)), {"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY=ACTIVE"),
        (stat((20, 0), (0, 20)), {"OMP_NUM_THREADS": "2"}, "spin"),
        (stat((0, 20), (0, 20)), {threads.CHOSEN: "0.0", **threads.PASSIVE}, "spin"),  # chosen by a parent
    ],
)
def test_wait_policy_follows_from_load(
    monkeypatch: Any, after: list[str], variables: dict[str, str], policy: str
) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in (*threads.NUMBER, *threads.POLICY, threads.CHOSEN)}
    monkeypatch.setattr(os, "environ", clean | variables)
    monkeypatch.setattr(threads, "_processors", lambda: {0, 1})
    monkeypatch.delitem(sys.modules, "torch")
    readings = iter([stat((0, 0), (0, 0)) if after else [], after])
    choose_wait_policy(lambda: next(readings), seconds=0)
    assert wait_policy() == policy
    for name, value in variables.items():
        assert name in (threads.CHOSEN, *threads.PASSIVE) or os.environ[name] == value


def test_it_is_not_changed_once_torch_is_loaded(monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    choose_wait_policy(list, seconds=0)
    assert dict(os.environ) == before


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the system does not report the load of processors")
def test_command_waits_passively_on_busy_machine() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in (*threads.NUMBER, *threads.POLICY)}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        command = [sys.executable, "-m", "crossdraft", "env", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert json.loads(done.stdout)["cpu"]["threads"]["wait_policy"] == "passive"
