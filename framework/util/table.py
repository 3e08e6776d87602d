"""A table for people and for programs: text, Markdown, LaTeX, CSV and JSON from the same columns and rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .estimate import Estimate, estimate_text, spread

#: "left" or "right".
Alignment = str
#: Formats of a table, each a method of `Table`.
FORMATS = ("text", "markdown", "csv", "json", "latex")


@dataclass(frozen=True)
class Table:
    """Rows of cells below named columns.

    A cell is text, a number, an `Estimate` or None. Text formats round numbers to ``digits`` decimals; CSV and JSON
    have all digits, and an estimate with its bounds. No format ends in a line break.

    Attributes:
        columns: names, with the alignment of each if it is not that of its cells (numbers to the right).
        rows: cells; a short row is filled up with None.
        notes: sentences below the table, except in CSV and JSON.
        title: heading, except in CSV and JSON.
        widths: maximum width of each column as text; longer cells are wrapped.
    """

    columns: Mapping[str, Alignment] | Sequence[str | tuple[str, Alignment]]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()
    title: str = ""
    digits: int = 2
    widths: Sequence[int | None] = ()

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], **attributes: Any) -> Table:
        """The table of records: a row each, and the columns of all in order of first appearance."""
        records = list(records)
        names = list(dict.fromkeys(name for record in records for name in record))
        return cls(names, [[record.get(name) for name in names] for record in records], **attributes)

    @property
    def names(self) -> list[str]:
        return [column if isinstance(column, str) else column[0] for column in self.columns]

    def without(self, *names: str) -> Table:
        """The table without these columns."""
        columns = self.columns.items() if isinstance(self.columns, Mapping) else self.columns
        kept = [(i, column) for i, column in enumerate(columns) if self.names[i] not in names]
        rows = [[row[i] for i, _ in kept] for row in self._filled()]
        return replace(self, columns=[column for _, column in kept], rows=rows)

    def render(self, form: str) -> str:
        """The table in one of `FORMATS`."""
        return getattr(self, form)()

    def text(self) -> str:
        return "\n\n".join(filter(None, (self.title, self._tabulated("simple"), "\n".join(self.notes))))

    def markdown(self, level: int = 2) -> str:
        """GitHub's Markdown, with the title as a heading of this level."""
        heading = f"{'#' * level} {self.title}" if self.title else ""
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join(filter(None, (heading, self._tabulated("github"), notes)))

    def latex(self) -> str:
        """LaTeX for the package booktabs; title and notes as comments."""
        # LaTeX reads a bracket after the end of a row as its argument.
        lines = self._tabulated("latex_booktabs").splitlines()
        lines = [f"{{[}}{line.lstrip()[1:]}" if line.lstrip().startswith("[") else line for line in lines]
        comments = [f"% {line}" for line in (self.title, "\\usepackage{booktabs}", *self.notes) if line]
        return "\n".join([*comments, *lines])

    def csv(self) -> str:
        """CSV with a header; an estimate has three columns, see `spread`."""
        rows = self._filled()
        estimates = [any(isinstance(row[i], Estimate) for row in rows) for i in range(len(self.names))]
        output = io.StringIO()
        writer = csv.writer(output, lineterminator="\n")
        parts = zip(self.names, estimates, strict=True)
        writer.writerow([part for name, wide in parts for part in (spread(name, None) if wide else (name,))])
        for row in rows:
            cells: list[Any] = []
            for cell, wide in zip(row, estimates, strict=True):
                cells += spread("", _estimate(cell)).values() if wide else (cell,)
            writer.writerow(cells)
        return output.getvalue().removesuffix("\n")

    def json(self) -> str:
        """A JSON list of an object per row."""
        rows = [[asdict(cell) if isinstance(cell, Estimate) else cell for cell in row] for row in self._filled()]
        return json.dumps([dict(zip(self.names, row, strict=True)) for row in rows], indent=2, ensure_ascii=False)

    def _filled(self) -> list[list[Any]]:
        return [[*row, *[None] * (len(self.columns) - len(row))] for row in self.rows]

    def _tabulated(self, style: str) -> str:
        from tabulate import tabulate

        rows = self._filled()
        columns = self.columns.items() if isinstance(self.columns, Mapping) else self.columns
        align = [
            _alignment(row[i] for row in rows) if isinstance(column, str) else column[1]
            for i, column in enumerate(columns)
        ]
        header, *body = [[self._cell(cell, style) for cell in row] for row in (self.names, *rows)]
        widths: dict[str, Any] = {"maxcolwidths": list(self.widths)} if any(self.widths) else {}
        return tabulate(body, headers=header, tablefmt=style, disable_numparse=True, colalign=align, **widths)

    def _cell(self, cell: Any, style: str) -> str:
        """A cell as text, without control characters and, in Markdown, with escaped bars."""
        if isinstance(cell, float):
            return f"{cell:.{self.digits}f}"
        if isinstance(cell, Estimate):
            return estimate_text(cell, digits=self.digits)
        text = "" if cell is None else str(cell)
        text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
        return text.replace("|", "\\|") if style == "github" else text


def _alignment(cells: Iterable[Any]) -> Alignment:
    values = [cell for cell in cells if cell not in (None, "")]
    return "right" if values and all(isinstance(value, int | float | Estimate) for value in values) else "left"


def _estimate(cell: Any) -> Estimate | None:
    return cell if cell is None or isinstance(cell, Estimate) else Estimate(cell)
