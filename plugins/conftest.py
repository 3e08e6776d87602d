"""Fixtures that the tests of companions share with those of the core."""

from fixture_modules import pytest_configure

__all__ = ["pytest_configure"]
