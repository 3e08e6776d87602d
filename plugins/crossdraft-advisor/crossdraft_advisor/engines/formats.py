"""Acceptance from a source in the format of any engine."""

from __future__ import annotations

from crossdraft.framework import plugins
from crossdraft.framework.errors import UsageError

from .acceptance import Acceptance
from .engine_log import Source, read_source


def read_acceptances(name: str, since: str | None = None) -> tuple[Source, list[Acceptance]]:
    """Read a file or URL; return its text and every acceptance in it.

    Args:
        since: an earlier scrape of the same counters, to subtract.

    Raises:
        UsageError: the source cannot be read, is invalid, or has no acceptance.
    """
    source = read_source(name)
    earlier = read_source(since) if since else None
    acceptances: list[Acceptance] = []
    for engine in plugins.entries("engines"):
        reader = plugins.get("engines", engine)()
        with plugins.guarded("engines", engine, "read()"):
            items = list(reader.read(source, earlier))
        if not all(isinstance(item, Acceptance) for item in items):
            raise plugins.unusable("engines", engine, "read() must return a list of crossdraft_advisor.Acceptance")
        acceptances += items
    if not acceptances:
        kind = "two scrapes of counters" if earlier else "a log, metrics or responses"
        raise UsageError(f"{name} has no acceptance in a known format of {kind} (see crossdraft list engines)")
    return source, acceptances
