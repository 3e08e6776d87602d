"""Drafters that copy what was said, or nearly said, before; no model."""
