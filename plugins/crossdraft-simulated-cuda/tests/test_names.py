"""The contract kit with and without this distribution."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossdraft.testing import VerifierContract
from crossdraft.verifiers.token import Token


@pytest.mark.thorough
def test_third_party_runs_the_kit_on_the_device(tmp_path: Path) -> None:
    """In a folder without a conftest.py, whose imports would come before the plug-in."""
    (tmp_path / "test_it.py").write_text(
        "from crossdraft.testing import VerifierContract\n"
        "from crossdraft.verifiers.token import Token\n\n\n"
        "class TestIt(VerifierContract):\n    verifier = Token\n",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "crossdraft_simulated_cuda",
        "-p",
        "no:cacheprovider",
        "-k",
        "on_cuda",
    ]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_kit_on_gpu_without_distribution_names_remedy(monkeypatch: Any) -> None:
    contract: Any = type("Contract", (VerifierContract,), {"verifier": Token})()
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True))
    for module in ("crossdraft_simulated_cuda", "crossdraft_simulated_cuda.device_comparison"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(pytest.skip.Exception, match="pip install plugins/crossdraft-simulated-cuda"):
        contract.test_on_cuda()
