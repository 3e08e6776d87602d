"""Sampling parameters from ``--temperature``, ``--top-k``, ``--top-p`` and ``--min-p``."""

from __future__ import annotations

import argparse

from ...contracts.sampling import Sampling
from ...errors import UsageError


class SamplingOptions(Sampling):
    """``--temperature``, ``--top-k``, ``--top-p`` and ``--min-p``; options of a command that inherits from this."""

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters, with defaults for those not given."""
        return Sampling(**{key: getattr(self, key) for key in self.model_fields_set & Sampling.model_fields.keys()})


def sampling_from(args: argparse.Namespace) -> Sampling:
    """Sampling parameters from the options, with defaults for those not set. Raises UsageError."""
    from pydantic import ValidationError

    from ...contracts.options import fault

    values = {key: value for key in Sampling.model_fields if (value := getattr(args, key, None)) is not None}
    try:
        return Sampling.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--{str(first['loc'][0]).replace('_', '-')}: {fault(first)}") from None
