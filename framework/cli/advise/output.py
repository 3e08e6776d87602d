"""What ``crossdraft advise`` shows: a table for each temperature, and where its numbers are from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...advise.caveats import Remarks
    from ...advise.decision import Choice, Step
    from ...advise.engine import Settings
    from ...metrics.intervals import Estimate

_LEGEND = (
    "speed-up: predicted, over plain decoding, with its 95 % interval; ~: the runner-up lies within it; ?: it holds 1"
)


def as_text(steps: Mapping[str, Sequence[Step]], remarks: Remarks) -> str:
    parts = [f"{title}\n\n{_table(found)}" for title, found in steps.items()]
    return "\n\n".join([*parts, _LEGEND, "\n".join(remarks.lines())])


def _table(steps: Sequence[Step]) -> str:
    from tabulate import tabulate

    contexts, measured = len({step.context for step in steps}) > 1, any(step.measured for step in steps)
    rows = []
    for step in steps:
        where = [str(step.batch_size), *([f"{step.context:g}"] if contexts else [])]
        mark = "" if step.sure else " ?"
        advice = "draft" if step.draft else "off"
        rows.append([*where, advice + mark, *_shown(step.best), _runner_up(step)])
        if measured:
            rows[-1].append(_pair(step.measured) if step.measured else "")
    header = ["B", *(["context"] if contexts else []), "advice", "drafter", "rule", "gamma", "speed-up", "runner-up"]
    header += ["measured best"] if measured else []
    return tabulate(rows, headers=header, tablefmt="simple", disable_numparse=True)


def _shown(choice: Choice) -> list[str]:
    candidate = choice.candidate
    rule = candidate.acceptance.verifier or "?"
    return [candidate.title, rule, str(choice.gamma), _estimate(choice.speed_up)]


def _runner_up(step: Step) -> str:
    if step.runner_up is None:
        return ""
    return _pair(step.runner_up) + (" ~" if step.close else "")


def _pair(choice: Choice) -> str:
    drafter, rule, gamma, _ = _shown(choice)
    return f"{drafter} × {rule}, {gamma}: {choice.speed_up.value:.2f}"


def _estimate(found: Estimate) -> str:
    interval = "" if found.low is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.value:.2f}{interval}"


# -- JSON --------------------------------------------------------------------------------------------------------


def as_json(steps: Mapping[str, Sequence[Step]], remarks: Remarks, settings: Settings | None) -> dict[str, Any]:
    found: dict[str, Any] = {
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
            for title, mine in steps.items()
            for step in mine
        ],
        "remarks": asdict(remarks),
    }
    return found | ({"settings": settings.text} if settings is not None else {})


def _choice(choice: Choice) -> dict[str, Any]:
    found = choice.candidate.acceptance
    return {
        "drafter": found.drafter or None,
        "model": found.model or None,
        "verifier": found.verifier or None,
        "gamma": choice.gamma,
        "options": dict(found.options),
        "source": found.source,
        "speed_up": asdict(choice.speed_up),
        "tokens_per_second": choice.tokens_per_second,
    }
