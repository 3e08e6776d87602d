"""The acceptance of shorter drafts, if it follows from that of longer ones."""

from __future__ import annotations

from crossdraft import DraftTraits, VerifierTraits
from crossdraft.runs import CellConfig


def shorter_refusal(config: CellConfig) -> str:
    """The reason why the acceptance of shorter drafts does not follow from a finished cell, or an empty string."""
    traits = config.drafter_traits, config.verifier_traits
    return not_shortenable(config.drafter.name, traits[0], config.verifier.name, traits[1])


def not_shortenable(drafter: str, draft: DraftTraits, verifier: str, traits: VerifierTraits) -> str:
    """Return the reason why the acceptance of shorter drafts does not follow from longer ones, as a message, or ""."""
    if not draft.shortenable:
        reason = f"whether a token of '{drafter}' is accepted may depend on the length of its draft"
    elif not traits.shortenable:
        reason = f"what verifier '{verifier}' accepts may depend on the rest of the draft or on earlier steps"
    else:
        return ""
    return f"{reason}; measure each length: a log or a scrape with each, or crossdraft run with gamma: [1, 2, ...]"
