"""``--temperature``, ``--top-k`` and the like: the same way from options to a law in every command."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from ..contracts.sampling import Sampling


def sampling_from(args: argparse.Namespace) -> Sampling:
    """The sampling parameters among the options, those that are not given as they are by default. Raises UsageError."""
    from pydantic import ValidationError

    from ..contracts.options import fault
    from ..contracts.sampling import Sampling

    given = {key: value for key in Sampling.model_fields if (value := getattr(args, key, None)) is not None}
    try:
        return Sampling.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--{str(first['loc'][0]).replace('_', '-')}: {fault(first)}") from None
