"""Ties of logits: differences that the rounding of another computation can turn around."""

from __future__ import annotations

from ..contracts.models import LoadedModel

#: Largest difference of two logits that the rounding of another implementation can turn around, by dtype.
TIE = {"float32": 1e-3, "float16": 0.06, "bfloat16": 0.5}


def tie_of(target: LoadedModel) -> tuple[str, float]:
    """The dtype of a loaded target, and its `TIE`: the largest one for a backend whose models have no parameters."""
    parameters = getattr(target.model, "parameters", None)
    dtype = str(next(parameters()).dtype).removeprefix("torch.") if parameters is not None else "unknown"
    return dtype, TIE.get(dtype, max(TIE.values()))
