"""Commands: their options, the checks that follow from the annotations, and the door through which they come in."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Gt
from pydantic import Field, model_validator

from crossdraft import Argument, Command, UsageError, hookimpl
from crossdraft.framework import plugins
from crossdraft.framework.cli.main import main
from crossdraft.framework.contracts import command as command_module
from crossdraft.framework.util.limits import Limit


class Measure(Command):
    """Options of every type."""

    name = "measure-all"

    sources: Annotated[tuple[str, ...], Argument("SOURCE", positional=True)] = Field(description="responses")
    drafter: Annotated[str, Argument("NAME")] = Field(description="drafter")
    gamma: Annotated[int, Argument("N"), Limit(64, "drafts are short")] = Field(8, ge=1, description="longest draft")
    rates: Annotated[tuple[Annotated[float, Gt(0)], ...] | None, Argument(group="arrivals", commas=True)] = Field(
        None, description="requests/s"
    )
    router: Literal["random", "least-loaded"] = Field("random", description="router, 50% of the time")
    where: Annotated[tuple[str, ...], Argument(short="-w")] = Field((), description="filter (repeatable)")
    json_: Annotated[bool, Argument(exclusive="format")] = Field(False, description="print JSON")
    csv: Annotated[bool, Argument(exclusive="format")] = Field(False, description="print CSV")
    width: Annotated[int, Argument("N", requires="out keys")] = Field(80, description="of a line")
    out: Path | None = Field(None, description="directory to write to")
    keys: Annotated[tuple[str, ...], Argument("KEY,...", commas=True)] = Field((), max_length=2, description="columns")

    @model_validator(mode="after")
    def _check(self) -> Measure:
        if self.rates and self.router != "random":
            raise UsageError("--router requires no --rates; remove one of them")
        return self

    def run(self) -> int:
        print(self.drafter, self.gamma, self.debug)
        return 3


def parsed(line: str) -> Measure:
    parser = argparse.ArgumentParser()
    Measure.add_arguments(parser)
    return command_module.parsed(Measure, vars(parser.parse_args(line.split())))


def test_options_have_their_types() -> None:
    command = parsed("a b --drafter x --gamma 4 --rates 1,2.5 -w a=1,2 --where b=3 --json")
    assert command == Measure(
        sources=("a", "b"), drafter="x", gamma=4, rates=(1.0, 2.5), where=("a=1,2", "b=3"), json_=True
    )
    paths = parsed("a --drafter x --out ~/b --keys a,a,b")
    assert paths.out == Path.home() / "b" and paths.keys == ("a", "b")
    assert parsed("a --drafter x") == Measure(sources=("a",), drafter="x")


@pytest.mark.parametrize(
    "options, message",
    [
        ("--width 8 --out x", "--width requires --keys"),
        ("--gamma 0", "--gamma 0: should be greater than or equal to 1"),
        ("--gamma 1.5", "--gamma 1.5: should be a valid integer"),
        ("--gamma 65", "--gamma 65 is too large; the maximum is 64: drafts are short"),
        ("--rates 1,", "--rates '': should be a valid number"),
        ("--rates 1,nan", "--rates nan: should be a finite number"),
        ("--rates 1,-2", "--rates -2: should be greater than 0"),
        ("--router none", "--router none: should be 'random' or 'least-loaded'"),
        ("--rates 1 --router least-loaded", "--router requires no --rates; remove one of them"),
        ("--out \0", "--out: '\\x00' is not a valid path: it contains NUL, or a character that file systems do not"),
        ("--out ~nobody-here/x", "--out: '~nobody-here/x' is not a path: the home directory does not exist"),
        ("--keys a,,b", "--keys a,,b: should be a list of names, without an empty one"),
        ("--keys a,b,c", "--keys a,b,c: should have at most 2 item(s)"),
        (f"--gamma {'9' * 5000}", f"--gamma {'9' * 60}…: should be a valid integer, of fewer digits"),
    ],
)
def test_invalid_values_are_named(options: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parsed(f"a --drafter x {options}")
    assert str(error.value).startswith(message)


def test_options_without_effect_are_named() -> None:
    command = parsed("a --drafter x --gamma 4 --json")
    command.refuse_given(("router", "csv"), "with --drafter x")
    for field, message in (
        ("gamma", "--gamma 4 has no effect here; remove it"),
        ("json_", "--json has no effect here"),
    ):
        with pytest.raises(UsageError, match=message):
            command.refuse_given((field,), "here")


@pytest.mark.parametrize("line", ["--drafter x", "a", "a --drafter x --json --csv"])
def test_parser_refuses_missing_and_conflicting_options(line: str) -> None:
    with pytest.raises(SystemExit):
        parsed(line)


@pytest.fixture
def register() -> Iterator[Any]:
    """Register commands, ``(name, reference, summary)``, as a plug-in of this process."""
    added = []

    def add(*commands: Any) -> None:
        plugin = SimpleNamespace(
            crossdraft_register_commands=hookimpl(lambda register: [register(*command) for command in commands])
        )
        plugins.manager().register(plugin, "fleet")
        added.append(plugin)

    yield add
    for plugin in added:
        plugins.manager().unregister(plugin)


def test_third_party_command_runs_under_its_own_heading(register: Any, capsys: Any) -> None:
    register(("measure-all", Measure, "measure all of it"))
    assert main(["measure-all", "a", "--drafter", "x", "--debug"]) == 3
    assert capsys.readouterr().out == "x 8 True\n"
    assert main(["measure-all", "a", "--drafter", "x", "--gamma", "0"]) == 2
    assert capsys.readouterr().err == "crossdraft: error: --gamma 0: should be greater than or equal to 1\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert re.search("\nfleet:\n    measure-all +measure all of it\n", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(["measure-all", "--help"])
    out = capsys.readouterr().out
    assert "longest draft (default: 8)" in out and "\narrivals:\n" in out and "router, 50% of the time" in out


class _Raising:
    """A command whose arguments cannot be added."""

    name = "raises"
    main = print

    @staticmethod
    def add_arguments(_: Any) -> None:
        raise RuntimeError("no arguments")


def test_broken_command_fails_alone(register: Any, capsys: Any) -> None:
    register(("absent", "no_such_package.cli:Absent"), ("raises", _Raising), ("number", 7))
    for name, message in {
        "absent": "the command 'absent' of fleet (in this process) is unusable: ModuleNotFoundError: No module named",
        "raises": "the command 'raises' of fleet (in this process) is unusable: add_arguments() raised RuntimeError",
        "number": "the command 'number' of fleet (in this process) is unusable: 7 is not a subclass of",
    }.items():
        assert main([name]) == 1
        assert capsys.readouterr().err.startswith(f"crossdraft: error: {message}")
    assert main(["list", "commands"]) == 0


@pytest.mark.parametrize("name", ["Run", "two words", "-x", "a--b"])
def test_invalid_names_are_refused(register: Any, name: str) -> None:
    register((name, Measure))
    assert name not in plugins.entries("commands")
    assert any("is not a name for a command" in broken.error for broken in plugins.broken())


def test_builtin_commands_keep_their_names(register: Any) -> None:
    register(("run", Measure))
    assert plugins.entries("commands")["run"].provider.startswith("crossdraft ")
