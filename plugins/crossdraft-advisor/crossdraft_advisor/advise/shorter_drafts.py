"""The acceptance of shorter drafts, if it follows from that of longer ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from crossdraft import DraftTraits, UsageError, VerifierTraits
from crossdraft.framework.cost.prediction import CellStatistics
from crossdraft.runs import CellConfig

from ..shorter_drafts import shorter_drafts


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


def cut(cell: CellStatistics, gamma: int) -> CellStatistics:
    """The same pair with chains of at most ``gamma`` tokens, by the model of `shorter_drafts`.

    Raises:
        UsageError: ``gamma`` exceeds the measured length, or the drafts are trees.
    """
    if max(cell.widths) > len(cell.acceptance):
        raise UsageError(
            f"drafts of {max(cell.widths)} nodes and depth {len(cell.acceptance)} are trees; "
            "only chains can be truncated to another gamma"
        )
    if gamma > len(cell.acceptance):
        raise UsageError(
            f"acceptance was measured for drafts of up to {len(cell.acceptance)} tokens, not {gamma}; "
            f"run a cell with gamma {gamma}"
        )
    if gamma == len(cell.acceptance):
        return cell
    acceptance = tuple(shorter_drafts(np.array(cell.acceptance), gamma).tolist())
    tokens_per_step = cell.tokens_per_step + sum(acceptance) - sum(cell.acceptance)
    widths: dict[float, float] = {}
    for nodes, share in cell.widths.items():
        widths[min(nodes, gamma)] = widths.get(min(nodes, gamma), 0.0) + share
    longest = max(cell.widths)
    ratio = gamma / longest if longest > gamma else 1.0
    return replace(
        cell,
        tokens_per_step=tokens_per_step,
        widths=widths,
        passes=cell.passes * ratio,
        draft_seconds=cell.draft_seconds * ratio,
        acceptance=acceptance,
        idle=cell.idle * tokens_per_step / cell.tokens_per_step,
    )
