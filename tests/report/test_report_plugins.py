"""Formats of a plug-in: each works, and fails alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from html_runs import SMALL, finished_run, on_disk

from crossdraft import Report, hookimpl
from crossdraft.framework import plugins
from crossdraft.framework.cli import main as cli


class Names(Report):
    """The names of the pairs, as text."""

    name: ClassVar[str] = "names"
    options: ClassVar[tuple[str, ...]] = ("width",)

    def render(self, runs: Any, options: Any) -> str:
        return "".join(f"{r.config.verifier.name} {options.width}\n" for run in runs for r in run.summary.results)


class Faulty(Report):
    """A file, then an error."""

    name: ClassVar[str] = "faulty"
    files: ClassVar[bool] = True

    def render(self, runs: Any, options: Any) -> Iterator[tuple[Path, bytes]]:
        yield Path("first"), b"1"
        raise ValueError("it broke")


class Plugin:
    @hookimpl
    def crossdraft_register_reports(self, register: Any) -> None:
        register("names", Names, "names of the pairs")
        register("faulty", Faulty, "an error")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    plugin = Plugin()
    plugins.manager().register(plugin, "reporting")
    try:
        yield on_disk(finished_run(tmp_path / "small-abc", SMALL, tokens=12))
    finally:
        plugins.manager().unregister(plugin)


def test_format(run: Path, tmp_path: Path, capsys: Any) -> None:
    def report(*arguments: str) -> tuple[int, str, str]:
        return cli.main(["report", str(run), *arguments]), *capsys.readouterr()

    assert report("--format", "names", "--width", "page", "--where", "verifier=block") == (
        0,
        "token page\nblock page\n",
        "",
    )
    code, _, err = report("--format", "names", "--digits", "3")
    assert code == 2 and "--digits is not an option of --format names" in err
    code, out, err = report("--format", "faulty", "--out", str(tmp_path / "out"))
    assert code == 1 and out == f"wrote {tmp_path / 'out' / 'first'}\n"
    assert "the report 'faulty' of reporting (in this process) is unusable: render() raised ValueError: it broke" in err
    with pytest.raises(SystemExit):
        cli.main(["report", "--help"])
    assert "names     names of the pairs" in capsys.readouterr().out
    assert cli.main(["list", "reports"]) == 0
    assert "names of the pairs" in capsys.readouterr().out
