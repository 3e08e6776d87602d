"""Numbers as the tables of golden values write them."""

from fractions import Fraction
from typing import Any

import pytest


def number(text: str) -> Any:
    """A golden value with the precision it was written with."""
    return pytest.approx(float(Fraction(text)), abs=1e-6 if "." in text else 1e-9)
