"""Settings and counters of a running server, compared with those of a cell.

Counters are those of the `CounterDefinition` with a prefix (vLLM, llama.cpp). A server without them, or with those of
an unknown engine, reveals nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crossdraft.framework.errors import CrossdraftError, quoted
from crossdraft.framework.runs.labels import counted
from crossdraft.framework.util.input_files import parse_json

from .builtin.sglang import Sglang
from .counter_definitions import DEFINITIONS
from .engine_log import Source
from .http_response import NetworkError, fetch
from .prometheus import ACCEPTED, DRAFTED, DRAFTS, POSITIONS, REQUESTS, TOKENS, Sample, summed, totals_by_model

#: Counters that are compared.
_NAMES = (DRAFTS, DRAFTED, ACCEPTED, TOKENS, REQUESTS)
#: Seconds for an account of a server's settings.
_SECONDS = 5.0
#: The pair of ``crossdraft serve``.
_PAIR = re.compile(r"drafter (\S+), verifier (\S+),")
#: SGLang's own name of the method NEXTN.
_ALIASES = {"NEXTN": "EAGLE"}
#: Engine whose counters exist only with speculation, one for each position of a draft.
_EXACT = "vllm"


@dataclass(frozen=True)
class ServerCounters:
    """One scrape.

    Attributes:
        engine: whose counters they are; empty if the scrape has none.
        totals: by name (`DRAFTS`, ...), summed over models and engines.
        positions: number of positions in a draft that are counted.
    """

    engine: str = ""
    totals: Mapping[str, Sample] | None = None
    positions: int = 0

    @classmethod
    def parse(cls, text: str, name: str) -> ServerCounters:
        """Parse a scrape. Raises UsageError if one of the counters is not valid."""
        for definition in DEFINITIONS.values():
            if not definition.prefix:
                continue
            models = totals_by_model(definition, Source(text, name))
            totals = {c: s for c in _NAMES if (s := summed(models, c)) is not None}
            if totals:
                positions = {p for of_model in models.values() for p in of_model.get(POSITIONS, {})}
                return cls(definition.engine, totals, len(positions))
        return cls()

    def since(self, earlier: ServerCounters) -> dict[str, Sample]:
        """The growth of every counter; negative if the server was started again in between."""
        before, zero = earlier.totals or {}, Sample(0.0, 0)
        return {
            name: Sample(s.value - (old := before.get(name, zero)).value, s.line, s.rounding + old.rounding)
            for name, s in (self.totals or {}).items()
        }

    def contradiction(self, gamma: int) -> str | None:
        """The reason why the server does not draft ``gamma`` tokens (0 = it does not speculate); None if it may."""
        totals = self.totals or {}
        drafts = totals[DRAFTS].value if DRAFTS in totals else 0
        if not gamma:
            if drafts or self.positions or (self.engine == _EXACT and DRAFTS in totals):
                return f"it has counters of drafts ({drafts:.0f} until now), so it speculates"
            return None
        if self.engine == _EXACT and DRAFTS not in totals:
            return "it has no counters of drafts, so it does not speculate"
        if self.positions > gamma or (self.engine == _EXACT and self.positions and self.positions != gamma):
            return f"it drafts {counted(self.positions, 'token')}, and the recipe {gamma}"
        return None


def other_traffic(counted: Mapping[str, Sample], own: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Numbers of the server's counters and of our responses, by name, that are not equal within rounding."""
    return {
        name: (counted[name].value, value)
        for name, value in own.items()
        if name in counted and abs(counted[name].value - value) > counted[name].rounding + 1e-6
    }


def contradiction(url: str, metrics: str, drafter: str, gamma: int) -> str | None:
    """The reason why a running server has other settings than a cell, by its own account; None if it may have them.

    Read are its counters, SGLang's ``/get_server_info`` and the pair of ``crossdraft serve``. A server that does not
    answer reveals nothing.

    Args:
        metrics: path of the counters.
        drafter: of the cell.
        gamma: its maximum number of drafted tokens; 0 without speculation.

    Raises:
        UsageError: a counter is not valid.
    """
    url = url.rstrip("/")
    try:
        status, text = fetch(url + metrics, _SECONDS)
    except NetworkError:
        return None
    if status == 200 and (reason := ServerCounters.parse(text, url + metrics).contradiction(gamma)):
        return reason
    return _sglang(_json(f"{url}/get_server_info"), drafter, gamma) or _crossdraft(
        _json(f"{url}/v1/models"), drafter, gamma
    )


def _json(url: str) -> dict[str, Any]:
    """The JSON object at an address; empty for anything else."""
    try:
        status, text = fetch(url, _SECONDS)
        value = parse_json(text, url) if status == 200 else None
    except CrossdraftError:
        return {}
    return value if isinstance(value, dict) else {}


def _sglang(settings: Mapping[str, Any], drafter: str, gamma: int) -> str | None:
    if "speculative_algorithm" not in settings:
        return None
    algorithm, steps = str(settings["speculative_algorithm"] or ""), settings.get("speculative_num_steps")
    expected = Sglang.methods.get(drafter, algorithm) if gamma else ""
    names = {_ALIASES.get(name, name) for name in (algorithm, expected)}
    if bool(algorithm) != bool(gamma) or len(names) > 1:
        return f"its speculative_algorithm is {quoted(algorithm)}"
    if gamma and algorithm != "NGRAM" and isinstance(steps, int) and steps != gamma:
        return f"its speculative_num_steps is {steps}, and the recipe drafts {counted(gamma, 'token')}"
    return None


def _crossdraft(models: Mapping[str, Any], drafter: str, gamma: int) -> str | None:
    entries = models.get("data")
    entry = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}
    pair = _PAIR.search(str(entry.get("pair", "")))
    if pair and pair[1] != (drafter if gamma else "none"):
        return f"its drafter is {quoted(pair[1])}"
    return None
