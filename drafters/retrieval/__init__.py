"""Drafters without a model that reuse earlier tokens and candidates."""
