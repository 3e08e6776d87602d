"""``--track NAME``: experiment trackers, registered for the duration of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ... import plugins
from ...contracts.hookspecs import hookimpl

if TYPE_CHECKING:
    from ...cost.summary import Summary


@contextmanager
def tracking(names: Sequence[str]) -> Iterator[Callable[[Summary], None]]:
    """Register the named trackers; yield a function to call with the outcome once the run's files are written.

    Raises:
        UsageError: an unknown tracker, or one whose library or server is not available.
    """
    manager, recorder = plugins.manager(), _RunRecorder()
    trackers: list[Any] = [recorder]
    for name in dict.fromkeys(names):
        kind = plugins.get("trackers", name)
        with plugins.guarded("trackers", name):
            trackers.append(kind())
    for tracker in trackers:
        manager.register(tracker)

    def report_outcome(outcome: Summary | None) -> None:
        run, recorder.run = recorder.run, {}
        fields: dict[str, Any] = {"exit_code": 1, "failed": 0, "interrupted": False, "stopped": "stopped by an error"}
        if outcome is not None:
            fields = {"exit_code": outcome.exit_code, "failed": len(outcome.failed)}
            fields |= {"interrupted": outcome.interrupted, "stopped": outcome.stopped}
        if run:
            plugins.notify("crossdraft_run_finished", run=run, outcome=fields)

    try:
        yield report_outcome
    finally:
        report_outcome(None)  # if the run started and raised
        for tracker in trackers:
            manager.unregister(tracker)


class _RunRecorder:
    """Records the run that was started."""

    run: Mapping[str, Any] = MappingProxyType({})

    @hookimpl
    def crossdraft_run_started(self, run: Mapping[str, Any]) -> None:
        self.run = self.run or run  # the first one; a launcher's processes belong to it
