"""Output of ``crossdraft simulate``: a table per arrival process, JSON and CSV."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from crossdraft.framework.metrics.columns import SIMULATION_COLUMNS
from crossdraft.framework.util.estimate import Estimate, estimate_text, spread
from crossdraft.framework.util.table import Alignment, Table

if TYPE_CHECKING:
    from ...advise.caveats import Remarks
    from ...simulate.outcome import PolicyResult


def as_text(title: str, results: Sequence[PolicyResult], remarks: Remarks) -> str:
    parts = [title]
    for arrivals, rows in groupby(results, key=lambda result: result.arrivals):
        parts.append(f"{arrivals}\n\n{_table(list(rows))}")
    legend = (
        "B: mean decoding rows; p95: of requests; goodput: within the service level; regret: excess of the mean latency"
    )
    parts.append(f"{legend} over the oracle's")
    return "\n\n".join([*parts, "\n".join(remarks.lines())])


def _table(rows: Sequence[PolicyResult]) -> str:
    goodput, regret = any(row.goodput for row in rows), any(row.regret for row in rows)
    columns: dict[str, Alignment] = {
        "policy": "left",
        "B": "right",
        "tok/step": "right",
        "tok/s": "right",
        "first token ms": "right",
    }
    columns |= {"p95": "right", "ms/token": "right", "p95 ": "right"}
    columns |= {"goodput /s": "right"} if goodput else {}
    columns |= {"regret %": "right"} if regret else {}
    body = []
    for row in rows:
        cells = [row.policy, f"{row.batch_size:.1f}", f"{row.block_efficiency_all_steps:.2f}"]
        cells.append(f"{row.tokens_per_second.value:.0f}")
        cells += [f"{1000 * s:.0f}" for s in (row.first_token_seconds.value, row.first_token_seconds_p95)]
        per_token = (row.token_seconds.value, row.token_seconds_p95) if row.token_seconds else ()
        cells += [f"{1000 * s:.1f}" for s in per_token] or ["", ""]
        cells += [estimate_text(row.goodput, digits=1)] if goodput else []
        cells += [estimate_text(row.regret.scaled(100) if row.regret else None, digits=1)] if regret else []
        body.append(cells)
    return Table(columns, body).text()


def as_json(title: str, results: Sequence[PolicyResult], remarks: Remarks) -> str:
    return json.dumps({"title": title, "results": [asdict(r) for r in results], "remarks": asdict(remarks)}, indent=2)


def as_csv(results: Sequence[PolicyResult]) -> str:
    """A row per arrival process and policy, with the columns of `SIMULATION_COLUMNS`."""
    return Table.of(map(_row, results)).csv() + "\n"


def _row(result: PolicyResult) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in (f.name for f in fields(result)):
        assert name in SIMULATION_COLUMNS
        value = getattr(result, name)
        row |= spread(name, value) if isinstance(value, Estimate) else {name: value}
    return row
