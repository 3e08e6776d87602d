"""Fixtures of the tests of layers."""

from decoding_fixtures import fresh_warnings  # noqa: F401
