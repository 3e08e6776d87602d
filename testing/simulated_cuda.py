"""The former name of crossdraft-simulated-cuda: ``pytest -n0 -p crossdraft_simulated_cuda``."""

from ..framework.plugins import installing

try:
    from crossdraft_simulated_cuda import Counts, Device, device, pytest_configure
except ModuleNotFoundError as error:
    if error.name != "crossdraft_simulated_cuda":
        raise
    remedy = installing("crossdraft-simulated-cuda")
    raise ModuleNotFoundError(f"{__name__} is part of crossdraft-simulated-cuda; {remedy}", name=error.name) from None

__all__ = ["Counts", "Device", "device", "pytest_configure"]
