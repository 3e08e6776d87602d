"""Fixtures of a run's tests."""

from bench_fixtures import bench, certificates_are_not_counted, models, own_place, recipe

__all__ = ["bench", "certificates_are_not_counted", "models", "own_place", "recipe"]
