"""Fixtures of the tests of `generate`, `stream` and `custom_generate`."""

from decoding_fixtures import answers, expected, model  # noqa: F401
