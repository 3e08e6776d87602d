"""Versions of installed distributions."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def release(distribution: str) -> str:
    """Version of an installed distribution, or an empty string; cached, because the lookup reads files."""
    try:
        return version(distribution) if distribution else ""
    except PackageNotFoundError:
        return ""
