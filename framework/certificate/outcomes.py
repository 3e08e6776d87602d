"""Certificates to keep, from rows of enumerated pairs; and the quick ones that a run starts with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..runs.certified_registry import CertificateRecord
from .drafts import DRAFTS, NamedDrafter, refusal
from .rows import CannotRun, Row, certify_row
from .toys import built_in_toys

if TYPE_CHECKING:
    from ..contracts.verifier import Verifier

#: Toys of a quick certificate: the smallest one, one with more tokens, and one with deep drafts. At most 2.5 s a rule.
QUICK = ("T0", "G3", "D6")


def worst_row(rows: Sequence[Row]) -> Row | None:
    """The row that is farthest from the target's distribution although its verifier claims to be lossless."""
    wrong = [row for row in rows if row.error is None and row.promise.lossless and not row.lossless]
    return max(wrong, key=lambda row: row.tv or 0.0, default=None)


def outcome(rows: Sequence[Row]) -> CertificateRecord | None:
    """The certificate that the rows of a verifier amount to.

    None if they show nothing: its claim is to be lossy, a row could not be enumerated, or nothing was drafted.
    """
    if (worst := worst_row(rows)) is not None:
        return CertificateRecord(worst.tv or 0.0, False, place(worst))
    if rows and all(row.proves for row in rows) and any(row.drafted for row in rows):
        return CertificateRecord(max(row.tv or 0.0 for row in rows))
    return None


def place(row: Row) -> str:
    return f"on toy '{row.toy}' with draft '{row.draft}'"


def certify_quickly(verifier: type[Verifier], options: Any, start: Callable[[], None]) -> list[Row]:
    """The rows of a verifier with these options on the toys `QUICK`, up to the first one that raised.

    ``start`` is called before each.
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
    return rows


def certify_drafter(drafter: type[Any], config: Any, verifier: type[Verifier], options: Any) -> Row | None:
    """A row of a drafter as it is configured, on the smallest toy; None if it cannot be enumerated there."""
    kind, toy = NamedDrafter(drafter.name, drafter, config), built_in_toys()[0]
    if refusal(kind, toy):
        return None
    try:
        row = certify_row(toy, kind.label, kind, verifier, options=options)
    except CannotRun:
        return None
    return row if row.error is None and row.drafted else None
