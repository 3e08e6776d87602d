"""``benchmarks/peers.py`` interleaves its programs over the same prompts; ratios are exact where times are constant."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers.py"
PROMPTS = [[i] for i in range(5)]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_programs_take_turns_on_the_same_prompts(script: dict[str, Any]) -> None:
    calls: list[tuple[str, list[list[int]]]] = []

    def program(name: str, last: int, **options: Any) -> Any:
        def run(prompts: list[list[int]]) -> list[list[int]]:
            calls.append((name, prompts))
            return [[*prompt, last] for prompt in prompts]

        return script["Program"](name, "plain", run, **options)

    programs = [program("transformers", 9), program("crossdraft", 9), program("other", 8, largest=1)]
    args = SimpleNamespace(batch=[1, 2], seed=0, minutes=0, gamma=3)
    script["measure"](programs, PROMPTS, args, ends=[2])
    del calls[:5]  # the warm-up
    for _ in range(script["LEAST_REPETITIONS"]):
        for size, names in ((1, {"transformers", "crossdraft", "other"}), (2, {"transformers", "crossdraft"})):
            turn, calls[: len(names)] = calls[: len(names)], []
            assert {name for name, _ in turn} == names
            assert all(prompts == turn[0][1] and len(prompts) == size for _, prompts in turn)
    assert not calls
    assert [program.same for program in programs] == [{1: 3, 2: 6}, {1: 3, 2: 6}, {1: 0}]
    assert [tokens for tokens, _ in programs[0].repetitions[2]] == [4, 4, 4]
    assert "other" in script["table"](programs, 1) and "other" not in script["table"](programs, 2)


def test_ratios_are_paired_by_repetition(script: dict[str, Any]) -> None:
    slow = [(10, 1.0), (10, 4.0), (10, 2.0)]  # a machine whose speed changes affects both alike
    fast = [(30, 1.0), (30, 4.0), (30, 2.0)]
    assert script["ratio"](fast, slow) == "3.00" and script["ratio"](slow, slow) == "1"
    noisy = [(30, 1.0), (30, 5.0), (30, 2.0)]
    value, interval = script["ratio"](noisy, slow).split(" ", 1)
    low, high = map(float, interval.strip("[]").split(", "))
    assert value == "3.00" and low < 3 < high


def test_padding_is_removed(script: dict[str, Any]) -> None:
    assert script["until_end"]([5, 6, 2, 2, 2], [2, 3]) == [5, 6, 2]
    assert script["until_end"]([5, 6], [2]) == [5, 6]
