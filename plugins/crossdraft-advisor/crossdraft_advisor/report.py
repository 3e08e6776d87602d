"""Printing of commands: their result as text, JSON or CSV, and progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from crossdraft import Estimate, Sampling, Table


@dataclass(frozen=True)
class Report:
    """A result, each form of which is computed when it is printed."""

    text: Callable[[], str]
    data: Callable[[], Any]  # of JSON
    records: Callable[[], Iterable[Mapping[str, Any]]] = tuple  # rows of CSV

    def emit(self, options: Any) -> None:
        """Print the result in the form that the options of a command choose."""
        if options.json_:
            print(json.dumps(self.data(), indent=2, default=_plain))
        elif getattr(options, "csv", False):
            print(Table.of(self.records()).csv())
        else:
            print(self.text())


def _plain(value: Any) -> Any:
    """An array or a dataclass as JSON has it."""
    return value.tolist() if hasattr(value, "tolist") else asdict(value)


def log(message: str) -> None:
    """Print a progress message on standard error."""
    print(f"crossdraft: {message}", file=sys.stderr, flush=True)


def sampling_text(sampling: Sampling) -> str:
    """The temperature, and the other sampling parameters that are set."""
    params = sampling.model_dump(exclude_defaults=True) | {"temperature": sampling.temperature}
    return ", ".join(f"{key} {value:g}" for key, value in sorted(params.items(), reverse=True))


def right(*names: str) -> list[tuple[str, str]]:
    """Columns of a table with numbers that are written as texts."""
    return [(name, "right") for name in names]


def percent_text(share: float, sign: str = "") -> str:
    """Share in percent, with one decimal."""
    return f"{100 * share:{sign}.1f} %"


def without_empty(table: Table, *names: str) -> Table:
    """The table without those of the named columns that have no value in any row."""
    filled = {name for name, *values in zip(table.names, *table.rows, strict=True) if any(values)}
    return table.without(*(name for name in names if name not in filled))


def change_text(change: Estimate) -> str:
    """A relative change in per cent, with its interval."""
    interval = ""
    if change.low is not None and change.high is not None:
        interval = f" [{percent_text(change.low, '+')}, {percent_text(change.high, '+')}]"
    return f"{percent_text(change.value, '+')}{interval}"
