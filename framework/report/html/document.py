"""One self-contained page of HTML from the records of finished runs, to be sent around and opened offline.

Jinja2 lays it out and escapes whatever comes from records, Bokeh draws the plots, DataTables (as itables ships it)
sorts and filters the table. The page's policy forbids every request and every script but the three it holds, by their
digests, so that a name in somebody's records can do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from ...errors import UsageError
from ...util.extras import need
from ..caveats import differences, remarks_of
from ..load_run import FinishedRun
from ..markdown import conditions, titles_of
from .cell_table import best_of, cells_of, certificates, columns_of, filters_of
from .responses import responses_of

#: The modules that draw the page, lay it out and sort it.
LIBRARIES = ("bokeh", "jinja2", "itables")
#: In the page's head: `util.output_files.check_output` recognises a page by it.
MARK = b'content="crossdraft report"'


def html_page(runs: Sequence[FinishedRun], settings: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page of these runs.

    Args:
        settings: what engines are told for each pair, to be copied: ``title``, and ``engines`` with ``name``, ``text``
            and ``remarks``.

    Raises:
        UsageError: a library that it is made with is not installed.
    """
    need("an HTML report", "html", *LIBRARIES)
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from .plots import panels_of

    titles = titles_of(runs)
    sections = list(zip(titles, runs, strict=True))
    panels, absent = panels_of(sections)
    responses = responses_of(sections)
    plots = {choice.key: choice.plot for panel in panels for choice in panel.choices}
    # Bokeh is most of the code: the page keeps it as text, and runs it when the first plot comes into sight.
    plot_library, scripts = _bokeh(), [_data_tables(), _asset("page.js")]
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in (plot_library, *scripts))
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    cells = cells_of(sections)
    columns = columns_of(sections, cells)
    return page.from_string(_asset("page.html")).render(
        title=", ".join(dict.fromkeys(run.name for run in runs)),
        policy="; ".join(
            (
                "default-src 'none'",
                f"script-src {digests}",
                "style-src 'unsafe-inline'",
                "img-src data: blob:",
                "font-src data:",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
        styles=[Markup(_table_styles()), Markup(_asset("page.css"))],
        plot_library=Markup(plot_library),
        scripts=[Markup(script) for script in scripts],
        data=[
            ("plots", Markup(_inert(plots))),
            ("responses", Markup(_inert(responses))),
            ("settings", Markup(_inert(list(settings)))),
        ],
        columns=columns,
        cells=cells,
        filters=filters_of(columns, cells),
        best=best_of(sections),
        panels=panels,
        absent=absent,
        responses=responses,
        settings=settings,
        certificates=certificates(sections),
        runs=[_about(title, run) for title, run in sections],
    )


def _about(title: str, run: FinishedRun) -> dict[str, Any]:
    """What is told of a run beside its numbers."""
    remarks = [line for lines in remarks_of(run.summary) for line in lines]
    remarks += [line.removeprefix("- ") for line in run.remarks]
    return {
        "title": title,
        "question": run.summary.recipe.question,
        "description": run.summary.recipe.description,
        "cells": len(run.summary.results),
        "remarks": remarks,
        "differences": differences(run.summary),
        "conditions": [(what, text.strip("`")) for what, text in conditions(run)],
    }


def _bokeh() -> str:
    from bokeh.resources import Resources

    return _script(Resources(mode="inline", components=["bokeh"]).js_raw[0])


def _data_tables() -> str:
    """DataTables and its extensions: a module, made a function so that the page need not import from an address."""
    bundle, found, exports = (files("itables") / "html" / "dt_bundle.js").read_text("utf-8").rpartition("export{")
    names = re.search(r"(?:^|,)([\w$]+) as jQuery(?:,|\})", exports)
    if not found or names is None:
        raise UsageError("the installed itables is of another form than this version knows: pip install 'itables<3'")
    return _script(f"window.jQuery=(()=>{{{bundle}\nreturn {names[1]}}})();")


def _table_styles() -> str:
    return (files("itables") / "html" / "dt_bundle.css").read_text("utf-8").replace("</", "<\\/")


def _asset(name: str) -> str:
    return (files(str(__package__)) / "assets" / name).read_text("utf-8")


def _script(text: str) -> str:
    """Code that stands in a page: nothing in it ends the element it is in, and no map of its sources is looked for."""
    text = re.sub(r"^//# sourceMappingURL=.*$", "", text, flags=re.MULTILINE)
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _digest(script: str) -> str:
    # As browsers read it: line ends are one character.
    text = script.replace("\r\n", "\n").replace("\r", "\n")
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inert(value: Any) -> str:
    """JSON that nothing of can be read as HTML."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
