"""Engine settings that reproduce the pairs of a run: a section of the HTML report."""

from __future__ import annotations

from collections.abc import Sequence

from crossdraft import ContractError, UsageError
from crossdraft.framework import plugins
from crossdraft.runs import FinishedRun, group_title, mark_of, titles_of

from ..engines.engine import Range, Schedule
from .candidates import acceptance_of

_TITLE = """## Settings of engines

Settings with which an engine drafts as a pair did here, with its draft length. `crossdraft advise` computes the length
that pays at each batch size."""


def engine_settings(runs: Sequence[FinishedRun]) -> str | None:
    """Settings of each known engine for each certified pair of drafter and verifier, batch sizes merged.

    A pair is a heading, an engine a heading below it, with the settings in a block, or the reason why the engine does
    not support the pair.
    """
    parts = []
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
            titles = [run_title] * (len(runs) > 1) + [pair, group_title(config, configs, but="batch_size")]
            parts.append(f"### {', '.join(titles)}")
            try:
                acceptance = acceptance_of(result, run.name)
            except UsageError:
                parts.append("The acceptance is unknown: no step drafted the full length.")
                continue
            schedule = Schedule(acceptance, (Range(1, 1, acceptance.gamma),), {})
            parts += [_settings(name, schedule) for name in plugins.entries("engines")]
    return "\n\n".join([_TITLE, *parts]) if parts else None


def _settings(name: str, schedule: Schedule) -> str:
    try:
        engine = plugins.get("engines", name)()
        with plugins.guarded("engines", name, "cannot() or export()"):
            reason = engine.cannot(schedule.acceptance)
            settings = None if reason else engine.export(schedule)
    except (ContractError, UsageError) as error:  # a defect of a plug-in, or a required setting is unknown
        reason, settings = str(error), None
    if settings is None:
        return f"#### {name}\n\n- not in {name}: {reason}"
    remarks = (f"option names of {engine.read_from}", *settings.remarks)
    return "\n\n".join([f"#### {name}", f"~~~text\n{settings.text}\n~~~", "\n".join(f"- {line}" for line in remarks)])
