"""Fixtures of all tests; plugins/conftest.py gives them to those of the companions."""

from fixture_modules import pytest_configure

__all__ = ["pytest_configure"]
