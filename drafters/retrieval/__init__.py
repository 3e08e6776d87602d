"""Drafters that copy what was said before; no model."""
