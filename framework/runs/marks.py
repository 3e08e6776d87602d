"""Certification marks: lossless, certified; not exercised; not certified; FAILED; or lossy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .. import plugins
from . import certified_registry

if TYPE_CHECKING:
    from .records import CellResult

Kind = Literal["certified", "unexercised", "uncertified", "failed", "lossy"]
#: Texts of kinds without a value.
_TEXTS = {
    "certified": "lossless, certified",
    "unexercised": "not exercised",
    "uncertified": "not certified",
    "lossy": "lossy",
}


@dataclass(frozen=True)
class Mark:
    """Certification status of a verifier, or of a pair.

    Attributes:
        tv: for kind "failed", the maximum total variation from the target's distribution.
        place: toy model and drafts with the maximum total variation; for kind "unexercised", those that were not
            exercised, and the reason.
    """

    kind: Kind
    tv: float | None = None
    place: str = ""

    def __str__(self) -> str:
        if self.kind == "failed":
            return f"FAILED (TV {self.tv:.2g})"
        return _TEXTS[self.kind]

    @property
    def suffix(self) -> str:
        """Suffix of the verifier's name in a table; empty if it is certified."""
        if self.kind == "certified":
            return ""
        return f" (FAILED, TV {self.tv:.2g})" if self.kind == "failed" else f" ({self})"

    @property
    def headline(self) -> bool:
        """True if pairs with this verifier may be reported as the best."""
        return self.kind == "certified"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "tv": self.tv, "where": self.place}

    @classmethod
    def from_json(cls, data: Any) -> Mark | None:
        """Parse the mark of a record; None if it is missing or invalid."""
        if not isinstance(data, Mapping):
            return None
        kind, tv, place = data.get("kind"), data.get("tv"), data.get("where")
        place = place if isinstance(place, str) else ""
        if isinstance(kind, str) and kind in _TEXTS:
            return cls(kind, place=place)  # type: ignore[arg-type]
        if kind == "failed" and isinstance(tv, float) and math.isfinite(tv):
            return cls(kind, tv, place)
        return None


def mark_of(cell: CellResult) -> Mark:
    """Mark of a cell's pair when it was measured, unless the same code was certified later; now if nothing is recorded.

    It is the verifier's, unless the certificate of a drafter of others failed, was not exercised or is missing.
    """
    mark = mark_by_verifier(cell)
    if mark.kind not in ("certified", "uncertified"):
        return mark
    config, recorded = cell.config, cell.provenance
    if config.engine is not None or config.is_baseline:
        return mark
    drafter = plugins.get("drafters", config.drafter.name)
    options = drafter.Config(**config.drafter.config)
    source, version = recorded.get("drafter"), str(recorded.get("crossdraft") or "")
    source = source if isinstance(source, Mapping) and source.get("sha256") else None
    own = mark_of_strategy(drafter, options, source, version if source else "")
    if own is None and not plugins.of_repository(drafter):
        own = Mark.from_json(recorded.get("mark")) or Mark("uncertified")
    return mark if own is None or own.kind == "certified" else own


def mark_by_verifier(cell: CellResult) -> Mark:
    """Mark of a cell's pair if its drafter is certified."""
    config, recorded = cell.config, cell.provenance
    if config.engine is not None:  # the engine verifies; see crossdraft verify-engine
        return Mark("uncertified")
    verifier = plugins.get("verifiers", config.verifier.name)
    options = verifier.Config(**config.verifier.config)
    recorded_mark, source = Mark.from_json(recorded.get("mark")), recorded.get("verifier")
    if recorded_mark is not None and recorded_mark.kind == "lossy":
        return recorded_mark
    if not isinstance(source, Mapping) or not source.get("sha256"):
        return recorded_mark or mark_of_verifier(verifier, options)
    if recorded_mark is None and not plugins.traits_of("verifiers", verifier, options).lossless:
        return Mark("lossy")
    current_mark = mark_of_strategy(verifier, options, source, str(recorded.get("crossdraft") or ""))
    if builtin := source.get("distribution") == "crossdraft":  # it was the drafter that was not certified
        recorded_mark = None if recorded_mark == Mark("uncertified") else recorded_mark
    return current_mark or recorded_mark or Mark("certified" if builtin else "uncertified")


def mark_of_verifier(verifier: type[Any], options: Any) -> Mark:
    """Mark of an installed verifier class with a validated config.

    Built-in verifiers count as certified, because the tests of crossdraft certify them, unless the registry contains a
    failure of the installed code.
    """
    if not plugins.traits_of("verifiers", verifier, options).lossless:
        return Mark("lossy")
    is_builtin = verifier.__module__.partition(".")[0] == "crossdraft"
    return mark_of_strategy(verifier, options) or Mark("certified" if is_builtin else "uncertified")


def mark_of_strategy(
    strategy: type[Any], options: Any, source: Mapping[str, Any] | None = None, crossdraft: str = ""
) -> Mark | None:
    """Mark of a drafter or verifier by its certificate, of the installed code by default; None without one."""
    record = certified_registry.certificate(strategy, options, source, crossdraft)
    if record is None:
        return None
    if not record.lossless:
        return Mark("failed", record.tv, record.place)
    return Mark("certified") if record.exercised else Mark("unexercised", place=record.place)
