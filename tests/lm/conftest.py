"""Fixtures of the tests of models."""

from decoding_fixtures import answers, expected, fresh_warnings, small_buckets  # noqa: F401
