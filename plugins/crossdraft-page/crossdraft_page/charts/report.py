"""Charts as formats of ``crossdraft report``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from crossdraft import Report, UnknownNameError, UsageError, printable
from crossdraft.runs import titles_of

from .charts import chart, kinds_of, reason_missing
from .style import MARK

if TYPE_CHECKING:
    from crossdraft.runs import FinishedRun


class Charts(Report):
    """A file per run and kind of chart: ``RUN-KIND.FORMAT`` in ``--out``, else ``KIND.FORMAT`` beside the records."""

    files: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ("kind", "width")
    mark: ClassVar[bytes] = MARK

    def render(self, runs: Sequence[FinishedRun], options: Any) -> Iterator[tuple[Path, bytes]]:
        known = {name for run in runs for name in kinds_of(run)}
        for kind in options.kind:
            if kind not in known:
                raise UnknownNameError.among("kind of chart", kind, known)
        written, undrawn = 0, []
        for title, run in zip(titles_of(runs), runs, strict=True):
            folder, prefix = run.summary.directory, ""
            if options.out is not None:
                folder, prefix = Path(), re.sub(r"[^\w.-]+", "-", title).strip("-.") + "-"
            kinds = kinds_of(run)
            for kind in options.kind or kinds:
                if kind not in kinds:
                    continue
                content, omitted = chart(run.summary.results, kinds[kind], options.width, self.name)
                if content:
                    yield folder / f"{prefix}{kind}.{self.name}", content
                    written += 1
                elif options.kind:
                    reason = reason_missing(kind, run.summary.results)
                    undrawn.append(f"{kind} cannot be drawn for run {printable(title)}: {reason}")
                if omitted:
                    print(f"{kind} of {printable(title)} omits {omitted} panels; select cells with --where")
        if undrawn:
            raise UsageError("\n".join(undrawn))
        if not written:
            raise UsageError("nothing to draw: none of the runs has finished cells with a drafter")


class PngCharts(Charts):
    """Charts as PNG."""

    name: ClassVar[str] = "png"


class SvgCharts(Charts):
    """Charts as SVG."""

    name: ClassVar[str] = "svg"


class PdfCharts(Charts):
    """Charts as PDF."""

    name: ClassVar[str] = "pdf"
