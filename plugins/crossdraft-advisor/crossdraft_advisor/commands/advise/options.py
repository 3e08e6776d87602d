"""Options of ``crossdraft advise``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from crossdraft.framework import plugins
from crossdraft.framework.cli.options.machine import BatchSizes, Contexts
from crossdraft.framework.cli.options.run import JsonOptions
from crossdraft.framework.cli.options.trust import TrustOptions
from crossdraft.framework.contracts.command import Argument
from crossdraft.framework.errors import UnknownNameError, UsageError
from crossdraft.framework.util.limits import MOST_LEVELS, MOST_PROMPTS, MOST_TOKENS

from .costs import CostOptions

_REPLAYED = "acceptance by replaying responses (docs/replay.md)"
_ABOUT = "facts missing in an engine's numbers"


class AdviseOptions(CostOptions, TrustOptions, JsonOptions):
    """Options of `Advise`.

    Raises:
        UsageError: unknown names, or options that cannot be combined.
    """

    sources: Annotated[tuple[str, ...], Argument("SOURCE", positional=True)] = Field(
        (),
        description="source of acceptance: directory of a finished run; file or URL of an engine's log, metrics or "
        "responses",
    )
    batch_size: BatchSizes = Field((1, 2, 4, 8, 16, 32, 64), description="batch sizes")
    context: Contexts = Field((), description="context lengths (as measured in a run; else 1024)")
    export: Annotated[str, Argument("ENGINE")] = Field(
        "", description="print settings for an engine, see crossdraft list engines"
    )
    replay: Annotated[tuple[str, ...], Argument("SOURCE", group=_REPLAYED)] = Field(
        (), description="recorded responses (repeatable)"
    )
    prompts: Annotated[str, Argument("SOURCE", group=_REPLAYED, requires="target")] = Field(
        "", description="prompts; their responses are decoded here without drafting"
    )
    responses: Annotated[int, Argument("N", group=_REPLAYED, requires="prompts"), MOST_PROMPTS] = Field(
        32, ge=1, description="number of prompts to decode"
    )
    max_new_tokens: Annotated[int, Argument("N", group=_REPLAYED, requires="prompts"), MOST_TOKENS] = Field(
        128, ge=1, description="maximum tokens per response"
    )
    since: Annotated[str, Argument("FILE", group=_ABOUT)] = Field(
        "", description="an earlier scrape of the same counters, to subtract"
    )
    drafter: Annotated[tuple[str, ...], Argument("NAME", group=_ABOUT)] = Field(
        (),
        description="drafter (draft-model, eagle3, prompt-lookup, ...); for a replay a name, or a mapping such as "
        "'{name: .., model: ..}' (repeatable)",
    )
    verifier: Annotated[tuple[str, ...], Argument("NAME", group=_ABOUT)] = Field(
        (), description="verifier (token, block, ...); for a replay: all compatible ones (repeatable)"
    )
    temperature: Annotated[float | None, Argument("T", group=_ABOUT)] = Field(
        None, ge=0, description="temperature of the target; selects cells of a run"
    )
    gamma: Annotated[int | None, Argument("N", group=_ABOUT), MOST_LEVELS] = Field(
        None, ge=1, description="draft length, if only the mean acceptance length is known"
    )
    draft_path: Annotated[str, Argument("PATH", group=_ABOUT, requires="export")] = Field(
        "", description="draft model in the exported settings"
    )
    overlap: Annotated[bool, Argument(group="cost of a step")] = Field(
        False, description="assume that drafting and verification overlap"
    )

    @property
    def replays(self) -> bool:
        """True if acceptance is computed by replaying responses."""
        return bool(self.replay or self.prompts)

    @model_validator(mode="after")
    def _combinable(self) -> AdviseOptions:
        for kind, names in (("drafter", self.drafter), ("verifier", self.verifier), ("engine", (self.export,))):
            for name in names:
                if name and name not in (known := plugins.entries(f"{kind}s")) and not name.lstrip().startswith("{"):
                    raise UnknownNameError.among(kind, name, known)
        if bool(self.sources) + bool(self.replay) + bool(self.prompts) != 1:
            raise UsageError(
                "advise requires one source of acceptance: a run, an engine's log or metrics, --replay or --prompts"
            )
        if self.export and len(self.context) > 1:
            raise UsageError("--export takes one --context: engine settings do not depend on the context length")
        if not self.replays:
            if len(self.drafter) > 1 or len(self.verifier) > 1 or any("{" in name for name in self.drafter):
                raise UsageError(
                    "several drafters or verifiers, and options of drafters, require --replay or --prompts; an "
                    "engine's numbers are for one of each"
                )
            if self.trust_remote_code:
                raise UsageError("--trust-remote-code requires --replay or --prompts; no model is run without them")
            if self.target and self.cost:
                raise UsageError("--target and --cost cannot be combined: both give the cost of the target")
        elif not self.drafter:
            raise UsageError("--drafter is missing: give at least one drafter to replay")
        elif self.gamma is not None or self.since:
            raise UsageError("--gamma and --since are for an engine's numbers; a replay has all draft lengths")
        return self
