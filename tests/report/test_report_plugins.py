"""Formats, sections and columns of a plug-in: each works, and fails alone."""

import csv
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from companions import has_format
from html_runs import SMALL, finished_run, on_disk

from crossdraft import Estimate, Report, hookimpl
from crossdraft.framework import plugins
from crossdraft.framework.cli import main as cli
from crossdraft.framework.report.write import write_summary
from crossdraft.framework.runs.readme import readme


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

    @hookimpl
    def crossdraft_register_sections(self, register: Any) -> None:
        register("greeting", lambda runs, form: f"## Hello\n\n{len(runs)} run in {form}, <b>bold</b>", "a greeting")
        register("broken-section", lambda runs, form: 1 / 0, "an error")

    @hookimpl
    def crossdraft_register_columns(self, register: Any) -> None:
        register("wasted", lambda cell: Estimate(float(cell.metrics.steps), 1.0, 99.0), "steps, once more")
        register("broken", lambda cell: 1 / 0, "an error")
        register("tokens", lambda cell: 1, "the name of another column")
        register("listed", lambda cell: [1], "not a value")


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


def test_sections_and_columns(run: Path, capsys: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        assert cli.main(["report", str(run)]) == 0
    page = capsys.readouterr().out
    assert page.endswith("## Hello\n\n1 run in markdown, <b>bold</b>\n")
    header = next(line for line in page.splitlines() if line.startswith("| drafter"))
    assert header.endswith("|  wasted |") or "wasted" in header.split("|")[-2]
    warned = " ".join(caplog.messages)
    assert all(name in warned for name in ("'broken'", "'tokens'", "'listed'", "'broken-section'"))
    assert cli.main(["report", str(run), "--value", "wasted", "--format", "csv", "--where", "verifier=block"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert float(row["block"]) > 1 and (row["block_low"], row["block_high"]) == ("1.0", "99.0")
    if has_format("html"):
        assert cli.main(["report", str(run), "--format", "html"]) == 0
        page = capsys.readouterr().out
        assert "1 run in html, &lt;b&gt;bold&lt;/b&gt;" in page and "wasted" in page


def test_results_have_column(run: Path, tmp_path: Path) -> None:
    outcome = finished_run(tmp_path / "other-abc", SMALL, tokens=12).summary
    outcome.directory.mkdir(exist_ok=True)
    write_summary(outcome)
    (first, *_) = csv.DictReader(io.StringIO((outcome.directory / "summary.csv").read_text("utf-8")))
    assert float(first["wasted"]) > 1 and first["wasted_low"] == "1.0" and "broken" not in first
    assert "| `wasted`" in readme("other", outcome.recipe, 3, 6)
