"""Fixtures of the tests of the engine."""

from decoding_fixtures import answers, expected  # noqa: F401
