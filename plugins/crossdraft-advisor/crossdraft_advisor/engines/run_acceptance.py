"""Acceptance of the cells of a finished run."""

from __future__ import annotations

from crossdraft.framework.cost.finished_cells import drafter_traits, shorter_refusal
from crossdraft.framework.metrics.cell_metrics import uncut_steps
from crossdraft.framework.runs.records import CellResult

from .acceptance import Acceptance


def acceptance_of(result: CellResult, name: str) -> Acceptance:
    """Acceptance of a cell, with prompts as pieces, over the same steps as `Metrics.acceptance`."""
    config, metrics = result.config, result.metrics
    assert metrics is not None
    traits = drafter_traits(config)
    gamma = len(metrics.acceptance)
    sums: dict[int, list[float]] = {}
    for record in uncut_steps(result.records, metrics.depth):
        row = sums.setdefault(record.prompt, [0.0] * (gamma + 1))
        for i in range(min(record.tau, gamma) + 1):
            row[i] += 1
    return Acceptance.from_rows(
        [sums[prompt] for prompt in sorted(sums)],
        f"{name}, cell {config.hash}",
        drafter=config.drafter.name,
        verifier=config.verifier.name,
        model=str(config.drafter.config.get("model", "")),
        temperature=config.sampling.temperature,
        point_mass=traits.point_mass,
        chain=traits.is_chain,
        options={key: value for key, value in config.drafter.config.items() if key != "model"},
        refusal=shorter_refusal(config),
    )
