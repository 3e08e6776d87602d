"""Fixtures of the tests of `generate` and `stream`."""

from decoding_fixtures import answers, expected, model  # noqa: F401
