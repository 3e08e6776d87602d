"""Tables of a run for the terminal and as Markdown.

Cells are grouped as they were measured; a speed-up is over the drafter ``none`` of the same group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runs.labels import counted, verifier_title
from ..util.estimate import estimate_text
from ..util.table import Alignment, Table
from .answer import answer_text
from .batch_sizes import by_batch_size, multi_over_single
from .caveats import differences, remarks_of
from .metrics_text import efficiency_text, rate_text, speed_up_text

if TYPE_CHECKING:
    from ..cost.summary import Summary
    from ..runs.records import CellResult

_COLUMNS: dict[str, Alignment] = {
    "drafter": "left",
    "verifier": "left",
    "BE [95 %]": "left",
    "Pr(τ≥1), Pr(τ≥2), …": "left",
    "rows/tok": "right",
    "d/t/v/r %": "right",
    "tok/s": "right",
    "predicted": "right",
    "speed-up [95 %]": "left",
    "first token ms": "left",
    "ms/token": "left",
}
#: Columns of an engine's server only, and columns of the own loop only.
_SERVED, _OWN = ("first token ms", "ms/token"), ("d/t/v/r %",)
_LEGEND = (
    "BE: tokens per target call [95 % interval]; Pr(τ≥i): steps with i accepted; rows/tok: target positions per\n"
    "token; d/t/v/r: time in draft, target, verify, rest; speed-up: over plain decoding; ~: by the clock, no speed-up"
)
#: For Markdown.
_DETAILS = (
    "\\*: of all steps, none had room for a full draft. Rows of a batch are padded to the widest. Times are of\n"
    "steps with all slots in use, prefill of the drafter included; tok/s: from the undisturbed time of each\n"
    "component of a step, over all cells of the group. An interval requires 3 pieces of prompts."
)
_BY_BATCH_SIZE = (
    "pays up to: the last batch size at which the interval of the speed-up lies above 1; ~: interpolated with the\n"
    "cost curve; unknown without an interval."
)
_GAIN = "The gain of several draft sequences or branches over one, each of the best certified pair by its own measure."
#: Values of Pr(tau >= i) that fit the terminal.
_MAX_DEPTHS = 5
#: Lines of remarks below the tables of a terminal.
_MAX_REMARKS = 3


def terminal(summary: Summary) -> str:
    """The answer, the tables and the most important remarks, for a terminal of about 130 columns."""
    tables = [*_tables(summary), *by_batch_size(summary), *multi_over_single(summary)]
    parts = [answer_text(summary), *(table.text() for table in tables), *([_LEGEND] if tables else [])]
    remarks = [lines[0] for lines in remarks_of(summary) if lines]
    parts.append("\n".join(remarks[:_MAX_REMARKS]))
    more = len(remarks) - _MAX_REMARKS
    further = f" and {counted(more, 'more remark')}" * (more > 0)
    return "\n\n".join(filter(None, [*parts, f"details{further}: {summary.directory / 'summary.md'}"]))


def brief(summary: Summary) -> str:
    """The tables of a running run, with the number of prompts so far."""
    tables = "\n\n".join(table.text() for table in _tables(summary))
    measured = max((result.prompts for result in summary.results), default=0)
    planned = max((result.planned or 0 for result in summary.results), default=0)
    return f"so far, {measured} of {planned} prompts:\n\n{tables}\n"


def summary_markdown(summary: Summary) -> str:
    """The report as Markdown."""
    recipe = summary.recipe
    parts = [f"# {recipe.name}"]
    parts += [text for text in (recipe.question, recipe.description) if text]
    parts.append(f"Target {recipe.target}, prompts {recipe.prompts.source}.")
    if answer := answer_text(summary):
        parts.append(answer.replace("answer:", "**Answer**:").replace("\n", "\n\n").replace("\n  ", "\n- "))
    parts += [*(table.markdown() for table in _tables(summary)), f"{_LEGEND}. {_DETAILS}"]
    parts += [table.markdown() for table in _by_category(summary)]
    for tables, legend in ((by_batch_size(summary), _BY_BATCH_SIZE), (multi_over_single(summary), _GAIN)):
        parts += [*(table.markdown() for table in tables), *([legend] if tables else [])]
    parts += [f"![{name.partition('.')[0].replace('_', ' ')}]({name})" for name in summary.charts]
    for lines in [differences(summary), *remarks_of(summary)]:
        if lines:
            parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _tables(summary: Summary) -> list[Table]:
    """The table of each group with finished cells."""
    tables = []
    for title, results in summary.groups:
        finished = [r for r in results if r.metrics is not None]
        cells = [_row(r, summary) for r in finished]
        if cells:
            hidden = [*(_OWN if results[0].config.engine else _SERVED), *([] if summary.predicted else ["predicted"])]
            tables.append(Table(_COLUMNS, cells, title=title).without(*hidden))
    return tables


def _row(result: CellResult, summary: Summary) -> tuple[str, ...]:
    config, metrics, predicted = result.config, result.metrics, summary.predicted.get(result.config.hash)
    assert metrics is not None
    acceptance = [f"{p:.2f}".removeprefix("0") for p in metrics.acceptance]
    more = " …" if len(acceptance) > _MAX_DEPTHS else ""
    shares = [f"{100 * metrics.shares[phase]:.0f}" for phase in ("draft", "target", "verify", "rest") if metrics.timed]
    return (
        config.drafter.title,
        verifier_title(result),
        "1" if config.is_baseline else efficiency_text(metrics),
        " ".join(acceptance[:_MAX_DEPTHS]) + more,
        f"{metrics.target_rows_per_token:.2f}",
        "/".join(shares),
        rate_text(metrics),
        f"{predicted.tokens_per_second:.1f}" if predicted else "",
        "1" if config.is_baseline and metrics.speed_up else speed_up_text(metrics),
        *(estimate_text(t.scaled(1000) if t else None) for t in (metrics.first_token_seconds, metrics.token_seconds)),
    )


def _by_category(summary: Summary) -> list[Table]:
    """A table of each group measured category by category, with a row per pair and category.

    Omitted if pieces mix categories or have too few prompts for an interval; the CSV is complete.
    """
    tables = []
    columns = ("drafter", "verifier", "category", "prompts", "BE [95 %]", "speed-up [95 %]")
    for title, results in summary.groups:
        rows = []
        for result in results:
            if result.drafting is None:
                continue
            by_category = result.drafting.by_category
            withheld = "withheld" if result.drafting.withheld else ""
            intervals = all(m.block_efficiency and m.block_efficiency.low for m in by_category.values())
            unmixed = withheld or any(m.speed_up for m in by_category.values())
            if len(by_category) < 2 or not (intervals and unmixed):
                continue
            for category, metrics in by_category.items():
                pair = result.config.drafter.title, verifier_title(result)
                numbers = efficiency_text(metrics), withheld or estimate_text(metrics.speed_up)
                rows.append([*pair, category, metrics.prompts, *numbers])
        if rows:
            tables.append(Table(columns, rows, title=f"by category, {title}"))
    return tables
