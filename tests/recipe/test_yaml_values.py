"""YAML with limits: rejected input, with the same messages for both parsers."""

from __future__ import annotations

import pytest
import yaml

from crossdraft.framework.errors import UsageError
from crossdraft.framework.recipe import yaml_values
from crossdraft.framework.recipe.yaml_values import yaml_value

#: Parsers of PyYAML: libyaml's reads ahead and may refuse brackets itself, the other refuses none.
PARSERS = [yaml.SafeLoader, *([yaml.CSafeLoader] if hasattr(yaml, "CSafeLoader") else [])]


@pytest.fixture(params=PARSERS, ids=lambda parser: parser.__name__)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = type("Loader", (request.param,), {"yaml_implicit_resolvers": yaml_values._Loader.yaml_implicit_resolvers})
    monkeypatch.setattr(yaml_values, "_Loader", loader)


def refusal(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        yaml_value(text, lambda line: f"f:{line}")
    return str(caught.value)


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("depth", [65, 999, 1000, 1001, 3000, 200_000])
@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "[{a: "])
def test_nesting_is_refused_at_any_depth(opening: str, depth: int) -> None:
    if opening != "[" and depth > 3000:
        pytest.skip("the same again, in more seconds")
    assert "nested too deeply; the maximum is 64" in refusal(opening * depth)
    if opening in ("[", "[{a: "):  # a fault further on does not hide it
        assert refusal("first: 1\nsecond: " + opening * depth + "\n@").startswith("f:2: this is nested")


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    "text", ["x: '" + "[" * 3000, 'x: "' + "{" * 900, "# " + "[" * 1000 + "\nx: ]", "x: [" + "'[', " * 400 + "@"]
)
def test_brackets_in_strings_and_comments_are_not_nesting(text: str) -> None:
    assert "this is not YAML" in refusal(text)


@pytest.mark.usefixtures("parser")
def test_maximum_nesting_is_read() -> None:
    value = yaml_value("[" * 64 + "]" * 64, lambda line: "")
    for _ in range(64):
        (value,) = value or [None]
    assert value is None
