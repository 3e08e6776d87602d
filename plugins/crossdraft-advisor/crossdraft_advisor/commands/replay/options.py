"""Options of ``crossdraft replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from crossdraft.framework.cli.options.run import ForceOptions, JsonOptions, SegmentOptions
from crossdraft.framework.cli.options.sampling import SamplingOptions
from crossdraft.framework.cli.options.trust import TrustOptions
from crossdraft.framework.contracts.command import Argument
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import UnknownNameError, UsageError

from ...engines.counter_definitions import DEFINITIONS


class ReplayOptions(SamplingOptions, SegmentOptions, ForceOptions, TrustOptions, JsonOptions):
    """Options of `Replay`.

    Raises:
        UsageError: options that cannot be combined.
    """

    sources: Annotated[tuple[str, ...], Argument("SOURCE", positional=True)] = Field(
        description="directory of a finished run or of one of its cells, JSONL file of responses, directory that the "
        "datasets library can read, or hf:org/name"
    )
    drafter: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        description="drafter: a name, or a mapping as in recipes: '{name: prompt-lookup, max_ngram: 4}'; if it sets "
        "gamma, only that length is replayed (repeatable)"
    )
    verifier: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        (), description="verifier (repeatable; default: all compatible)"
    )
    gamma: Annotated[str, Argument("LIST")] = Field("1-16", description="draft lengths, as in 1-8,12")
    policy: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        ("static",),
        description="length policy: static, oracle, heuristic, heuristic:START or confidence:0.2,0.4 (thresholds); all "
        "but static use the greatest gamma (repeatable)",
    )
    as_: Annotated[tuple[str, ...], Argument("ENGINE")] = Field(
        (),
        description=f"also compute the counters that this engine would report for the responses, docs/engines.md: "
        f"{', '.join(DEFINITIONS)}; several with --counted (repeatable)",
    )
    counted: Annotated[tuple[str, ...], Argument("FILE", requires="as_")] = Field(
        (),
        description="log or scrape of the engine of --as while it decoded SOURCE: compare its counters and name the "
        "cause of a difference (repeatable, with a SOURCE and --as each)",
    )
    k: Annotated[str, Argument("LIST")] = Field(
        "", description="numbers of i.i.d. sequences (default: the drafter's K)"
    )
    target: Annotated[tuple[str, ...], Argument("MODEL")] = Field(
        (),
        description="target, for its tokenizer and its log-probabilities; several are checkpoints in order, each with "
        "its own responses as SOURCE (repeatable)",
    )
    drop: Annotated[float, Argument("D")] = Field(
        0.05, gt=0, lt=1, description="with several targets: relative loss of block efficiency that is too large"
    )
    logprobs: Literal["processed"] | None = Field(
        None,
        description="log-probabilities in files are after temperature and truncation (vLLM: processed_logprobs); not "
        "needed at temperature 0, or at 1 without truncation",
    )
    limit: int | None = Field(None, ge=1, description="replay the first N responses")
    column: Annotated[str | None, Argument("NAME")] = Field(None, description="text column of a data set")
    split: Annotated[str | None, Argument("NAME")] = Field(None, description="split of a data set")
    prompt_tokens: int = Field(64, ge=1, description="prompt length for texts of a data set")
    tokens: int = Field(128, ge=1, description="maximum response length for texts of a data set")
    dtype: str = Field("auto", description="dtype of the models")
    device: str = Field("auto", description="device of the models")
    out: Annotated[Path | None, Argument("FILE")] = Field(
        None, description="write per-position results to a Parquet file"
    )
    csv: Annotated[bool, Argument(exclusive="format")] = Field(
        False, description="print CSV: a row per drafter, verifier, K, gamma and category"
    )

    @property
    def known_sampling(self) -> Sampling | None:
        """Sampling parameters; None if none is given, so that the responses' own are used."""
        return self.sampling if self.model_fields_set & Sampling.model_fields.keys() else None

    @model_validator(mode="after")
    def _combinable(self) -> ReplayOptions:
        for engine in self.as_:
            if engine not in DEFINITIONS:
                raise UnknownNameError.among("engine with known counters", engine, DEFINITIONS)
        many = len(self.target) > 1
        if "drop" in self.model_fields_set and not many:
            raise UsageError("--drop requires several --target: it is a loss from the first to another one")
        mode = "several targets" if many else "--counted" if self.counted or len(self.as_) > 1 else ""
        for name in ("csv", "out", "segment") if mode else ():
            if getattr(self, name):
                raise UsageError(f"--{name} cannot be combined with {mode}; use --json, or replay them one by one")
        if self.known_sampling is not None and "temperature" not in self.model_fields_set:
            raise UsageError("sampling parameters require --temperature; add it")
        return self
