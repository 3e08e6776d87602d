"""Fixtures of all tests; plugins/conftest.py gives them to those of the companions."""

pytest_plugins = ["suite_fixtures", "run_fixtures", "head_fixtures", "launched_runs"]
