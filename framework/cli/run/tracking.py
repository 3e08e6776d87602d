"""``--track NAME``: experiment trackers, registered for the duration of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ... import plugins

if TYPE_CHECKING:
    from ...bench.plan import Plan


@contextmanager
def tracking(names: Sequence[str], plan: Plan) -> Iterator[dict[str, Any]]:
    """Register the named trackers; yield the outcome that plug-ins receive at the end, for the run to update.

    Raises:
        UsageError: an unknown tracker, or one whose library or server is not available.
    """
    trackers: list[Any] = []
    for name in dict.fromkeys(names):
        kind = plugins.get("trackers", name)
        with plugins.guarded("trackers", name):
            trackers.append(kind())
    for tracker in trackers:
        plugins.manager().register(tracker)
    outcome = {"exit_code": 1, "failed": 0, "interrupted": False, "stopped": "stopped by an error"}
    try:
        yield outcome
    finally:
        if plan.started:
            plugins.notify("crossdraft_run_finished", run=plan.about, outcome=outcome)
        for tracker in trackers:
            plugins.manager().unregister(tracker)
