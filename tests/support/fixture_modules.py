"""The modules of shared fixtures, which conftest.py files load."""

import pytest

MODULES = ("suite_fixtures", "process_seconds", "call_sites", "run_fixtures", "head_fixtures", "launched_runs")
pytest.register_assert_rewrite(*MODULES)  # a conftest.py of a folder may import some earlier


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, except in the process that distributes tests to others: importing PyTorch takes seconds."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        for module in MODULES:
            config.pluginmanager.import_plugin(module)
