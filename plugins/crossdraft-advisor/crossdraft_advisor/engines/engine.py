"""The interface of serving engines for `crossdraft advise`: the settings with which they draft.

Engines are registered through the hook ``crossdraft_register_engines``.
"""

from __future__ import annotations

import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from crossdraft import Estimate, UsageError
from crossdraft.commands import kind_of
from crossdraft.framework import plugins
from crossdraft.models import refuse_adapter, refuse_quantized

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
    """One drafter and verifier for a server, with a draft length per batch size."""

    acceptance: Acceptance  # of the pair, at the longest draft of the schedule
    # contiguous from batch size 1; the last also applies to greater batch sizes. One range if the engine has one draft
    # length for all batch sizes.
    ranges: tuple[Range, ...]
    speed_ups: Mapping[int, Estimate]  # predicted speed-up by requested batch size, with the gamma of its range
    # acceptance of the pair at every known draft length, shortest first; empty if not computed
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

    def remarks(self, beyond: int | None = None) -> tuple[str, ...]:
        """Remarks on draft lengths beyond the last batch size, and on batch sizes where drafting is slower.

        ``beyond``: the engine's draft length beyond the last range; by default that of the last range.
        """
        remarks, last = [], self.ranges[-1]
        if len(self.ranges) > 1:
            gamma = last.gamma if beyond is None else beyond
            effect = f"it drafts with gamma {gamma}" if gamma else "it does not draft"
            remarks.append(f"beyond B = {last.high}, the greatest requested batch size, {effect}")
        elif slower := [str(b) for b, speed_up in self.speed_ups.items() if speed_up.value < 1 and self.gamma]:
            remarks.append(f"at B = {', '.join(slower)} drafting is slower than plain decoding and is not switched off")
        return tuple(remarks)


@dataclass(frozen=True)
class Settings:
    """Settings of an engine."""

    text: str  # flags, JSON, YAML or Python, ready to use
    remarks: tuple[str, ...] = ()  # differences between the engine's behaviour and the schedule


class Engine(ABC):
    """A serving engine, or a file format of acceptance that is written."""

    name: ClassVar[str]  # as registered
    read_from: ClassVar[str]  # the version of the engine that the option names are from
    methods: ClassVar[Mapping[str, str]] = {}  # the engine's name of each supported drafter
    # those that it has. At temperature 0, and on point masses, `block` accepts what `token` accepts.
    verifiers: ClassVar[tuple[str, ...]] = ("token", "greedy", "sample-match")
    # maximum number of sequences that it drafts for at a time; None = not limited
    most_sequences: ClassVar[int | None] = None
    # the definition of its counters, and the options with which crossdraft drafts as it does
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

        Raises UsageError if a required fact is unknown, such as the drafter or its model.
        """

    def method_of(self, acceptance: Acceptance) -> str:
        """The engine's name of the drafter. Raises UsageError if the drafter is unknown."""
        if not acceptance.drafter:
            known = ", ".join(sorted(self.methods))
            raise UsageError(f"the drafter of {acceptance.source} is unknown; give it as --drafter: {known}")
        return self.methods[acceptance.drafter]

    def model_of(self, acceptance: Acceptance) -> str:
        """The draft model. Raises UsageError if it is unknown."""
        model, name = acceptance.model, self.name
        if not model:
            raise UsageError(
                f"the settings of {name} require the draft model of {acceptance.drafter}; give it as --draft-path"
            )
        refuse_quantized(
            model, f"{name} does not quantise draft models on the fly; it requires quantised weights on disk"
        )
        refuse_adapter(model, f"{name} does not merge an adapter into its draft model")
        return model


def ngram_sizes(acceptance: Acceptance) -> dict[str, int]:
    """``min`` and ``max`` n-gram lengths of prompt lookup, with defaults if unknown."""
    options = acceptance.options
    return {"min": int(options.get("min_ngram", 1)), "max": int(options.get("max_ngram", 3))}


def match_remarks(acceptance: Acceptance, engine: str, *, shortest: bool = False) -> tuple[str, ...]:
    """Remarks on prompt lookup that was measured unlike the engine's, which copies the earliest match.

    ``shortest``: its n-grams may have one token only.
    """
    options, remarks = acceptance.options, []
    if acceptance.drafter != "prompt-lookup" or not options:  # counters of an engine
        return ()
    if options.get("match", "latest") != "first":
        remarks.append(
            f"{engine} copies the earliest match, and the acceptance was measured with the latest; use match: first"
        )
    sizes = ngram_sizes(acceptance)
    if shortest and sizes["min"] > 1:
        remarks.append(f"it looks up suffixes of 1 to {sizes['max']} tokens, not of {sizes['min']} to {sizes['max']}")
    return tuple(remarks)


def shell(flags: Mapping[str, Any]) -> str:
    """A quoted command line with one flag per line; those whose value is False or an empty text are left out."""
    lines = [(flag, *([] if value is True else [str(value)])) for flag, value in flags.items() if value]
    return " \\\n".join(map(shlex.join, lines))


def only_point_masses(acceptance: Acceptance, engine: str) -> str | None:
    """The reason why an engine that accepts only matching tokens does not support sampled drafts; None if it does."""
    if acceptance.temperature == 0 or acceptance.point_mass in (True, None):
        return None
    return (
        f"at temperature {acceptance.temperature or 'above 0'} {engine} drafts greedily and accepts matching samples "
        "of the target; these drafts were sampled"
    )


def synthetic_remarks(acceptance: Acceptance) -> tuple[str, ...]:
    """Remarks on an engine that simulates only the mean acceptance length, by its two neighbouring integers."""
    mean = sum(acceptance.marginal)
    low, share = math.floor(mean), mean - math.floor(mean)
    often = f"{low} tokens or, with probability {share:.2f}, {low + 1}" if share else f"{low} tokens"
    return (
        "the acceptance is synthetic: the output is not the target's",
        f"every step accepts {often}: the mean is that of the measurement, the standard deviation "
        f"{math.sqrt(share * (1 - share)):.2f} instead of {acceptance.spread():.2f}; vllm-synthetic has both",
    )


def not_servable(name: str) -> str:
    """The reason why engines cannot load a draft model: a directory without its embedding; empty if they can."""
    from crossdraft.models import resolve, shared_embedding_of

    if not name or (name not in plugins.entries("models") and kind_of(name) != "directory"):
        return ""  # a Hub id or a path on the machine of the engine
    if (shared := shared_embedding_of(resolve(name).path)) is None:
        return ""
    return (
        f"the directory of {name} lacks the token embedding, which it shares with {shared['model']}, so engines cannot "
        f"load it; run crossdraft train export draft-model {name} --target {shared['model']} --out DIR, and add "
        "--draft-path DIR"
    )
