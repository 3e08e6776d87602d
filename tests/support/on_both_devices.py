"""Runs on the CPU and on the simulated device, for tests with the marker ``simulated``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossdraft_simulated_cuda import device
from crossdraft_simulated_cuda.device_comparison import collected_warnings, kept_tensors


def on_both_devices(run: Callable[[str], Any], warning: str = "") -> Any:
    """Assert that ``run("cuda")`` returns what ``run("cpu")`` does, and keeps no tensor of a capture.

    It logs no further warning, or one with these words.
    """
    with collected_warnings() as expected:
        want = run("cpu")
    device.forget()
    with collected_warnings() as logged:
        result = run("cuda")
    assert result == want
    further = sorted(logged - expected)
    assert not further or (warning and warning in further[0] and len(further) == 1), further
    assert not (kept := kept_tensors()), kept
    return result
