"""A command that needs packages of an extra names all that are missing, before anything else is done."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from crossdraft.framework import cli
from crossdraft.framework.errors import ModelError
from crossdraft.framework.util.extras import need

ROOT = Path(cli.__file__).parents[2]


def test_all_that_is_missing_is_named() -> None:
    need("this", "spread", "json", "pathlib")
    with pytest.raises(ModelError) as caught:
        need("this", "x,y", "no_such_a", "json", "no_such_b", "no_such_c", error=ModelError)
    assert str(caught.value) == (
        "this needs no_such_a, no_such_b, no_such_c; in a clone of crossdraft: pip install -e '.[x,y]'"
    )


def test_every_requested_extra_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    used = {
        call.args[1].value
        for file in (ROOT / "framework").rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "need"
        and isinstance(call.args[1], ast.Constant)
    }
    assert {"constrain", "spread", "quantize"} <= used
    assert {extra for item in used for extra in item.split(",")} <= set(extras)
