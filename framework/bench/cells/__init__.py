"""Cells of a run."""
