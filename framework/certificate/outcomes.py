"""Certificates derived from rows of enumerated pairs, and the quick certification at the start of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..runs.certified_registry import CertificateRecord
from .drafts import DRAFTS, NamedDrafter, refusal
from .rows import CannotRun, Row, certify_row, with_pair_coverage
from .toys import built_in_toys, toys_of_two_vocabularies

if TYPE_CHECKING:
    from ..contracts.verifier import Verifier

#: Toys of a quick certificate: the smallest, one with more tokens, one with deep drafts. At most 2.5 s per verifier.
QUICK = ("T0", "G3", "D6")
#: Toys of a quick certificate of a drafter: the smallest and one with more tokens, or those of two vocabularies.
QUICK_DRAFTER = ("T0", "G4", "W1", "W2")


def worst_row(rows: Sequence[Row]) -> Row | None:
    """Return the failed row with the largest TV, or with a fault, which counts as 1; None without one."""
    return max((row for row in rows if row.failed), key=tv_of, default=None)


def tv_of(row: Row) -> float:
    """The TV of a failed row; 1 for a fault that makes it meaningless."""
    return 1.0 if row.fault is not None else row.tv or 0.0


def outcome(rows: Sequence[Row]) -> CertificateRecord | None:
    """Return the certificate of a strategy from its rows.

    None if they prove nothing: declared lossy, or a row was not enumerated. A strategy with a row that is not exercised
    is not certified, but its certificate is stored.
    """
    if (worst := worst_row(rows)) is not None:
        return CertificateRecord(tv_of(worst), False, worst.fault or location(worst))
    if not rows or any(row.error or not row.traits.lossless for row in rows):
        return None
    tv = max(row.tv or 0.0 for row in rows)
    if place := unexercised(rows):
        return CertificateRecord(tv, True, place, False)
    return CertificateRecord(tv) if all(row.proves for row in rows) else None


def unexercised(rows: Sequence[Row]) -> str:
    """The draft of the first pair that is not exercised, and the reason; empty without one."""
    return next((f"draft '{row.draft}': {row.gap}" for row in rows if row.gap), "")


def location(row: Row) -> str:
    return f"on toy '{row.toy}' with draft '{row.draft}'"


def certify_quickly(verifier: type[Verifier], options: Any, start: Callable[[], None]) -> list[Row]:
    """Certify a verifier with these options on the toys `QUICK`, up to the first row with an error.

    ``start`` is called before each row.
    """
    toys = {toy.name: toy for toy in built_in_toys()}
    rows = []
    for toy in (toys[name] for name in QUICK):
        for label, kind in DRAFTS.items():
            start()
            try:
                rows.append(certify_row(toy, label, kind, verifier, options=options))
            except CannotRun:
                continue
            if rows[-1].error is not None:
                return rows
    return with_pair_coverage(rows)


def certify_drafter(drafter: type[Any], config: Any, verifier: type[Verifier], options: Any) -> list[Row]:
    """Certify a configured drafter on the toys `QUICK_DRAFTER`. Raises CannotRun if it is refused there, or raises."""
    kind, toys = NamedDrafter(drafter.name, drafter, config), built_in_toys()
    if (reason := refusal(kind, toys[0])) and refusal(kind, (toys := toys_of_two_vocabularies())[0]):
        raise CannotRun(reason)
    toys = [toy for toy in toys if toy.name in QUICK_DRAFTER]
    rows = [certify_row(toy, kind.label, kind, verifier, options=options) for toy in toys]
    if error := next((row.error for row in rows if row.error), ""):
        raise CannotRun(error)
    return with_pair_coverage(rows)
