"""The interface of serving engines for `crossdraft advise`: the settings with which they draft.

Engines are registered through the hook ``crossdraft_register_engines``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from crossdraft.framework.util.estimate import Estimate

from .acceptance import Acceptance
from .counter_definitions import CounterDefinition


@dataclass(frozen=True)
class Range:
    """Draft length ``gamma`` for batch sizes ``low`` to ``high``, inclusive; 0 = no drafting."""

    low: int
    high: int
    gamma: int


@dataclass(frozen=True)
class Schedule:
    """One drafter and verifier for a server, with a draft length per batch size.

    Attributes:
        acceptance: of the pair, at the longest draft of the schedule.
        ranges: contiguous from batch size 1; the last also applies to greater batch sizes. One range if the engine has
            one draft length for all batch sizes.
        speed_ups: predicted speed-up by requested batch size, with the gamma of its range.
        lengths: acceptance of the pair at every known draft length, shortest first; empty if not computed.
    """

    acceptance: Acceptance
    ranges: tuple[Range, ...]
    speed_ups: Mapping[int, Estimate]
    lengths: tuple[Acceptance, ...] = ()

    @property
    def gamma(self) -> int:
        """The longest draft length; 0 if nothing is drafted."""
        return max(batch_range.gamma for batch_range in self.ranges)

    @property
    def greedy(self) -> bool:
        """True if the target decodes greedily."""
        return self.acceptance.temperature == 0

    @property
    def sampled(self) -> bool:
        """True if the acceptance assumes drafts sampled from the draft model."""
        return self.acceptance.point_mass is False and not self.greedy


@dataclass(frozen=True)
class Settings:
    """Settings of an engine.

    Attributes:
        text: flags, JSON, YAML or Python, ready to use.
        remarks: differences between the engine's behaviour and the schedule.
    """

    text: str
    remarks: tuple[str, ...] = ()


class Engine(ABC):
    """A serving engine, or a file format of acceptance that is written.

    Attributes:
        name: as registered.
        read_from: the version of the engine that the option names are from.
        methods: the engine's name of each supported drafter.
        verifiers: those that it has. At temperature 0, and on point masses, `block` accepts what `token` accepts.
        most_sequences: maximum number of sequences that it drafts for at a time; None = not limited.
        counters: the definition of its counters, and the options with which crossdraft drafts as it does.
    """

    name: ClassVar[str]
    read_from: ClassVar[str]
    methods: ClassVar[Mapping[str, str]] = {}
    verifiers: ClassVar[tuple[str, ...]] = ("token", "greedy", "sample-match")
    most_sequences: ClassVar[int | None] = None
    counters: ClassVar[CounterDefinition | None] = None

    @classmethod
    def ours(cls, method: Any) -> str:
        """The drafter whose name in the engine is ``method``, or an empty string."""
        return next((name for name, theirs in cls.methods.items() if theirs == method), "")

    def counters_of(self, drafter: str) -> CounterDefinition | None:
        """Definition of the counters if ``drafter`` drafts; by default the same for all."""
        return self.counters

    def cannot(self, acceptance: Acceptance) -> str | None:
        """The reason why the engine does not support this pair, a clause such as "it has no ..."; None if it does.

        Unknown attributes (``drafter``, ``verifier``, ``point_mass``) are not a reason.
        """
        if acceptance.drafter and acceptance.drafter not in self.methods:
            known = ", ".join(sorted(self.methods)) or "none"
            return f"it has no drafter {acceptance.drafter}; supported drafters: {known}"
        if not acceptance.chain:
            return "it does not support tree drafts"
        alike = () if acceptance.block else ("block",)
        if acceptance.verifier not in ("", *self.verifiers, *alike):
            return f"it has no {acceptance.verifier} verification"
        policy = acceptance.options.get("policy")
        if isinstance(policy, Mapping) and policy.get("name", "static") != "static":
            return f"it does not support the length policy {policy['name']}"
        return None

    def scheduled(self, acceptance: Acceptance) -> bool:
        """True if the engine supports a draft length per batch size, including 0 (no drafting)."""
        return False

    @abstractmethod
    def export(self, schedule: Schedule) -> Settings:
        """Settings for a schedule whose acceptance the engine supports (`cannot` returned None).

        Raises:
            UsageError: a required fact is unknown, such as the drafter or its model.
        """
