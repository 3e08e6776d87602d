"""Lines of a log that a collector wrapped in JSON or CSV: Docker, journald, CRI, Loki, Grafana, cloud services."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import Any

#: Keys of the text of a line: Docker; journald; structured loggers; Loki and Grafana; Google; AWS; OpenTelemetry.
_KEYS = ("log", "MESSAGE", "message", "msg", "line", "Line", "textPayload", "@message", "body")
_MARKS = tuple(f'"{key}"' for key in (*_KEYS, "values"))


def unwrapped(line: str) -> list[str]:
    """The texts in a line of JSON or CSV; empty if it is neither, or has none."""
    if line.startswith(("{", "[")):
        return list(texts_in(line))
    if line.endswith('"') and (line.startswith('"') or (line[:1].isdigit() and ',"' in line)):
        try:
            return [max(next(csv.reader([line], strict=True)), key=len)]
        except (csv.Error, StopIteration):
            return []
    return []


def texts_in(text: str) -> Iterator[str]:
    """The lines of a log in a JSON value, in their order; none if it has no such keys or is damaged."""
    if not any(mark in text for mark in _MARKS):
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    for item in _texts(value):
        yield from item.splitlines()


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    if depth > 16:
        return
    if isinstance(value, dict):
        text = next((value[key] for key in _KEYS if isinstance(value.get(key), str)), None)
        if text is None and isinstance(data := value.get("MESSAGE"), list):  # of journald, with control characters
            text = bytes(n for n in data if type(n) is int and 0 <= n < 256).decode("utf-8", "replace")
        if text is not None:
            yield text
            return
        value = list(value.values())
    if isinstance(value, list):
        if len(value) == 2 and all(isinstance(item, str) for item in value) and value[0].isdigit():
            yield value[1]  # of Loki: nanoseconds and a line
            return
        for item in value:
            if isinstance(item, dict | list):
                yield from _texts(item, depth + 1)
