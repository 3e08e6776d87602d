"""Tests of the core that use a companion, if it is installed."""

from __future__ import annotations

import pytest

from crossdraft.framework import plugins


def has_command(name: str) -> bool:
    """True if an installed distribution provides the command."""
    return name in plugins.entries("commands")


def has_format(name: str) -> bool:
    """True if an installed distribution provides the format of ``crossdraft report``."""
    return name in plugins.entries("reports")


def needs_drafter(name: str) -> pytest.MarkDecorator:
    """Skip a test unless an installed distribution provides the drafter."""
    installed = name in plugins.entries("drafters")
    return pytest.mark.skipif(not installed, reason=f"the companion with the drafter {name} is not installed")


def needs_command(name: str) -> pytest.MarkDecorator:
    """Skip a test unless an installed distribution provides the command."""
    return pytest.mark.skipif(not has_command(name), reason=f"the companion with crossdraft {name} is not installed")


#: Skips a test unless crossdraft-page is installed.
needs_page = pytest.mark.skipif(not has_format("html"), reason="crossdraft-page is not installed")


#: Skips a test unless the preparation of hybrid models is installed.
needs_recurrent_layers = pytest.mark.skipif(
    "recurrent-layers" not in plugins.entries("preparations"), reason="the companion crossdraft-layers is not installed"
)

#: Skips a test unless runs with a launcher are installed.
needs_launchers = pytest.mark.skipif(
    "local" not in plugins.entries("launchers"), reason="the companion crossdraft-cluster is not installed"
)
