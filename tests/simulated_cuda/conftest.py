"""Fixtures of the tests on the simulated device."""

from decoding_fixtures import fresh_warnings, small_buckets  # noqa: F401
