"""Sampling parameters from ``--temperature``, ``--top-k``, ``--top-p`` and ``--min-p``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ...errors import UsageError

if TYPE_CHECKING:
    from ...contracts.sampling import Sampling


def sampling_from(args: argparse.Namespace) -> Sampling:
    """Sampling parameters from the options, with defaults for those not set. Raises UsageError."""
    from pydantic import ValidationError

    from ...contracts.options import fault
    from ...contracts.sampling import Sampling

    values = {key: value for key in Sampling.model_fields if (value := getattr(args, key, None)) is not None}
    try:
        return Sampling.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--{str(first['loc'][0]).replace('_', '-')}: {fault(first)}") from None
