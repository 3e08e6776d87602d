"""Fixtures of the tests of passes by OpenVINO."""

from decoding_fixtures import fresh_warnings  # noqa: F401
