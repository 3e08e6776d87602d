"""Fixtures of a run's tests."""

from bench_fixtures import bench, certificates, certificates_are_not_counted, models, own_place, recipe

__all__ = ["bench", "certificates", "certificates_are_not_counted", "models", "own_place", "recipe"]
