"""Fixtures of tests with hostile input."""

from hostile_fixtures import in_time, refused, target  # noqa: F401
