"""``crossdraft report RUN...``: reports of finished runs in the registered formats."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from .. import plugins
from ..contracts.command import Argument, Command
from ..errors import UsageError, printable, quoted
from ..util.output_files import check_output, writing_output
from .options.run import CellFilterOptions, ForceOptions, RunsOptions, SegmentOptions, note_partial, output_folder

if TYPE_CHECKING:
    from ..cost.load_run import FinishedRun
    from ..report.report import Report

_NUMBERS, _CHARTS, _WATCH = "options of tables", "options of charts", "while runs are running"
#: Options of some formats only, see `framework.report.report.Report.options`.
_OF_FORMATS = ("rows", "cols", "value", "baseline", "digits", "no_intervals", "kind", "width")


class ReportCommand(RunsOptions, CellFilterOptions, SegmentOptions, ForceOptions, Command):
    """A report of finished runs."""

    name: ClassVar[str] = "report"

    format: Annotated[str, Argument("FORMAT")] = Field("markdown", description="format of the report, see below")
    out: Annotated[Path | None, Argument("PATH")] = Field(
        None,
        description="file to write instead of printing; of charts, the directory for files RUN-KIND.FORMAT (default: "
        "KIND.FORMAT in the run's directory)",
    )
    rows: Annotated[tuple[str, ...], Argument("KEY,...", group=_NUMBERS, commas=True)] = Field(
        ("drafter",),
        description="keys of the rows: run, drafter, verifier, target, batch_size, temperature, gamma, ...",
    )
    cols: Annotated[tuple[str, ...], Argument("KEY,...", group=_NUMBERS, commas=True)] = Field(
        ("verifier",), description="keys of the columns"
    )
    value: Annotated[tuple[str, ...], Argument("COLUMN,...", group=_NUMBERS, commas=True)] = Field(
        (),
        description="columns of summary.csv, explained in a run's README (default: block_efficiency, with --segment of "
        "each segment)",
    )
    baseline: Annotated[bool, Argument(group=_NUMBERS)] = Field(
        False, description="include plain decoding (drafter none)"
    )
    digits: Annotated[int, Argument(group=_NUMBERS)] = Field(
        2, ge=0, le=12, description="decimal places, except in CSV and JSON"
    )
    no_intervals: Annotated[bool, Argument(group=_NUMBERS)] = Field(False, description="omit confidence intervals")
    kind: Annotated[tuple[str, ...], Argument("KIND,...", group=_CHARTS, commas=True)] = Field(
        (),
        description="kinds of chart: block_efficiency, target_rows, speed_up, throughput, pareto, draft_length, "
        "acceptance, category, segment, time (default: all that the cells allow)",
    )
    width: Annotated[Literal["column", "page"], Argument(group=_CHARTS)] = Field(
        "column", description="width in a two-column paper"
    )
    watch: Annotated[bool, Argument(group=_WATCH)] = Field(
        False, description="serve the HTML report on this machine; Ctrl-C stops it"
    )
    port: Annotated[int, Argument(group=_WATCH)] = Field(
        8010, ge=0, le=65535, description="port of --watch; 0: any free port"
    )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        entries = sorted(plugins.entries("reports").values(), key=lambda entry: entry.name)
        width = max(len(entry.name) for entry in entries) + 2
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = "\n".join(["formats:", *(f"  {e.name:{width}}{e.summary}" for e in entries)])

    @model_validator(mode="after")
    def _check(self) -> ReportCommand:
        if self.watch:
            if other := self.model_fields_set - {"runs", "watch", "port", "debug"}:
                raise UsageError(f"{_option(min(other))} cannot be combined with --watch; remove one of them")
        elif "port" in self.model_fields_set:
            raise UsageError("--port requires --watch; add it, or remove --port")
        return self

    def run(self) -> int:
        """Return 0.

        Raises:
            UsageError: an unreadable run, an unknown format, an output file that must not be replaced, or a report that
                the cells do not allow.
        """
        if self.watch:
            plugins.get("reports", "html")().watch(self.runs, self.port)
            return 0
        report = self._report()
        out = None
        if self.out is not None:
            out = output_folder(self.out) if report.files else self._checked(self.out, report)
        runs = self._runs()
        with plugins.guarded("reports", self.format, "render()"):
            content = report.render(runs, self)
            if report.files == isinstance(content, str):
                raise TypeError(f"{quoted(content)} does not fit files = {report.files}")
        if not isinstance(content, str):
            for path, data in self._files(content):
                self._write(self._checked((out or Path()) / path, report), data)
        elif out is None:
            print(content, end="")
        else:
            self._write(out, content.encode("utf-8"))
        return 0

    def _report(self) -> Report:
        """The format. Raises UsageError for an unknown one, or for an option that it does not read."""
        report = plugins.get("reports", self.format)()
        if other := [name for name in _OF_FORMATS if name in self.model_fields_set and name not in report.options]:
            raise UsageError(f"{_option(other[0])} is not an option of --format {self.format}; remove one of them")
        return report

    def _runs(self) -> list[FinishedRun]:
        from ..cost.load_run import read_runs
        from ..report.segments import with_segments
        from ..report.selection import filtered_runs

        runs = [with_segments(run, self.segment) for run in read_runs(self.runs)]
        note_partial(runs)
        return filtered_runs(runs, self.where)

    def _files(self, content: Any) -> Iterator[tuple[Path, bytes]]:
        files: Iterator[Any] | None = None
        while True:
            with plugins.guarded("reports", self.format, "render()"):
                files = iter(content) if files is None else files
                item = next(files, None)
                if item is None:
                    return
                path, data = item
                if not (isinstance(path, Path) and isinstance(data, bytes)):
                    raise TypeError(f"{quoted(item)} is not the path and content of a file")
            yield path, data

    def _checked(self, path: Path, report: Report) -> Path:
        inputs = () if report.files else self.runs  # charts lie beside the records
        return check_output(path, "--out", inputs=inputs, mark=report.mark, force=self.force)

    def _write(self, path: Path, data: bytes) -> None:
        with writing_output(path, "--out") as file:
            file.write(data)
        print(f"wrote {printable(str(path))}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
