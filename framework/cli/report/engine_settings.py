"""Engine settings that reproduce the pairs of a run, for the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import plugins
from ...advise.candidates import acceptance_of
from ...cost.load_run import FinishedRun, titles_of
from ...engines.engine import Range, Schedule
from ...errors import UsageError
from ...runs.labels import group_title
from ...runs.marks import mark_of


def engine_settings(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Settings of each known engine for each certified pair of drafter and verifier, batch sizes merged.

    Returns:
        one mapping per pair: ``title``; ``engines``, each with ``name``, ``text`` (the settings, empty if the engine
        does not support the pair) and ``remarks`` (the reason, or differences from the pair).
    """
    settings = []
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
            parts = [run_title] * (len(runs) > 1) + [pair, group_title(config, configs, but="batch_size")]
            names = list(plugins.entries("engines"))  # as registered: serving engines before simulators
            try:
                acceptance = acceptance_of(result, run.name)
            except UsageError:
                reason = "the acceptance is unknown: no step drafted the full length"
                engines = [{"name": name, "text": "", "remarks": [reason]} for name in names]
            else:
                schedule = Schedule(acceptance, (Range(1, 1, acceptance.gamma),), {})
                engines = [_settings(name, schedule) for name in names]
            settings.append({"title": ", ".join(parts), "engines": engines})
    return settings


def _settings(name: str, schedule: Schedule) -> dict[str, Any]:
    engine = plugins.get("engines", name)()
    with plugins.guarded("engines", name, "cannot() or export()"):
        try:
            reason = engine.cannot(schedule.acceptance)
            settings = None if reason else engine.export(schedule)
        except UsageError as error:  # a required setting is unknown
            reason, settings = str(error), None
    if settings is None:
        return {"name": name, "text": "", "remarks": [f"not in {name}: {reason}"]}
    version = f"option names of {engine.read_from}"
    return {"name": name, "text": settings.text, "remarks": [version, *settings.remarks]}
