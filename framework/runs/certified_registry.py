"""Certificates by the code that they are about, kept in the cache directory: those that hold and those that failed.

A strategy is known by its name, the distribution that provides it, its options and a digest of its code: one that was
changed since has to be certified again, and so has every one when crossdraft changes. Certificates of older code stay,
for the runs that were measured with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..util.input_files import read_json
from ..util.limits import Limit
from ..util.output_files import cache_dir, replace_text
from .code_digest import source_of

#: In the cache directory.
FILE = "certified.json"
#: Larger files are not ours.
_LARGEST = Limit(2**20, "it is read whole")
#: The newest certificates are kept, as many as fit a file of that size.
_MOST = 1000
_KEYS = ("name", "distribution", "version", "sha256", "crossdraft", "options")


@dataclass(frozen=True)
class Certificate:
    """Outcome of an enumeration.

    Attributes:
        tv: the largest total variation that was found.
        lossless: False if the strategy claims to be lossless and is not.
        where: the toy and the drafts with that total variation.
    """

    tv: float
    lossless: bool = True
    where: str = ""


def certificate(
    strategy: type[Any], options: Any, source: Mapping[str, Any] | None = None, crossdraft: str = ""
) -> Certificate | None:
    """The certificate of a verifier or a drafter; None if it was never certified with this code.

    Args:
        strategy: its class.
        options: its validated config.
        source: the code (`sources.source_of`) that is meant if it is not what is installed now.
        crossdraft: likewise the version of crossdraft.
    """
    wanted = _key(strategy, options, source, crossdraft)
    if not wanted["sha256"]:
        return None
    found = [entry for entry in _read() if all(entry[key] == wanted[key] for key in _KEYS)]
    return Certificate(found[-1]["tv"], found[-1]["lossless"], found[-1]["where"]) if found else None


def remember(outcomes: Iterable[tuple[type[Any], Any, Certificate]]) -> None:
    """Keep certificates of strategies with options. Raises OSError if nothing can be written.

    Code without a file is left out: nothing shows whether it changed.
    """
    new = [
        {**_key(strategy, options), "tv": found.tv, "lossless": found.lossless, "where": found.where}
        for strategy, options, found in outcomes
    ]
    if new := [entry for entry in new if entry["sha256"]]:
        keys = [[entry[key] for key in _KEYS] for entry in new]
        kept = [entry for entry in _read() if [entry[key] for key in _KEYS] not in keys]
        replace_text(cache_dir() / FILE, json.dumps({"certificates": (kept + new)[-_MOST:]}, indent=1))


def _key(
    strategy: type[Any], options: Any, source: Mapping[str, Any] | None = None, crossdraft: str = ""
) -> dict[str, Any]:
    source = source_of(strategy, *strategy.wrapped(options)) if source is None else source
    told = json.dumps(options.model_dump(mode="json"), sort_keys=True, default=str)
    code = {key: str(source.get(key) or "") for key in ("distribution", "version", "sha256")}
    return {"name": strategy.name, **code, "crossdraft": crossdraft or version("crossdraft"), "options": told}


def _read() -> tuple[dict[str, Any], ...]:
    """All entries; none if the file is missing, damaged or not ours."""
    path = cache_dir() / FILE
    try:
        status = path.stat()
    except OSError:
        return ()
    return _parsed(path, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=2)
def _parsed(path: Path, *_: int) -> tuple[dict[str, Any], ...]:
    try:
        found = read_json(path, _LARGEST)
    except UsageError:
        return ()
    entries = found.get("certificates") if isinstance(found, dict) else None
    return tuple(entry for entry in (entries if isinstance(entries, list) else []) if _is_whole(entry))


def _is_whole(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {*_KEYS, "tv", "lossless", "where"}
        and all(isinstance(entry[key], str) for key in (*_KEYS, "where"))
        and isinstance(entry["lossless"], bool)
        and isinstance(entry["tv"], float)
        and math.isfinite(entry["tv"])
    )
