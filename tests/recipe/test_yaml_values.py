"""YAML with limits: rejected input."""

from __future__ import annotations

import pytest

from crossdraft.framework.errors import UsageError
from crossdraft.framework.recipe.yaml_values import yaml_value


def refusal(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        yaml_value(text, lambda line: f"f:{line}")
    return str(caught.value)


@pytest.mark.parametrize("depth", [65, 999, 1000, 1001, 3000, 200_000])
@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "[{a: "])
def test_nesting_is_refused_at_any_depth(opening: str, depth: int) -> None:
    if opening != "[" and depth > 3000:
        pytest.skip("the same again, in more seconds")
    assert "nested too deeply; the maximum is 64" in refusal(opening * depth)
    assert refusal("first: 1\nsecond:\n  " + opening * depth + "\n").startswith("f:3: this is nested")


@pytest.mark.parametrize(
    "text", ["x: '" + "[" * 3000, 'x: "' + "{" * 900, "# " + "[" * 1000 + "\nx: ]", "x: [" + "'[', " * 400 + "@"]
)
def test_brackets_in_strings_and_comments_are_not_nesting(text: str) -> None:
    assert "this is not YAML" in refusal(text)


def test_maximum_nesting_is_read() -> None:
    value = yaml_value("[" * 64 + "]" * 64, lambda line: "")
    for _ in range(64):
        (value,) = value or [None]
    assert value is None


def test_merged_and_repeated_values() -> None:
    lines: dict[tuple[str | int, ...], int] = {}
    text = "base: &b {x: 1, y: 2}\nown:\n  <<: *b\n  y: 3\nlist: [*b, *b]\n"
    value = yaml_value(text, lambda line: f"f:{line}", lines)
    assert value == {"base": {"x": 1, "y": 2}, "own": {"y": 3, "x": 1}, "list": [{"x": 1, "y": 2}] * 2}
    assert value["list"][0] is not value["list"][1] and list(value["own"]) == ["y", "x"]
    assert (lines["own", "y"], lines["own", "x"], lines["list", 1]) == (4, 1, 1)
    assert "inside of its own anchor" in refusal("a: &a [*a]") and "undefined alias" in refusal("a: *b")
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"{k}: &{k} [{', '.join([f'*{j}'] * 10)}]\n" for j, k in ("ab", "bc", "cd", "de"))
    assert "those repeated by aliases included; the maximum is" in refusal(bomb)
