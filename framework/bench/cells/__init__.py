"""Measurement of one cell: by the loop of this process, or by an engine's server."""
