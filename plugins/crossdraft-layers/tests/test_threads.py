"""The number of threads and the wait policy follow from what was measured, and the user's settings are kept."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import inf
from random import Random
from typing import Any

import pytest
import torch
from crossdraft_layers import threads
from crossdraft_layers.threads import (
    MAX_PATIENCE,
    PATIENCE,
    WINS,
    ComparedThreads,
    ThreadChoice,
    candidates,
    choose_wait_policy,
    compared_threads,
    free_processors,
)

from crossdraft import generate, load_model
from crossdraft.framework.api.generate import pair_decoder
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.runs.threads import settings, wait_policy
from crossdraft.framework.util.contention import CpuWait


class Machine(CpuWait):
    """A machine in hand: its clock, its wait counters, and the seconds of a step by number of threads."""

    def __init__(self, seconds: dict[int, float], disturbed: bool = True):
        super().__init__(torch.device("meta"))
        self.now, self.seconds, self.disturbed, self.looked = 100.0, seconds, disturbed, 100.0
        self.used: list[int] = []

    def since(self) -> float:
        passed, self.looked = self.now - self.looked, self.now
        return passed if self.disturbed else 0.0

    def steps(self, number: int, noise: Random | None = None) -> Iterator[int]:
        for _ in range(number):
            threads_now = torch.get_num_threads()
            self.used.append(threads_now)
            self.now += self.seconds[threads_now] * (noise.lognormvariate(0, 0.1) if noise else 1)
            yield threads_now

    def decode(self, choice: ThreadChoice, steps: int, noise: Random | None = None) -> list[int]:
        self.used = []
        numbers = candidates(max(self.seconds))
        for _ in ComparedThreads(numbers, choice, self, lambda: self.now).applied(self.steps(steps, noise)):
            pass
        return self.used


@pytest.fixture
def all_cores(monkeypatch: Any) -> Iterator[int]:
    """PyTorch as it starts on a machine of two cores."""
    for name in (*threads.NUMBER, *threads.POLICY, threads.CHOSEN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_processors", lambda: {0, 1})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_candidates_end_with_one() -> None:
    assert candidates(12) == [12, 6, 3, 1] and candidates(1) == [1]


def test_undisturbed_steps_use_all_threads(all_cores: int) -> None:
    machine, choice = Machine({2: 0.05, 1: 0.01}, disturbed=False), ThreadChoice(2)
    assert set(machine.decode(choice, 1000)) == {2}


def test_fewer_threads_are_kept_where_they_win_on_the_steps(all_cores: int) -> None:
    machine, choice = Machine({2: 0.3, 1: 0.1}), ThreadChoice(2)
    used = machine.decode(choice, 40)
    assert choice.number == 1 and used[0] == 2 and set(used[2 * WINS + 2 :]) == {1}
    machine.seconds, machine.disturbed = {2: 0.1, 1: 0.101}, False  # the neighbour has left
    machine.decode(choice, int(PATIENCE / 0.1) + 2 * WINS + 2)
    assert choice.number == 2, "all threads return without a minimum gain"


def test_small_gain_changes_nothing(all_cores: int) -> None:
    machine, choice = Machine({2: 0.110, 1: 0.1}), ThreadChoice(2)
    used = machine.decode(choice, 20_000)
    assert choice.number == 2 and used.count(1) / len(used) < 0.01, "comparisons become rare"
    assert choice.patience == MAX_PATIENCE


def test_equal_numbers_seldom_win(all_cores: int) -> None:
    """At most 9 in 256 comparisons of equal numbers end with a change, even without a minimum gain."""
    changed, noise = 0, Random(0)
    for _ in range(400):
        machine, choice = Machine({2: 0.3, 1: 0.3}, disturbed=False), ThreadChoice(1)
        machine.decode(choice, 20, noise)
        changed += choice.number == 2
    assert changed <= 400 * 9 / 256 + 3 * (400 * 9 / 256) ** 0.5 and changed > 0


def test_direction_changes_with_comparisons_that_fail(all_cores: int) -> None:
    machine, choice = Machine({4: 0.3, 2: 0.2, 1: 0.3}), ThreadChoice(4)
    used = machine.decode(choice, 400)
    assert choice.number == 2 and {1, 4} <= set(used[40:])


def test_number_is_reset_between_steps_and_by_a_close(all_cores: int) -> None:
    machine = Machine({2: 0.3, 1: 0.1})
    compared = ComparedThreads([2, 1], ThreadChoice(1, due=inf), machine, lambda: machine.now)
    steps = compared.applied(machine.steps(3))
    assert next(steps) == 1 and torch.get_num_threads() == 2
    steps.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == 2


class Target:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)


def test_decoders_of_a_model_share_their_choice(all_cores: int, models: dict[str, str]) -> None:
    target = load_model(models["target"], device="cpu")
    options: dict[str, Any] = {"sampling": Sampling(), "batch_size": 1, "max_new_tokens": 4}
    slots = [pair_decoder(target, "none", None, 8, **options).target for _ in range(2)]
    first, second, other = map(compared_threads, (*slots, Target()))
    assert first and second and other and first._choice is second._choice is not other._choice


@pytest.mark.parametrize("name", threads.NUMBER)
def test_variable_of_user_fixes_number(all_cores: int, monkeypatch: Any, name: str) -> None:
    assert compared_threads(Target()) is not None
    monkeypatch.setenv(name, "2")
    assert compared_threads(Target()) is None and settings()["set_by"] == name


def test_so_do_number_set_in_python_other_devices_and_targets_without_model(all_cores: int) -> None:
    elsewhere = Target()
    elsewhere.device = torch.device("meta")
    assert compared_threads(elsewhere) is None and compared_threads(object()) is None
    torch.set_num_threads(3)
    assert compared_threads(Target()) is None


def test_generate_compares_on_its_steps(all_cores: int, models: dict[str, str], monkeypatch: Any) -> None:
    monkeypatch.setattr(threads, "DISTURBED", -1.0)
    monkeypatch.setattr(threads, "INTERVAL", 0.0)
    inside: list[int] = []
    options: dict[str, Any] = {"drafter": "none", "max_new_tokens": 6, "batch_size": 1, "ignore_eos": True}
    target = load_model(models["target"], device="cpu")
    generate(target, [[1, 2, 3]], **options, on_step=lambda _: inside.append(torch.get_num_threads()))
    assert set(inside) == {1, 2} and torch.get_num_threads() == 2


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
        command = [sys.executable, "-m", "crossdraft", "list", "env", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert json.loads(done.stdout)["cpu"]["threads"]["wait_policy"] == "passive"
