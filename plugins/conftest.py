"""Fixtures that the tests of companions share with those of the core."""

pytest_plugins = ["suite_fixtures", "run_fixtures", "head_fixtures", "launched_runs"]
