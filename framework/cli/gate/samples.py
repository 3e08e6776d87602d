"""Block efficiencies of a source of ``crossdraft gate``: a finished run, or what registered readers find in a file."""

from __future__ import annotations

from ... import plugins
from ...errors import UsageError, quoted
from ...metrics.cell_metrics import sums_by_prompt, uncut_steps
from ...metrics.gate import Sample
from ...report.load_run import FinishedRun
from ...runs.labels import group_title


def samples_of(name: str) -> list[Sample]:
    """The samples of a file or URL. Raises UsageError if it does not have any."""
    readers = plugins.entries("samples")
    if not readers:
        raise UsageError(
            f"{quoted(name)} is not a run; other sources are read by crossdraft-advisor: pip install crossdraft-advisor"
        )
    samples = []
    for reader in readers:
        with plugins.guarded("samples", reader, "the reader"):
            samples += plugins.get("samples", reader)(name)
    return samples


def of_run(run: FinishedRun) -> list[Sample]:
    """The samples of a finished run."""
    cells = [result.config for result in run.summary.results]
    samples = []
    for result in run.summary.results:
        if result.metrics and not result.config.is_baseline:
            sums = sums_by_prompt(uncut_steps(result.records, result.metrics.depth))
            config = result.config
            title = f"{config.drafter.title} × {config.verifier.title}, {group_title(config, cells)}"
            samples.append(Sample(title, list(sums.values()), tuple(map(str, sums))))
    return samples
