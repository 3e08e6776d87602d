"""Formats of ``crossdraft report`` for text and numbers."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..cost.load_run import titles_of
from ..errors import UsageError
from ..util.table import Table
from .csv_rows import row_of
from .markdown import MARK, page
from .pivot import hidden_keys, pivot, rendered, withheld_note
from .report import Report
from .segments import columns_of
from .selection import finished_cells
from .tables import terminal

if TYPE_CHECKING:
    from ..cost.load_run import FinishedRun

#: Options of a pivot table.
_PIVOT = ("rows", "cols", "value")


class NumbersReport(Report):
    """A text with all results, or a pivot table if ``--rows``, ``--cols`` or ``--value`` is given."""

    options: ClassVar[tuple[str, ...]] = (*_PIVOT, "baseline", "digits", "no_intervals")

    def render(self, runs: Sequence[FinishedRun], options: Any) -> str:
        if options.model_fields_set.intersection(_PIVOT):
            return self.pivoted(runs, options)
        return self.complete(runs, options)

    @abstractmethod
    def complete(self, runs: Sequence[FinishedRun], options: Any) -> str:
        """The text with all results."""

    def pivoted(self, runs: Sequence[FinishedRun], options: Any) -> str:
        """The pivot table. Raises UsageError for keys under which cells collide; prints notes on standard error."""
        cells = [cell for cell in finished_cells(runs) if options.baseline or not cell.result.config.is_baseline]
        if not cells:
            raise UsageError("no cells to show: --where excludes all of them (plain decoding requires --baseline)")
        names = dict.fromkeys(name for run in runs for segments in run.segments.values() for name in segments)
        values = options.value or [f"block_efficiency_{name}" for name in names] or ["block_efficiency"]
        table = pivot(cells, options.rows, options.cols, values)
        notes = [withheld_note(table)]
        if keys := hidden_keys(table, cells):
            notes.append(f"the cells of this table differ in {', '.join(keys)}, which are not in --rows or --cols")
        for note in filter(None, notes):
            print(f"crossdraft: note: {note}", file=sys.stderr)
        return rendered(table, self.name, options.digits, not options.no_intervals)


class MarkdownReport(NumbersReport):
    """The report of `markdown.page`."""

    name: ClassVar[str] = "markdown"
    mark: ClassVar[bytes] = MARK

    def complete(self, runs: Sequence[FinishedRun], options: Any) -> str:
        return page(runs)


class TextReport(NumbersReport):
    """The tables that ``crossdraft run`` prints at its end."""

    name: ClassVar[str] = "text"

    def complete(self, runs: Sequence[FinishedRun], options: Any) -> str:
        return "\n\n".join(terminal(run.summary) for run in runs) + "\n"


class CsvReport(NumbersReport):
    """A row per cell, with the columns of ``summary.csv``."""

    name: ClassVar[str] = "csv"

    def complete(self, runs: Sequence[FinishedRun], options: Any) -> str:
        titles = titles_of(runs)
        records = [
            ({"run": title} if len(runs) > 1 else {}) | row_of(result, run.summary) | columns_of(run, result)
            for title, run in zip(titles, runs, strict=True)
            for result in run.summary.results
        ]
        return Table.of(records).render(self.name) + "\n"


class JsonReport(CsvReport):
    """An object per cell, with the columns of ``summary.csv``."""

    name: ClassVar[str] = "json"


class LatexReport(NumbersReport):
    """A pivot table."""

    name: ClassVar[str] = "latex"

    def complete(self, runs: Sequence[FinishedRun], options: Any) -> str:
        return self.pivoted(runs, options)
