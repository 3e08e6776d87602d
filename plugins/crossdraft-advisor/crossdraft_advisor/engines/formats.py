"""Formats in which acceptance is recorded: logs, counters, responses and benchmarks of engines.

Formats are registered through the hook ``crossdraft_register_formats``, each a subclass of `AcceptanceFormat`, or of
`ResponseFormat` of `replay.response_formats`. Every source is read in every format of acceptance. A record that is
damaged, idle or failed is skipped and counted; a source is refused only if none of its records can be read.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError

from crossdraft import MOST_LEVELS, ContractError, UsageError
from crossdraft.commands import Options, fault
from crossdraft.framework import plugins
from crossdraft.framework.recipe.yaml_values import yaml_value
from crossdraft.runs import counted

from .acceptance import Acceptance
from .counter_definitions import CounterDefinition
from .engine_log import DraftLengthError, Source, read_source

#: Sources of other commands, and the command that reads them.
_OTHERS = (
    (
        re.compile(r'"(choices|messages|conversations|completion|resps|token_ids)"\s*:'),
        "it has responses without counts of accepted tokens: compute their acceptance with crossdraft replay, or "
        "crossdraft advise --replay",
    ),
    (
        re.compile(r'"(input_length|output_length|chat_id)"\s*:|ContextTokens|Request tokens'),
        "it is a trace of arrivals, for crossdraft simulate --trace",
    ),
    (
        re.compile(r"<!DOCTYPE html|<html", re.IGNORECASE),
        "it is a web page, perhaps one to log in: give the address of the counters, and an API key if the server needs "
        "one (docs/remote.md)",
    ),
    (
        re.compile(r'"resultType"\s*:'),
        "it is an answer of Prometheus without the names of counters: query them without rate() and sum(), as in "
        '{__name__=~"vllm:spec_decode_.*"}',
    ),
    (
        re.compile(r'"(mean_ttft_ms|request_latency|output_token_throughput|time_to_first_token)"\s*:'),
        "it is the result of a benchmark without counts of accepted tokens: give the server's /metrics after it, and "
        "those before it as --since, or its log",
    ),
    (
        re.compile(r'"(n_ctx|total_slots)"\s*:'),
        "llama.cpp's /slots and /props have no counts of accepted tokens: give /metrics (started with --metrics), its "
        "log or responses",
    ),
    (
        re.compile(r"SpecDecoding|spec_decode|speculative|Decode batch|print_timing", re.IGNORECASE),
        "it is of an engine, but has no counts of drafts that are known: the server does not draft, had no requests, "
        "or its statistics are switched off (vLLM: --disable-log-stats)",
    ),
)


class CounterSource(Options):
    """A source of acceptance and the circumstances that it was counted under, None if unknown.

    ``since``: an earlier scrape of the same counters, to subtract; empty for none. ``model``: the name that the server
    serves its model by; empty if unknown.
    """

    source: str
    since: str = ""
    model: str = ""
    temperature: float | None = None
    batch_size: int | None = None
    context: int | None = None
    gamma: Annotated[int | None, MOST_LEVELS] = Field(None, ge=1)

    @classmethod
    def parse(cls, text: str, option: str) -> CounterSource:
        """Parse ``FILE`` or ``{source: FILE, gamma: 5}``, the value of an option. Raises UsageError."""
        data: Any = yaml_value(text, lambda line: option) if text.lstrip().startswith("{") else {"source": text}
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise UsageError(f"{option} {text}: key {place!r}: {fault(problem)}") from None


class AcceptanceFormat(ABC):
    """A format in which acceptance is recorded."""

    name: ClassVar[str]  # as registered
    counters: ClassVar[CounterDefinition | None] = None  # definition of the engine's counters, if they are of one
    definition: ClassVar[str] = ""  # meaning of an accepted token and of a step, without ``counters``
    subtracts: ClassVar[bool] = False  # an earlier source is subtracted; other formats are not read with an earlier one

    @abstractmethod
    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        """Read the acceptance in a source; empty if it is not in this format.

        ``earlier``: an earlier source to subtract, if the format `subtracts`. Raises UsageError if no record of the
        format can be read. Otherwise records that cannot be read are skipped, see `Source.skipping`.
        """

    def meaning(self) -> str:
        """The definition by which tokens count as accepted."""
        return self.definition or (self.counters.meaning if self.counters is not None else "")


def read_acceptances(
    name: str, since: str | None = None, gamma: int | None = None, *, plain: bool = False
) -> tuple[Source, list[Acceptance]]:
    """Read a file or URL; return its text, which has the skipped records, and every acceptance in it.

    ``since``: an earlier scrape of the same counters, to subtract; ``gamma``: the draft length, for sources that lack
    it and the number of steps; ``plain``: accept a source without drafts that has speeds. Raises UsageError if the
    source cannot be read, is invalid, or has no acceptance.
    """
    source = read_source(name, gamma)
    return source, acceptances_in(source, read_source(since) if since else None, plain=plain)


def acceptances_in(source: Source, earlier: Source | None = None, *, plain: bool = False) -> list[Acceptance]:
    """Every acceptance in a source, see `read_acceptances`."""
    acceptances: list[Acceptance] = []
    failures: list[str] = []
    for entry in plugins.entries("formats"):
        try:
            with source.skipping():
                acceptances += _read(entry, source, earlier)
        except ContractError as error:  # of a plug-in; the other formats are read
            failures.append(str(error))
    source.skipped[:] = dict.fromkeys([*source.skipped, *failures])  # several formats skip a damaged line
    if not acceptances and not (plain and source.timed):
        if source.skipped:
            raise UsageError(source.skipped[0])
        if earlier is not None:
            raise UsageError(f"{source.name} has no acceptance in a known format of two scrapes of counters")
        reason = next((reason for mark, reason in _OTHERS if mark.search(source.text)), "")
        reason = reason or "it has the speeds of a server that does not draft" * bool(source.timed)
        raise UsageError(
            f"{source.name} has no acceptance in a known format of a log, metrics or responses (see crossdraft list "
            f"formats){reason and '; ' + reason}"
        )
    return acceptances


def _read(entry: str, source: Source, earlier: Source | None) -> list[Acceptance]:
    """Every acceptance in one format, with the draft length of ``source``. Raises ContractError for its defects."""
    cls = plugins.get("formats", entry)
    if not hasattr(cls, "read"):  # a format of responses
        return []
    reader = cls()
    if earlier is not None and not reader.subtracts:
        return []
    with plugins.guarded("formats", entry, "read()"):
        items = list(reader.read(source, earlier))
    if not all(isinstance(item, Acceptance) for item in items):
        raise plugins.unusable("formats", entry, "read() must return a list of crossdraft_advisor.Acceptance")
    acceptances = []
    for item in items:
        length = item.gamma or item.draft_length
        known: dict[str, Any] = {"format": f"{reader.name}: {reader.meaning()}"}
        if source.gamma not in (None, length) and not item.parts:
            if length is not None:
                raise DraftLengthError(
                    f"{item.source} has drafts of {counted(length, 'token')}, not {source.gamma}; remove the given "
                    "draft length"
                )
            known["draft_length"] = source.gamma
        acceptances.append(replace(item, **known))
    return acceptances
