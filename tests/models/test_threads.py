"""PyTorch's number of threads, and remarks on a group whose threads waited."""

import os
import sys
from typing import Any

import pytest
import torch

from crossdraft.framework.runs import threads
from crossdraft.framework.runs.threads import disturbance, one_thread


def test_disturbed_group_gets_sentence() -> None:
    with one_thread():
        assert disturbance(0.5, 1.0) == ""
        torch.set_num_threads(2)
        assert disturbance(0.05, 1.0) == "" == disturbance(0.0, 0.0)
        assert "50% of the time" in disturbance(0.5, 1.0)


@pytest.mark.parametrize(
    ("loaded", "own", "policy"),
    [
        (False, {}, "OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0"),
        (True, {}, "spin"),
        (False, {"GOMP_SPINCOUNT": "7"}, "GOMP_SPINCOUNT=7"),
    ],
)
def test_threads_sleep_in_this_process_alone(loaded: bool, own: dict[str, str], policy: str, monkeypatch: Any) -> None:
    """Not if PyTorch has read the policy, or the user set one; engines' servers have the user's."""
    if not loaded:
        monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(threads, "_own", {})
    before = {name: value for name, value in os.environ.items() if name not in threads.POLICY} | own
    monkeypatch.setattr(os, "environ", dict(before))
    threads.sleep_between_products()
    assert threads.wait_policy() == policy
    assert threads.environment_of_others() == before
