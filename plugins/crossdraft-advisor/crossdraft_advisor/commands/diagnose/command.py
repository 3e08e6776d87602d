"""``crossdraft diagnose``: the likely cause of a low acceptance rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from crossdraft.framework.cli.options.run import JsonOptions
from crossdraft.framework.cli.options.sampling import SamplingOptions
from crossdraft.framework.cli.options.trust import TrustOptions
from crossdraft.framework.contracts.command import Argument, Command
from crossdraft.framework.errors import UsageError
from crossdraft.framework.util.limits import MOST_PROMPTS, MOST_REPLAYED, MOST_TOKENS

from ...engines.counter_definitions import DEFINITIONS

if TYPE_CHECKING:
    from crossdraft.framework.api.build import Configured

_COUNTERS = "what an engine counted (without a model)"


class Diagnose(SamplingOptions, TrustOptions, JsonOptions, Command):
    """The cause of a low acceptance rate: from counters, or by trials of common mistakes on responses.

    Raises UsageError: options that cannot be combined; a drafter that cannot be replayed.
    """

    name: ClassVar[str] = "diagnose"

    counters: Annotated[tuple[str, ...], Argument("SOURCE", group=_COUNTERS)] = Field(
        (),
        description="log, metrics or responses of an engine, or a mapping with the circumstances: "
        "'{source: FILE, temperature: 0, batch_size: 1, context: 512}' (one, or two to compare)",
    )
    target: Annotated[str, Argument("MODEL", requires="drafter")] = Field("", description="target model")
    drafter: Annotated[str, Argument("NAME", requires="target")] = Field(
        "", description="drafter: a name, or a mapping as in recipes: '{name: eagle3, model: my-heads}'"
    )
    files: Annotated[bool, Argument(requires="drafter")] = Field(
        False, description="how engines read the keys of the heads' config.json; no model is run"
    )
    replay: Annotated[tuple[str, ...], Argument("SOURCE", requires="drafter")] = Field(
        (), description="recorded responses, see crossdraft replay (default: decode prompts; repeatable)"
    )
    as_: Annotated[str, Argument("ENGINE", requires="counters")] = Field(
        "", description=f"engine that counted --counters, to match it with replays: {', '.join(DEFINITIONS)}"
    )
    counted: Annotated[Literal["", "replay", "other"], Argument("RESPONSES", requires="counters")] = Field(
        "",
        description="responses that --counters are of: those of --replay, or other ones (default: recognised by the "
        "number of tokens)",
    )
    or_model: Annotated[tuple[str, ...], Argument("MODEL", requires="counters")] = Field(
        (), description="further heads or draft model that the server may have loaded: another checkpoint (repeatable)"
    )
    prompts: Annotated[str, Argument("SOURCE")] = Field("builtin", description="prompts")
    responses: Annotated[int, MOST_PROMPTS] = Field(
        16, ge=1, description="number of prompts to decode, or of recorded responses to replay"
    )
    max_new_tokens: Annotated[int, MOST_TOKENS] = Field(64, ge=1, description="maximum tokens per response")
    gamma: Annotated[int, MOST_REPLAYED] = Field(4, ge=1, description="draft length")
    dtype: str = Field("auto", description="dtype of the models")
    device: str = Field("auto", description="device of the models")

    @model_validator(mode="after")
    def _has_an_input(self) -> Diagnose:
        if not self.target and not self.counters:
            raise UsageError(
                "diagnose requires --counters (what an engine counted), or --target and --drafter (models to replay)"
            )
        if self.target and self.counters and not self.files and self.as_ not in DEFINITIONS:
            raise UsageError(
                f"--counters with a target requires --as, the engine that counted: one of {', '.join(DEFINITIONS)}"
            )
        return self

    def run(self) -> int:
        if not self.target:
            from .counters import signatures_of

            print(signatures_of(self.counters, {}, self.json_))
        elif self.files:
            from .responses import files_of

            print(files_of(self.configured(), self.target, self.json_))
        else:
            from .responses import replayed_of

            print(replayed_of(self, self.configured()))
        return 0

    def configured(self) -> Configured:
        """Class and config of the drafter."""
        from crossdraft.framework.api.build import configured
        from crossdraft.framework.recipe.recipe import Strategy

        strategy = Strategy.parse(self.drafter, "--drafter")
        return configured("drafters", {"name": strategy.name, **strategy.config})
