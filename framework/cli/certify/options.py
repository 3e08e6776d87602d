"""Options of ``crossdraft certify``; the labels of drafts are defined in `DRAFTS`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from ...certificate.drafts import DRAFTS, TRANSLATED
from ...contracts.command import Argument
from ...util.limits import MOST_SEED
from ..options.run import ForceOptions, JsonOptions
from ..options.sampling import SamplingOptions
from ..options.trust import TrustOptions

_LABELS = "; ".join(f"{label}: {kind.summary}" for label, kind in (DRAFTS | TRANSLATED).items())
_MODEL = "test on a real model"


class ModelOptions(SamplingOptions, TrustOptions, ForceOptions):
    """Options of ``--model``, see `model`."""

    model: Annotated[str, Argument("NAME", group=_MODEL)] = Field(
        "", description="target: a name, a directory or a Hub id"
    )
    prompt: Annotated[tuple[str, ...], Argument("TEXT", group=_MODEL)] = Field((), description="prompt (repeatable)")
    raw: Annotated[bool, Argument(group=_MODEL)] = Field(False, description="do not apply the chat template")
    draws: Annotated[int, Argument(group=_MODEL)] = Field(
        1_000_000, ge=1, le=10**12, description="samples per prompt and verifier"
    )
    seed: Annotated[int, Argument(group=_MODEL), MOST_SEED] = Field(0, ge=0, description="random seed")
    batch: Annotated[int | None, Argument(group=_MODEL)] = Field(
        None, ge=1, le=2**20, description="samples per batch (default: depends on the vocabulary size)"
    )
    dtype: Annotated[str, Argument(group=_MODEL)] = Field("auto", description="dtype of the models")
    device: Annotated[str, Argument(group=_MODEL)] = Field("auto", description="device")
    out: Annotated[Path | None, Argument("DIR", group=_MODEL)] = Field(
        None, description="directory for histograms (PNG) and JSON"
    )


class CertifyOptions(ModelOptions, JsonOptions):
    """Options of ``crossdraft certify``."""

    toy: Annotated[Path | None, Argument("FILE")] = Field(
        None, description="JSON file of exact models (default: T0, G1 to G4, D6, W1 and W2, built in)"
    )
    verifier: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        (), description="verifier to certify (repeatable; default: all registered; with --model: all declared lossless)"
    )
    draft: Annotated[tuple[str, ...], Argument("LABEL")] = Field(
        (),
        description="kind of draft (repeatable; default: all; with --model: one compatible with the verifier). "
        + _LABELS,
    )
    drafter: Annotated[str, Argument("NAME")] = Field(
        "",
        description="certify this registered drafter with every compatible verifier; a name, or a mapping as in "
        "recipes: '{name: draft-model-tree, branching: [2, 1]}'. Its draft model is the toy's. With --model: the draft "
        "model, which must share the target's tokenizer",
    )
    drafter_option: Annotated[tuple[str, ...], Argument("KEY=VALUE")] = Field(
        (), description="option of --drafter, a YAML value (repeatable)"
    )
    steps: int | None = Field(
        None,
        ge=1,
        description="number of consecutive steps (default: 1; 2 for stateful verifiers and with --drafter)",
    )
    gamma: int | None = Field(
        None,
        ge=0,
        description="draft length, or maximum depth with --drafter (default: the toy's, or less if that takes "
        "minutes; with --model: 1, for which block and token verification agree)",
    )
    bounds: bool = Field(
        False,
        description="also print upper bounds of E[tau] in the first step of lossless verification: for chains (single "
        "draft), for verifiers that preserve the distribution of every step (LP), for any verifier (full information), "
        "and the largest Pr(tau >= 1) (root)",
    )
    verbose: Annotated[bool, Argument(short="-v")] = Field(
        False, description="print one row per pair and toy, and the reasons for skipped pairs"
    )
