"""Registry of certification results, passed and failed, in the cache directory.

The key is the strategy's name, distribution, version, options and code digest, and the version of crossdraft. After any
of them changes, the strategy must be certified again. Results of older code are kept for the runs measured with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..util.input_files import read_json
from ..util.limits import Limit
from ..util.output_files import cache_dir, replace_text
from ..util.releases import release
from .code_digest import source_of

#: In the cache directory.
FILE = "certified.json"
#: Maximum size of the file.
_MAX_BYTES = Limit(2**20, "it is read whole")
#: Maximum number of entries; the newest are kept. They fit into `_MAX_BYTES`.
_MAX_ENTRIES = 1000
_VALUES = ("tv", "lossless", "where", "exercised")
_KEYS = ("name", "distribution", "version", "sha256", "crossdraft", "options")


@dataclass(frozen=True)
class CertificateRecord:
    """Result of certifying a strategy.

    Attributes:
        tv: maximum total variation from the target's distribution.
        lossless: False if the strategy claims to be lossless but is not.
        place: toy model and drafts with the maximum total variation, or those that were not exercised.
        exercised: the enumeration went through the events that expose a mistake, see `Coverage`.
    """

    tv: float
    lossless: bool = True
    place: str = ""
    exercised: bool = True


def certificate(
    strategy: type[Any], options: Any, source: Mapping[str, Any] | None = None, crossdraft: str = ""
) -> CertificateRecord | None:
    """Look up the result of a verifier or drafter; None if it was not certified with this code.

    Args:
        strategy: class of the verifier or drafter.
        options: validated config.
        source: code, see `code_digest.source_of`; by default the installed one.
        crossdraft: version of crossdraft; by default the installed one.
    """
    key = _key(strategy, options, source, crossdraft)
    if not key["sha256"]:
        return None
    matches = [entry for entry in _read() if all(entry[name] == key[name] for name in _KEYS)]
    return CertificateRecord(*(matches[-1][name] for name in _VALUES)) if matches else None


def remember(outcomes: Iterable[tuple[type[Any], Any, CertificateRecord]]) -> None:
    """Store results of strategies with options. Raises OSError if the file cannot be written.

    Strategies whose code is not in a file are skipped, because changes could not be detected.
    """
    new = [
        {**_key(strategy, options), **dict(zip(_VALUES, astuple(record), strict=True))}
        for strategy, options, record in outcomes
    ]
    if new := [entry for entry in new if entry["sha256"]]:
        keys = [[entry[key] for key in _KEYS] for entry in new]
        entries = [entry for entry in _read() if [entry[key] for key in _KEYS] not in keys]
        replace_text(cache_dir() / FILE, json.dumps({"certificates": (entries + new)[-_MAX_ENTRIES:]}, indent=1))


def _key(
    strategy: type[Any], options: Any, source: Mapping[str, Any] | None = None, crossdraft: str = ""
) -> dict[str, Any]:
    source = source_of(strategy, *strategy.wrapped(options)) if source is None else source
    options_json = json.dumps(options.model_dump(mode="json"), sort_keys=True, default=str)
    code = {key: str(source.get(key) or "") for key in ("distribution", "version", "sha256")}
    return {"name": strategy.name, **code, "crossdraft": crossdraft or release("crossdraft"), "options": options_json}


def _read() -> tuple[dict[str, Any], ...]:
    """All entries; none if the file is missing, damaged or of another program."""
    path = cache_dir() / FILE
    try:
        status = path.stat()
    except OSError:
        return ()
    return _parsed(path, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=2)
def _parsed(path: Path, *_: int) -> tuple[dict[str, Any], ...]:
    try:
        content = read_json(path, _MAX_BYTES)
    except UsageError:
        return ()
    entries = content.get("certificates") if isinstance(content, dict) else None
    return tuple(entry for entry in (entries if isinstance(entries, list) else []) if _is_valid(entry))


def _is_valid(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {*_KEYS, *_VALUES}
        and all(isinstance(entry[key], str) for key in (*_KEYS, "where"))
        and all(isinstance(entry[key], bool) for key in ("lossless", "exercised"))
        and isinstance(entry["tv"], float)
        and math.isfinite(entry["tv"])
    )
