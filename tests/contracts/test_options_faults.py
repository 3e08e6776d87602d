"""Errors in options are worded here, by pydantic's types of errors and not by its sentences."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import Field, ValidationError, field_validator

from crossdraft.framework.contracts.options import Options, fault


class Every(Options):
    count: int = Field(default=1, ge=1, le=9)
    share: float = Field(default=0.5, gt=0, lt=1)
    flag: bool = False
    name: str = Field(default="a", min_length=1, pattern="^[a-z]*$")
    names: list[str] | None = None
    pair: tuple[int, ...] = ()
    table: dict[str, int] | None = None
    kind: Literal["a", "b"] = "a"
    own: int = 1

    @field_validator("own")
    @classmethod
    def _own(cls, own: int) -> int:
        if own > 5:
            raise ValueError("must not exceed the five of its validator")
        return own


class Needs(Options):
    key: int


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"count": "x"}, "should be a valid integer"),
        ({"count": [1]}, "should be a valid integer"),
        ({"count": 1.5}, "should be a valid integer, without a fraction"),
        ({"count": "9" * 5000}, "should be a valid integer, of fewer digits"),
        ({"count": 0}, "should be greater than or equal to 1"),
        ({"count": 10}, "should be less than or equal to 9"),
        ({"share": "x"}, "should be a valid number"),
        ({"share": [1]}, "should be a valid number"),
        ({"share": float("nan")}, "should be a finite number"),
        ({"share": 0}, "should be greater than 0"),
        ({"share": 1}, "should be less than 1"),
        ({"flag": "perhaps"}, "should be true or false"),
        ({"flag": [1]}, "should be true or false"),
        ({"name": 3}, "should be a valid string"),
        ({"name": ""}, "should have at least 1 character(s)"),
        ({"name": "A"}, "should match the pattern ^[a-z]*$"),
        ({"names": 3}, "should be a valid list"),
        ({"pair": 3}, "should be a valid list"),
        ({"table": 3}, "should be a mapping of keys to values"),
        ({"kind": "c"}, "should be 'a' or 'b'"),
        ({"own": 6}, "must not exceed the five of its validator"),
        ({"nobody": 6}, "is unknown"),
    ],
)
def test_sentence_of_our_own(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Every(**arguments)
    (problem,) = caught.value.errors()
    assert fault(problem) == sentence
    if problem["type"] != "value_error":  # the text depends on the version of pydantic
        assert fault({**problem, "msg": "reworded"}) == sentence


def test_missing_key() -> None:
    with pytest.raises(ValidationError) as caught:
        Needs.model_validate({})
    assert fault(caught.value.errors()[0]) == "is missing"
