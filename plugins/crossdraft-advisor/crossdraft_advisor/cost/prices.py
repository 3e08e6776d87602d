"""Prices of drafting on a server that nothing was measured on: the prior of step costs for a drafter and an engine.

A property shifts the centre of the prior if that predicts published series of sources that were left out better
(docs/lab-notes.md): so far only that the engine is a server's. Blocks, draft models, lookups and experts have no shift.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from crossdraft.framework.errors import UsageError

from .step_cost import PER_OCTAVE, Prior, prior_of

#: Kinds of drafters: heads that draft one token after another (EAGLE, MTP, Medusa), heads that draft a block (DFlash,
#: DSpark), models of their own, and lookups (n-grams, suffixes).
KINDS = ("sequential", "block", "draft-model", "n-gram")
#: Engines that serve many requests in one batch; others run on one machine for one user.
SERVING = ("vllm", "sglang")


def drafter_kind(drafter: str, *, looks_up: bool = False) -> str:
    """The kind of a drafter by its name, one of `KINDS`; ``sequential`` if it is unknown.

    Args:
        looks_up: it has no model.
    """
    if drafter in ("dflash", "dspark", "p-eagle", "pass"):
        return "block"
    if drafter.startswith("draft-model"):
        return "draft-model"
    return "n-gram" if looks_up else "sequential"


@cache
def _fitted() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("prices.yaml").read_text(encoding="utf-8"))


def price_of(kind: str, engine: str | None, experts: bool | None, batch_size: float) -> Prior:
    """The prior of step costs for a kind of drafter on an engine.

    Args:
        kind: one of `KINDS`.
        engine: name of the engine in lower case; None if it is unknown.
        experts: the target is a mixture of experts; None if it is unknown.
        batch_size: running requests. Beyond the largest one of the corpus the price is as much less certain as a speed
            measured at another batch size.

    Raises:
        UsageError: an unknown kind, or a batch size that is not positive.
    """
    if kind not in KINDS:
        raise UsageError(f"{kind!r} drafters have no price; use one of: {', '.join(KINDS)}")
    if not 0 < batch_size < math.inf:
        raise UsageError(f"a batch size of {batch_size:g} is not possible")
    fitted = _fitted()
    prior = prior_of(fitted["prior"])
    known = {kind, engine, "serving" if engine in SERVING else engine and "local", "experts" if experts else None}
    octaves = max(0.0, math.log2(batch_size / fitted["largest_batch_size"]))
    centre, variance = list(prior.centre), [scale**2 + (PER_OCTAVE * octaves) ** 2 for scale in prior.scale]
    for shift in fitted["shifts"]:
        axis = ("log_a", "log_b").index(shift["axis"])
        if shift["of"] in known:
            centre[axis] += shift["by"]
            variance[axis] += shift["deviation"] ** 2
        elif engine is None and shift["of"] == "serving":  # either is as likely
            centre[axis] += shift["by"] / 2
            variance[axis] += (shift["by"] / 2) ** 2 + shift["deviation"] ** 2
    return replace(prior, centre=(centre[0], centre[1]), scale=(math.sqrt(variance[0]), math.sqrt(variance[1])))
