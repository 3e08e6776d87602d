"""The simulated CUDA device under its public name: ``pytest -n0 -p crossdraft.testing.simulated_cuda``."""

from ..framework.testing.simulated_cuda import Counts, Device, device, pytest_configure

__all__ = ["Counts", "Device", "device", "pytest_configure"]
