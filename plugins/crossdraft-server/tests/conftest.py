"""Fixtures of decoded responses."""

from decoding_fixtures import answers, expected, model  # noqa: F401
