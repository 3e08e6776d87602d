"""Prices of drafting on a server that nothing was measured on: the prior of step costs for an engine.

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

#: Engines that serve many requests in one batch; others run on one machine for one user.
SERVING = ("vllm", "sglang")


@cache
def _fitted() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("prices.yaml").read_text(encoding="utf-8"))


def price_of(engine: str | None, batch_size: float) -> Prior:
    """The prior of step costs on an engine.

    Args:
        engine: name of the engine in lower case; None if it is unknown.
        batch_size: running requests. Beyond the largest one of the corpus the price is as much less certain as a speed
            measured at another batch size.

    Raises:
        UsageError: a batch size that is not positive.
    """
    if not 0 < batch_size < math.inf:
        raise UsageError(f"a batch size of {batch_size:g} is not possible")
    fitted = _fitted()
    prior = prior_of(fitted["prior"])
    known = {engine, "serving" if engine in SERVING else engine and "local"}
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
