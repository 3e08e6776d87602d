"""The mark of a verifier wherever its name stands: lossless and certified, not certified, FAILED, or lossy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .. import plugins
from ..recipe.recipe import CellConfig
from . import certified_registry

if TYPE_CHECKING:
    from .records import CellResult

Kind = Literal["certified", "uncertified", "failed", "lossy"]


@dataclass(frozen=True)
class Mark:
    """Certification status of a verifier.

    Attributes:
        tv: of a certificate that failed, the largest total variation from the target's distribution.
        where: the toy and the drafts with that total variation.
    """

    kind: Kind
    tv: float | None = None
    where: str = ""

    def __str__(self) -> str:
        if self.kind == "failed":
            return f"FAILED (TV {self.tv:.2g})"
        return {"certified": "lossless, certified", "uncertified": "not certified", "lossy": "lossy"}[self.kind]

    @property
    def suffix(self) -> str:
        """Text behind the verifier's name in a table; empty if it is certified."""
        if self.kind == "certified":
            return ""
        return f" (FAILED, TV {self.tv:.2g})" if self.kind == "failed" else f" ({self})"

    @property
    def headline(self) -> bool:
        """True if the verifier's pairs may be called the best: only certified ones may."""
        return self.kind == "certified"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "tv": self.tv, "where": self.where}

    @classmethod
    def from_json(cls, found: Any) -> Mark | None:
        """The mark that a record holds; None if it holds none."""
        if not isinstance(found, Mapping):
            return None
        kind, tv, where = found.get("kind"), found.get("tv"), found.get("where")
        where = where if isinstance(where, str) else ""
        if kind in ("certified", "uncertified", "lossy"):
            return cls(kind)
        if kind == "failed" and isinstance(tv, float) and math.isfinite(tv):
            return cls(kind, tv, where)
        return None


def mark_of(cell: CellConfig | CellResult) -> Mark:
    """The mark of a cell's verifier: of a result as it was measured, unless a later certificate knows better."""
    config = cell if isinstance(cell, CellConfig) else cell.config
    recorded = {} if isinstance(cell, CellConfig) else cell.provenance
    rule = plugins.get("verifiers", config.verifier.name)
    options = rule.Config(**config.verifier.config)
    then, source = Mark.from_json(recorded.get("mark")), recorded.get("verifier")
    if then is not None and then.kind == "lossy":
        return then
    if not isinstance(source, Mapping) or not source.get("sha256"):
        return then or mark_of_rule(rule, options)
    if then is None and not plugins.traits_of("verifiers", rule, options).lossless:
        return Mark("lossy")
    now = _of(certified_registry.certificate(rule, options, source, str(recorded.get("crossdraft") or "")))
    return now or then or Mark("certified" if source.get("distribution") == "crossdraft" else "uncertified")


def mark_of_rule(rule: type[Any], options: Any) -> Mark:
    """The mark of a verifier's class with a validated config, as it is installed.

    crossdraft's own rules count as certified, because its tests certify them, unless a certificate of the code that is
    installed failed.
    """
    if not plugins.traits_of("verifiers", rule, options).lossless:
        return Mark("lossy")
    own = rule.__module__.partition(".")[0] == "crossdraft"
    return _of(certified_registry.certificate(rule, options)) or Mark("certified" if own else "uncertified")


def _of(found: certified_registry.Certificate | None) -> Mark | None:
    if found is None:
        return None
    return Mark("certified") if found.lossless else Mark("failed", found.tv, found.where)
