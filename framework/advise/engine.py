"""What a serving engine is to `crossdraft advise`: numbers that are read from it, settings that are written for it.

An engine is one class, registered through the hook ``crossdraft_register_engines``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..metrics.intervals import Estimate
from .acceptance import Acceptance
from .engine_log import Source


@dataclass(frozen=True)
class Range:
    """Batch sizes ``low`` to ``high``, both included, and how long drafts are to be there; 0: do not draft."""

    low: int
    high: int
    gamma: int


@dataclass(frozen=True)
class Schedule:
    """What one server is to do: one drafter and rule, and how long its drafts are at each batch size.

    Attributes:
        acceptance: of the drafter and rule, at the longest draft of the schedule (or longer).
        ranges: from batch size 1 on without gaps; the last is meant for greater ones, too. A single one where the
            engine has one draft length for all batch sizes.
        speed_ups: predicted, by the batch sizes that were asked for, with the gamma of their range.
    """

    acceptance: Acceptance
    ranges: tuple[Range, ...]
    speed_ups: Mapping[int, Estimate]

    @property
    def gamma(self) -> int:
        """The longest draft; 0 if nothing is to be drafted."""
        return max(found.gamma for found in self.ranges)

    @property
    def greedy(self) -> bool:
        """Is the target decoded greedily, so that drafts are compared with its argmax?"""
        return self.acceptance.temperature == 0

    @property
    def sampled(self) -> bool:
        """Do drafts have to be sampled from the draft model's law, for the acceptance to be what it is?"""
        return self.acceptance.point_mass is False and not self.greedy


@dataclass(frozen=True)
class Settings:
    """How an engine is told what to do.

    Attributes:
        text: flags, JSON, YAML or Python, ready to be used.
        remarks: what the engine does otherwise than the schedule says.
    """

    text: str
    remarks: tuple[str, ...] = ()


class Engine(ABC):
    """A serving engine, or a file format in which one hands acceptance over.

    Attributes:
        name: as registered.
        read_from: the version whose names these are.
        methods: what it calls our drafters; it can run no others.
        most_sequences: it drafts for no more sequences at a time; None: as many as it serves.
    """

    name: ClassVar[str]
    read_from: ClassVar[str]
    methods: ClassVar[Mapping[str, str]] = {}
    most_sequences: ClassVar[int | None] = None

    def read(self, given: Source, before: Source | None = None) -> list[Acceptance]:
        """The acceptance in a text; nothing where it has none in this engine's formats.

        Args:
            before: an earlier scrape of the same counters, to count from.

        Raises:
            UsageError: it is in one of the formats, and damaged; says where.
        """
        return []

    @classmethod
    def ours(cls, method: Any) -> str:
        """Our name of the drafter that it calls ``method``; empty if there is none."""
        return next((name for name, theirs in cls.methods.items() if theirs == method), "")

    def cannot(self, acceptance: Acceptance) -> str | None:
        """Why the engine cannot accept as this drafter and rule do, a sentence's end ("it has no ..."); None if it can.

        ``drafter``, ``verifier`` and ``point_mass`` may be unknown; what nobody knows is no reason.
        """
        if acceptance.drafter and acceptance.drafter not in self.methods:
            known = ", ".join(sorted(self.methods)) or "none"
            return f"it has no drafter {acceptance.drafter}, of ours it knows {known}"
        if not acceptance.chain:
            return "its drafts are chains, these are trees"
        policy = acceptance.options.get("policy")
        if isinstance(policy, Mapping) and policy.get("name", "static") != "static":
            return f"its drafts are of one length, these end by the policy {policy['name']}"
        return None

    def scheduled(self, acceptance: Acceptance) -> bool:
        """May the length of these drafts depend on the batch size, 0 (do not draft) among them?"""
        return False

    @abstractmethod
    def export(self, schedule: Schedule) -> Settings:
        """Settings that make the engine do what ``schedule`` says; `cannot` has let its acceptance pass.

        Raises:
            UsageError: something that the settings need is not known: which drafter, which model.
        """
