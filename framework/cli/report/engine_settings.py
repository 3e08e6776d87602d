"""How engines are told to draft as the pairs of a run did, for the HTML report to show and copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import plugins
from ...advise.candidates import acceptance_of
from ...advise.engine import Range, Schedule
from ...errors import UsageError
from ...report.load_run import FinishedRun
from ...report.markdown import titles_of
from ...runs.labels import group_title
from ...runs.marks import mark_of


def settings_of(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Settings of every known engine for each certified pair with its own draft length, whatever the batch size.

    Returns:
        ``title`` of the pair; ``engines``: ``name``, ``text`` to copy (empty where the engine cannot do it) and
        ``remarks`` (why not, or what it does otherwise).
    """
    found = []
    for run_title, run in zip(titles_of(runs), runs, strict=True):
        configs = [result.config for result in run.summary.results]
        pairs = {}
        for result in run.summary.results:
            config, metrics = result.config, result.metrics
            if not config.is_baseline and metrics is not None and metrics.acceptance and mark_of(result).headline:
                pairs.setdefault(config.model_copy(update={"batch_size": 1}).hash, result)
        for result in pairs.values():
            config = result.config
            pair = f"{config.drafter.title} × {config.verifier.title}"
            words = [run_title] * (len(runs) > 1) + [pair, group_title(config, configs, but="batch_size")]
            names = sorted(plugins.entries("engines"))
            try:
                acceptance = acceptance_of(result, run.name)
            except UsageError:
                why = "no step had room for a whole draft: there is no acceptance to go by"
                engines = [{"name": name, "text": "", "remarks": [why]} for name in names]
            else:
                schedule = Schedule(acceptance, (Range(1, 1, acceptance.gamma),), {})
                engines = [_told(name, schedule) for name in names]
            found.append({"title": ", ".join(words), "engines": engines})
    return found


def _told(name: str, schedule: Schedule) -> dict[str, Any]:
    engine = plugins.get("engines", name)()
    with plugins.guarded("engines", name, "cannot() or export()"):
        try:
            reason = engine.cannot(schedule.acceptance)
            settings = None if reason else engine.export(schedule)
        except UsageError as error:  # something that the engine has to be told is not known
            reason, settings = str(error), None
    if settings is None:
        return {"name": name, "text": "", "remarks": [f"not in {name}: {reason}"]}
    version = f"names as of {engine.read_from}"
    return {"name": name, "text": settings.text, "remarks": [version, *settings.remarks]}
