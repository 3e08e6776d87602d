"""Common mistakes in a drafter's setup that lower its acceptance; tested by `crossdraft diagnose`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .models import Checkpoint


@dataclass(frozen=True)
class Misconfiguration:
    """A possible mistake, and the corrected setup to compare with.

    Attributes:
        mistake: description, shown if the corrected setup drafts better.
        cure: advice for that case.
        options: keys of the drafter's config to replace.
        change: corrects the loaded heads; None = unchanged.
    """

    mistake: str
    cure: str
    options: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Checkpoint], Checkpoint] | None = None
