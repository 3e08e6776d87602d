"""Output of ``crossdraft advise``: a table per temperature and the sources of its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from crossdraft.framework.util.estimate import estimate_text
from crossdraft.framework.util.table import Table

from ...advise.decision import excludes_one

if TYPE_CHECKING:
    from ...advise.caveats import Remarks
    from ...advise.decision import Choice, Step
    from ...engines.engine import Schedule, Settings

_LEGEND = (
    "speed-up: predicted, over plain decoding, with a 95 % interval; ~: the interval includes the runner-up; "
    "?: it includes 1"
)


def as_text(steps: Mapping[str, Sequence[Step]], remarks: Remarks) -> str:
    parts = [f"{title}\n\n{_table(steps_of_title)}" for title, steps_of_title in steps.items()]
    first = ["\n".join(remarks.first_lines())] if remarks.first else []
    return "\n\n".join([*first, *parts, _LEGEND, "\n".join(remarks.lines())])


def _table(steps: Sequence[Step]) -> str:
    contexts, measured = len({step.context for step in steps}) > 1, any(step.measured for step in steps)
    rows = []
    for step in steps:
        cells = [str(step.batch_size), *([f"{step.context:g}"] if contexts else [])]
        mark = "" if step.sure else " ?"
        other = "" if step.runner_up is None else _pair(step.runner_up) + " ~" * step.close
        rows.append([*cells, step.advice + mark, *_choice_cells(step.best), other])
        if measured:
            rows[-1].append(_pair(step.measured) if step.measured else "")
    header = ["B", *["context"] * contexts, "advice", "drafter", "verifier", "gamma", "speed-up", "runner-up"]
    header += ["measured best"] * measured
    return Table(header, rows).text()


def schedule_text(schedule: Schedule) -> str:
    """The draft length and the predicted speed-up of exported settings, by batch size."""
    acceptance = schedule.acceptance
    pair = f"{acceptance.drafter or 'drafts'} × {acceptance.verifier or '?'}"
    rows = []
    for row in schedule_rows(schedule):
        mark = " ?" if row["gamma"] and not excludes_one(row["speed_up"]) else ""
        rows.append([str(row["batch_size"]), str(row["gamma"]), estimate_text(row["speed_up"]) + mark])
    return Table(["B", "gamma", "speed-up"], rows, title=f"{pair}, with these settings").text()


def schedule_rows(schedule: Schedule) -> list[dict[str, Any]]:
    """Batch size, draft length and speed-up (an `Estimate`) of exported settings."""
    ranges = sorted(schedule.ranges, key=lambda item: item.low)
    return [
        {"batch_size": b, "gamma": [r.gamma for r in ranges if r.low <= b][-1], "speed_up": speed_up}
        for b, speed_up in sorted(schedule.speed_ups.items())
    ]


def _choice_cells(choice: Choice) -> list[str]:
    candidate = choice.candidate
    verifier = candidate.acceptance.verifier or "?"
    return [candidate.title, verifier, str(choice.gamma), estimate_text(choice.speed_up)]


def _pair(choice: Choice) -> str:
    drafter, verifier, gamma, _ = _choice_cells(choice)
    return f"{drafter} × {verifier}, {gamma}: {choice.speed_up.value:.2f}"


# -- JSON --------------------------------------------------------------------------------------------------------


def as_json(
    steps: Mapping[str, Sequence[Step]], remarks: Remarks, settings: Settings | None, schedule: Schedule | None = None
) -> dict[str, Any]:
    kinds = asdict(remarks)
    first = kinds.pop("first")  # of all warnings
    report: dict[str, Any] = {
        "advice": [
            {
                "group": title,
                "batch_size": step.batch_size,
                "context": step.context,
                "draft": step.draft,
                "sure": step.sure,
                "best": _choice(step.best),
                "runner_up": _choice(step.runner_up) if step.runner_up else None,
                "measured_best": _choice(step.measured) if step.measured else None,
            }
            for title, steps_of_title in steps.items()
            for step in steps_of_title
        ],
        "remarks": {**kinds, "warnings": [*first, *remarks.warnings]},
    }
    if settings is not None and schedule is not None:
        rows = [{**row, "speed_up": asdict(row["speed_up"])} for row in schedule_rows(schedule)]
        report |= {"settings": settings.text, "schedule": rows}
    return report


def _choice(choice: Choice) -> dict[str, Any]:
    acceptance = choice.candidate.acceptance
    return {
        "drafter": acceptance.drafter or None,
        "model": acceptance.model or None,
        "verifier": acceptance.verifier or None,
        "gamma": choice.gamma,
        "options": dict(acceptance.options),
        "source": acceptance.source,
        "speed_up": asdict(choice.speed_up),
        "tokens_per_second": choice.tokens_per_second,
    }
