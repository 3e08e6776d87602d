"""`Table`: every format from the same columns and rows."""

import csv
import json

from crossdraft.framework.util.estimate import Estimate
from crossdraft.framework.util.table import FORMATS, Table

TABLE = Table(
    ["name", ("size", "right"), "speed-up", "tokens"],
    [["a|b\x1b", "1 k", Estimate(1.234, 1.0, 1.5), 3], ["[c]", None, 2.0]],
    notes=["a note"],
    title="A title",
)


def test_text_formats() -> None:
    assert TABLE.text().splitlines() == [
        "A title",
        "",
        "name       size           speed-up    tokens",
        "-------  ------  -----------------  --------",
        "a|b\\x1b     1 k  1.23 [1.00, 1.50]         3",
        "[c]                           2.00",
        "",
        "a note",
    ]
    markdown = TABLE.markdown(level=3).splitlines()
    assert markdown[0] == "### A title" and markdown[-1] == "- a note"
    assert markdown[4].startswith("| a\\|b\\x1b |")
    assert TABLE.latex().startswith("% A title\n% \\usepackage{booktabs}\n% a note\n\\begin{tabular}{lrrr}")
    assert "{[}c]" in TABLE.latex()
    assert not any(TABLE.render(form).endswith("\n") for form in FORMATS)


def test_exact_formats() -> None:
    header, first, second = csv.reader(TABLE.csv().splitlines())
    assert header == ["name", "size", "speed-up", "speed-up_low", "speed-up_high", "tokens"]
    assert first == ["a|b\x1b", "1 k", "1.234", "1.0", "1.5", "3"] and second == ["[c]", "", "2.0", "", "", ""]
    first, second = json.loads(TABLE.json())
    assert first["speed-up"] == {"value": 1.234, "low": 1.0, "high": 1.5} and second["speed-up"] == 2.0


def test_columns() -> None:
    table = Table.of([{"a": 1, "b": ""}, {"a": 2, "c": 3}])
    assert table.names == ["a", "b", "c"] and table.without("a").names == ["b", "c"]
