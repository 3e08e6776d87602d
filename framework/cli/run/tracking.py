"""``--track NAME``: trackers are told of a run while it is asked for, and at no other time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ... import plugins
from ...contracts.hookspecs import hookimpl

if TYPE_CHECKING:
    from ...runs.records import Outcome


@contextmanager
def tracking(names: Sequence[str]) -> Iterator[Callable[[Outcome], None]]:
    """Register a tracker of each name; gives what is to be called when the run is over and its files are written.

    Raises:
        UsageError: a name that nobody registered, a tracker whose library or server is not there.
    """
    manager, seen = plugins.manager(), _Seen()
    made: list[Any] = [seen]
    for name in dict.fromkeys(names):
        kind = plugins.get("trackers", name)
        with plugins.guarded("trackers", name):
            made.append(kind())
    for tracker in made:
        manager.register(tracker)

    def tell(outcome: Outcome | None) -> None:
        run, seen.run = seen.run, {}
        told: dict[str, Any] = {"exit_code": 1, "failed": 0, "interrupted": False, "stopped": "ended by an error"}
        if outcome is not None:
            told = {"exit_code": outcome.exit_code, "failed": len(outcome.failed)}
            told |= {"interrupted": outcome.interrupted, "stopped": outcome.stopped}
        if run:
            plugins.notify("crossdraft_run_finished", run=run, outcome=told)

    try:
        yield tell
    finally:
        tell(None)  # of a run that began and did not get so far
        for tracker in made:
            manager.unregister(tracker)


class _Seen:
    """Remembers what was told when the run began."""

    run: Mapping[str, Any] = MappingProxyType({})

    @hookimpl
    def crossdraft_run_started(self, run: Mapping[str, Any]) -> None:
        self.run = self.run or run  # the first: a launcher's processes are part of it
