"""Versions of installed distributions."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version


@cache
def release(distribution: str) -> str:
    """Version of an installed distribution, or an empty string; cached, because the lookup reads files."""
    try:
        return (version(distribution) or "") if distribution else ""
    except Exception:  # it is not installed, or its metadata is damaged
        return ""
