"""PyTorch's number of threads, and remarks on a group whose threads waited."""

import torch

from crossdraft.framework.runs.threads import disturbance, restored


def test_disturbed_group_gets_sentence() -> None:
    with restored():
        torch.set_num_threads(1)
        assert disturbance(0.5, 1.0) == ""
        torch.set_num_threads(2)
        assert disturbance(0.05, 1.0) == "" == disturbance(0.0, 0.0)
        assert "50% of the time" in disturbance(0.5, 1.0)
