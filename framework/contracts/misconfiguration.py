"""Usual mistakes that make a drafter agree less with its target than it could; `crossdraft doctor` tries them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .models import Checkpoint


@dataclass(frozen=True)
class Misconfiguration:
    """A mistake that may have been made, and how the drafter would be without it.

    Attributes:
        mistake: what is wrong if it drafts better so, a clause for people.
        cure: what to do then.
        options: keys of the drafter's config that are other.
        change: makes the right heads of those that it loads; None = they stay as they are.
    """

    mistake: str
    cure: str
    options: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Checkpoint], Checkpoint] | None = None
