"""Serving engines: acceptance that they report, settings that they take, servers that a run measures."""
