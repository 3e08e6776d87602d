"""Kinds of training, one per file."""
