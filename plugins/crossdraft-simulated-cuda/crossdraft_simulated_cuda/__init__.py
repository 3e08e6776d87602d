"""A simulated CUDA device for tests: ``pytest -n0 -p crossdraft_simulated_cuda``, see `simulated_device`."""

from .simulated_device import Counts, Device, device, host_only, installed, pytest_configure

__all__ = ["Counts", "Device", "device", "host_only", "installed", "pytest_configure"]
