"""One self-contained page of HTML from the records of finished runs, to be sent around and opened offline.

Jinja2 lays it out and escapes all texts from records; charts are images of SVG. The page's policy forbids every request
and every script but its own, by its digest, so that a name in a record cannot run code.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from crossdraft import UnknownNameError
from crossdraft.framework import plugins
from crossdraft.framework.report.answer import NOT_CERTIFIED, NOT_FASTER, Best, best_of, order
from crossdraft.framework.report.batch_sizes import multi_over_single
from crossdraft.framework.report.caveats import differences, remarks_of
from crossdraft.framework.report.markdown import conditions
from crossdraft.framework.report.metrics_text import efficiency_text
from crossdraft.runs import FinishedRun, titles_of

from .cell_table import certificates, split_groups, table_of
from .panels import panels_of
from .responses import responses_of

#: In the page's head: `util.output_files.check_output` recognises a page by it.
MARK = b'content="crossdraft report"'


def html_page(runs: Sequence[FinishedRun]) -> str:
    """The page of these runs."""
    from jinja2 import Environment, StrictUndefined
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    sections = list(zip(titles_of(runs), runs, strict=True))
    panels, absent = panels_of(sections)
    responses = responses_of(sections)
    groups = split_groups([(title, run.summary) for title, run in sections])[1]
    bests = best_of((setting, results) for _, setting, results in groups)
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")  # tags in a text are text
    script = _asset("page.js")
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(_asset("page.html")).render(
        title=", ".join(dict.fromkeys(run.name for run in runs)),
        policy="; ".join(
            (
                "default-src 'none'",
                f"script-src 'sha256-{_digest(script)}'",
                "style-src 'unsafe-inline'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
        style=Markup(_asset("page.css")),
        script=Markup(script),
        svg=Markup,
        responses_json=Markup(_inert(responses)),
        headline=max(bests, key=lambda best: order(best.result), default=None),
        verdict=_verdict,
        conditions=_conditions,
        efficiency=efficiency_text,
        bests=bests,
        own={setting: group for group, setting, _ in groups},
        not_faster=NOT_FASTER,
        not_certified=NOT_CERTIFIED,
        table=table_of(sections),
        panels=panels,
        absent=absent,
        responses=responses,
        sections=[Markup(markdown.render(text)) for text in _added(runs)],
        certificates=certificates(sections),
        runs=[_about(title, run) for title, run in sections],
    )


def _added(runs: Sequence[FinishedRun]) -> list[str]:
    """Markdown of the sections that companions add."""
    try:
        return list(filter(None, [plugins.of_companion("section of engines")(runs)]))
    except UnknownNameError:  # not installed
        return []


def _verdict(best: Best) -> str:
    """Conclusion from the intervals, for a pair with a speed-up."""
    e = best.speed_up
    if e is None:
        return best.missing
    if e.low is None or e.high is None:
        return "too few prompts for an interval"
    if e.low > 1:
        return "faster than plain decoding"
    return "slower than plain decoding" if e.high < 1 else "no difference from plain decoding was shown"


def _conditions(best: Best) -> str:
    """Target, device and number of prompts."""
    result = best.result
    place = ", ".join(str(result.provenance[key]) for key in ("device", "dtype") if key in result.provenance)
    return ", ".join(filter(None, (f"target {result.config.target}", place, f"{result.prompts} prompts")))


def _about(title: str, run: FinishedRun) -> dict[str, Any]:
    """Question, conditions and remarks of a run."""
    remarks = [line for lines in remarks_of(run.summary) for line in lines]
    remarks += [line.removeprefix("- ") for line in run.remarks]
    return {
        "title": title,
        "question": run.summary.recipe.question,
        "description": run.summary.recipe.description,
        "partial": run.partial,
        "remarks": remarks,
        "differences": differences(run.summary),
        "gains": multi_over_single(run.summary),
        "conditions": [(subject, text.strip("`")) for subject, text in conditions(run)],
    }


def _asset(name: str) -> str:
    return (files(str(__package__)) / "assets" / name).read_text("utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _inert(value: Any) -> str:
    """JSON without characters that HTML gives a meaning to."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
