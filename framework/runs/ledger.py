"""Which verifiers were certified lossless on this machine, so that tables can mark those that never were.

A verifier is known by its name, the distribution that provides it, and a digest of its code: a rule that was changed
since has to be certified again, and so has every rule when crossdraft changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..contracts.errors import UsageError
from ..contracts.files import replace_text
from ..contracts.limits import Limit
from ..contracts.reading import read_json
from .sources import source_of

#: In the cache directory.
FILE = "certified.json"
#: Larger files are none of ours.
_LARGEST = Limit(2**20, "it is read whole")


def certified(rule: type[Any], directory: Path) -> bool:
    """Whether ``crossdraft certify`` found this very code lossless, over all that it enumerates by default.

    crossdraft's own rules count as certified: its tests certify them, on more. A rule without a file never is.

    Args:
        rule: a verifier's class.
        directory: the cache directory, `models.device.cache_dir`.
    """
    if _ours(rule):
        return True
    entry = _entry(rule)
    return bool(entry["sha256"]) and entry in _read(directory / FILE)


def remember(rules: Iterable[type[Any]], directory: Path) -> None:
    """Note that these were certified; those of crossdraft need no note. Raises OSError where nothing can be written."""
    new = [entry for entry in map(_entry, (rule for rule in rules if not _ours(rule))) if entry["sha256"]]
    if not new:
        return
    same = {(entry["name"], entry["distribution"]) for entry in new}
    kept = [entry for entry in _read(directory / FILE) if (entry["name"], entry["distribution"]) not in same]
    replace_text(directory / FILE, json.dumps({"certified": kept + new}, indent=1))


def _ours(rule: type[Any]) -> bool:
    return rule.__module__.partition(".")[0] == "crossdraft"


def _entry(rule: type[Any]) -> dict[str, str]:
    return {"name": rule.name, **source_of(rule), "crossdraft": version("crossdraft")}


def _read(path: Path) -> list[dict[str, str]]:
    """What was noted; nothing where the file is missing, damaged or not ours."""
    try:
        entries = read_json(path, _LARGEST).get("certified")
    except UsageError:
        return []
    keys = {"name", "distribution", "version", "sha256", "crossdraft"}
    return [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and entry.keys() == keys and all(isinstance(v, str) for v in entry.values())
    ]
